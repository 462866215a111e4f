"""Writes in place into what is kept from autograd, by ``no_grad`` or ``detach()``.

They change numbers that autograd knows under another name: in torch those keep the gradient that
they had. A trace has one name for both, by which the gradient would go the way of the write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import memory_of
from .._straight_through import with_gradient_of
from .._trees import tree_leaves, tree_map
from .signature import differentiable

DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_DETACH = {Tensor.detach, torch.detach}
_OPERATORS = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip
# What changes a tensor, but not its numbers.
_NO_NUMBERS = {
    "requires_grad_", "detach_", "share_memory_", "rename_", "unsqueeze_", "squeeze_", "t_",
    "transpose_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "as_strided_", "set_",
}  # fmt: skip

Run = Callable[[Any, Any, Any], Any]


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that a call writes in place, if it does."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    underscored = name.endswith("_") and not name.endswith("__") and name not in _NO_NUMBERS
    writes = underscored or name in _OPERATORS or func == _SET_DATA or kwargs.get("inplace")
    return args[0] if writes and args and isinstance(args[0], Tensor) else None


class Hidden:
    """The other names of what autograd knows, in the run of ``argument``, a step or a loss.

    By id or by memory, and kept, so that none comes twice.
    """

    def __init__(self, argument: str) -> None:
        self.argument = argument
        # With what each is a name of, or None if that came by .data.
        self._names: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._constants: dict[int, Tensor] = {}  # made under no_grad: autograd knows none of it

    def note(self, run: Run, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """After a call that writes nothing: which of its results are other names."""
        hides = func == DATA or func in _DETACH or not torch.is_grad_enabled()
        given = _tensors((args, kwargs))
        if not hides and not any(id(leaf) in self._names for leaf in given):
            return
        memory = {memory_of(leaf) for leaf in given}
        seen = {memory_of(leaf) for leaf in given if hides or id(leaf) in self._names}
        results = _tensors(result)
        found = [leaf for leaf in results if memory_of(leaf) in seen - self._constants.keys()]
        if not torch.is_grad_enabled():
            new = {memory_of(leaf): leaf for leaf in results}
            self._constants |= {at: leaf for at, leaf in new.items() if at not in memory}
        if not found:
            return
        if func == DATA or any(self._source(leaf) is None for leaf in given):
            sources: list[Tensor | None] = [None] * len(results)
        else:
            args, kwargs = tree_map(self._source, (args, kwargs))
            with torch.enable_grad():
                sources = (
                    [*map(self._source, given)]
                    if func in _DETACH
                    else [*_tensors(run(func, args, kwargs))]
                )
        pairs = zip(results, sources, strict=True)
        self._names |= {id(leaf): (leaf, of) for leaf, of in pairs if any(leaf is f for f in found)}

    def _source(self, leaf: Any) -> Any:
        return self._names[id(leaf)][1] if id(leaf) in self._names else leaf

    def write(self, run: Run, func: Any, target: Tensor, args: Any, kwargs: Any) -> Any:
        """A call that writes into ``target``."""
        source = self._source(target)
        if func == _SET_DATA or (source is None and differentiable(target)):
            raise RuntimeError(
                f"{self.argument} writes through .data, which autograd does not see: the gradient "
                "would be that of other numbers. For new values with the gradient of the old ones "
                "write h + (new - h).detach()."
            )
        is_seen = source is target and torch.is_grad_enabled()
        if is_seen or not differentiable(target) or memory_of(target) in self._constants:
            return run(func, args, kwargs)
        own = target.detach().clone()
        args, kwargs = tree_map(lambda leaf: own if leaf is target else leaf, (args, kwargs))
        with torch.enable_grad():
            result = run(func, args, kwargs)
            source.copy_(with_gradient_of(own, source))
        return tree_map(lambda leaf: target if leaf is own else leaf, result)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
