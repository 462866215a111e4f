"""In-place writes that autograd does not see, under ``no_grad`` or after ``detach()``.

They change the values of a tensor that autograd knows, and in torch its gradient stays as it was.
In a trace the tensor and its detached alias are one value, so the gradient would follow the write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat.running import memory_of
from ..._trees import differentiable, tree_leaves, tree_map
from ..straight_through import with_gradient_of

DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
DETACH = {Tensor.detach, torch.detach}
_OPERATORS = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip
# In-place methods that do not change values.
_KEEP_VALUES = {
    "requires_grad_", "detach_", "share_memory_", "rename_", "unsqueeze_", "squeeze_", "t_",
    "transpose_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "as_strided_", "set_",
}  # fmt: skip

Run = Callable[[Any, Any, Any], Any]


def written_tensor(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that a call writes in place, if any."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    underscored = name.endswith("_") and not name.endswith("__") and name not in _KEEP_VALUES
    writes = underscored or name in _OPERATORS or func == _SET_DATA or kwargs.get("inplace")
    return args[0] if writes and args and isinstance(args[0], Tensor) else None


def written_outside(argument: str) -> RuntimeError:
    """The error of a step or loss that writes to a tensor that it closes over."""
    return RuntimeError(
        f"{argument}: changes in place a tensor that is not among its arguments. Carry it in the "
        "state and return it, or change it between the calls of the segment."
    )


class HiddenAliases:
    """Aliases that hide a tensor from autograd, in a run of ``argument``, the step or the loss.

    Looked up by id and by memory; the references keep both from being reused.
    """

    def __init__(self, argument: str) -> None:
        self.argument = argument
        # By the alias's id: it, and the tensor it hides, or None if it came from .data.
        self._aliases: dict[int, tuple[Tensor, Tensor | None]] = {}
        # By memory: created under no_grad, so there is nothing to hide.
        self._constants: dict[int, Tensor] = {}

    def note(self, run: Run, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Called after each call that writes nothing: notes the aliases among its results."""
        hides = func == DATA or func in DETACH or not torch.is_grad_enabled()
        operands = _tensors((args, kwargs))
        if not hides and not any(id(leaf) in self._aliases for leaf in operands):
            return
        operand_memory = {memory_of(leaf) for leaf in operands}
        hidden = {memory_of(leaf) for leaf in operands if hides or id(leaf) in self._aliases}
        results = _tensors(result)
        aliases = {
            id(leaf) for leaf in results if memory_of(leaf) in hidden - self._constants.keys()
        }
        if not torch.is_grad_enabled():
            by_memory = {memory_of(leaf): leaf for leaf in results}
            self._constants |= {
                memory: leaf for memory, leaf in by_memory.items() if memory not in operand_memory
            }
        if not aliases:
            return
        if func == DATA or any(self._source(leaf) is None for leaf in operands):
            sources: list[Tensor | None] = [None] * len(results)
        else:
            args, kwargs = tree_map(self._source, (args, kwargs))
            with torch.enable_grad():
                # A view of an alias hides the same view of the alias's source.
                sources = (
                    [*map(self._source, operands)]
                    if func in DETACH
                    else [*_tensors(run(func, args, kwargs))]
                )
        pairs = zip(results, sources, strict=True)
        self._aliases |= {id(leaf): (leaf, source) for leaf, source in pairs if id(leaf) in aliases}

    def _source(self, leaf: Any) -> Any:
        """The tensor that an alias hides, or the leaf if it is no alias."""
        return self._aliases[id(leaf)][1] if id(leaf) in self._aliases else leaf

    def write(self, run: Run, func: Any, target: Tensor, args: Any, kwargs: Any) -> Any:
        """The result of a call that writes into ``target``."""
        source = self._source(target)
        if func == _SET_DATA or (source is None and differentiable(target)):
            raise RuntimeError(
                f"{self.argument} writes through .data, which autograd does not see: the gradient "
                "would be computed from other values. For new values with the gradient of the old "
                "ones write h + (new - h).detach()."
            )
        is_seen = source is target and torch.is_grad_enabled()
        if is_seen or not differentiable(target) or memory_of(target) in self._constants:
            return run(func, args, kwargs)
        # Write into a copy, then give its values, with the old gradient, to the hidden tensor.
        copy = target.detach().clone()
        args, kwargs = tree_map(lambda leaf: copy if leaf is target else leaf, (args, kwargs))
        with torch.enable_grad():
            result = run(func, args, kwargs)
            source.copy_(with_gradient_of(copy, source))
        return tree_map(lambda leaf: target if leaf is copy else leaf, result)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
