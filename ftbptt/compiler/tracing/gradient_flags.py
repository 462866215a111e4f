"""What ``requires_grad`` says in a step or loss: as in the loop, not as of the fake tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..._compat.running import is_from_outside, memory_of
from ..._trees import differentiable, tree_leaves


class GradientFlags:
    """Which tensors of a trace do not require a gradient in the loop.

    ``constants`` do not, such as the inputs; what was detached or made under ``no_grad`` does not,
    nor what is computed of such alone. All else does: parameters, and the state, which does from a
    segment's second step on. Looked up by id; the references keep ids from being reused.
    """

    def __init__(self, constants: Iterable[Tensor] = ()) -> None:
        self._constants = {id(leaf): leaf for leaf in constants}

    def of(self, value: Tensor) -> bool:
        """Whether the loop's tensor requires a gradient."""
        if not differentiable(value) or id(value) in self._constants:
            return False
        return value.requires_grad if is_from_outside(value) else True

    def require(self, value: Tensor) -> None:
        """Called for ``requires_grad_()``."""
        self._constants.pop(id(value), None)

    def note(self, operands: Any, result: Any, *, hides: bool) -> None:
        """Called after each call that writes nothing; ``hides``: its result is detached."""
        if torch.compiler.is_dynamo_compiling():  # torch.cond, which is refused with a reason
            return
        if hides or not any(map(self.of, _tensors(operands))):
            self._constants |= {id(leaf): leaf for leaf in _tensors(result)}

    def note_write(self, target: Tensor, operands: Any) -> None:
        """Called before a write into ``target``: views of one memory then require it together."""
        values = [leaf for leaf in _tensors(operands) if leaf is not target]
        if torch.is_grad_enabled() and any(map(self.of, values)):
            memory, known = memory_of(target), self._constants
            self._constants = {i: leaf for i, leaf in known.items() if memory_of(leaf) != memory}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
