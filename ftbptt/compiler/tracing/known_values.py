"""The values of tensors that a step makes of constants alone, for a trace that needs them.

Solvers of differential equations compare and count points of time, and graph convolutions select
edges. A trace knows such values only if it fails without: they become parts of its graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ..._compat.running import inside_functorch, is_from_outside
from ..._compat.tracing import (
    LARGEST_KNOWN,
    UNTRACEABLE,
    is_operation,
    known_value,
    not_traced,
)
from ..._trees import tree_flatten, tree_map, tree_unflatten
from ..graphs import Node, aten, inputs_of, is_random
from .detached_writes import written_outside


class KnownTensors(TorchFunctionMode):
    """Within it, the trace knows the values of the tensors outside that a step reads.

    ``read`` are these tensors, but for large ones and those that require grad.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lifted: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def read(self) -> list[Tensor]:
        return [tensor for tensor, _ in self._lifted.values()]

    def forbid_writes(self) -> None:
        """Raises RuntimeError if the step has written to one of them by a view."""
        for tensor, lifted in self._lifted.values():
            before = _lifted(tensor)
            try:
                is_written = not bool(((lifted == before) | (before != before)).all())
            except UNTRACEABLE:  # with a value that is not known
                is_written = True
            if is_written:
                raise written_outside("step")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if inside_functorch():  # else what torch asks of the tensor of an operation
            args, kwargs = tree_map(self._known, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _known(self, value: Any) -> Any:
        if type(value) is not Tensor or not is_from_outside(value) or value.requires_grad:
            return value
        if value.layout is not torch.strided or value.numel() > LARGEST_KNOWN or value.is_meta:
            return value
        if id(value) not in self._lifted:
            self._lifted[id(value)] = value, _lifted(value)
        return self._lifted[id(value)][1]


def _lifted(value: Tensor) -> Tensor:
    """A tensor of the trace with this value, which a trace does not know if it is pending."""
    with not_traced():
        value = value.resolve_conj().resolve_neg()
    return torch.ops.aten.lift_fresh_copy(value)


def _known(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        with not_traced():
            value = make(*args, **kwargs)
        if value.numel() > LARGEST_KNOWN:
            return NotImplemented
        return torch.ops.aten.lift_fresh_copy(value)

    return made


def _new(make: Callable[..., Any]) -> Callable[..., Any]:
    """``like.new_zeros(size)`` and its kin."""
    known = _known(make)

    def made(like: Tensor, size: Any, *numbers: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.get(name) or getattr(like, name) for name in ("dtype", "device")}
        return known(size, *numbers, **given)

    return made


def _of_known(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation whose result has a shape that depends on values."""
    made = _known(operation)

    def computed(*args: Any) -> Any:
        leaves, spec = tree_flatten(args)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[i] = known_value(leaf)
                if leaves[i] is None:
                    return NotImplemented
        return made(*tree_unflatten(leaves, spec))

    return computed


# Decompositions that make what is known of operations.
KNOWN: dict[Any, Callable[..., Any]] = {
    **{
        operation: _known(operation)
        for operation in (
            aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default,
            aten.logspace.default, aten.eye.default, aten.zeros.default, aten.ones.default,
            aten.full.default, aten.scalar_tensor.default,
        )
    },
    aten.new_zeros.default: _new(torch.zeros),
    aten.new_ones.default: _new(torch.ones),
    aten.new_full.default: _new(torch.full),
    aten.nonzero.default: _of_known(aten.nonzero.default),
}  # fmt: skip


def fold(module: fx.GraphModule) -> None:
    """Computes what a graph computes of known values alone; it then holds the results."""
    values: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.target is aten.lift_fresh_copy.default and node.args[0].op == "get_attr":
            values[node] = getattr(module, node.args[0].target)
        elif _can_fold(node) and all(source in values for source in inputs_of(node)):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with not_traced(), torch.no_grad():
                values[node] = node.target(*args, **kwargs)
    for node, value in values.items():
        if isinstance(value, Tensor) and any(user not in values for user in node.users):
            name = f"_known_{node.name}"
            module.register_buffer(name, value, persistent=False)
            with module.graph.inserting_before(node):
                held = module.graph.get_attr(name)
            held.meta = dict(node.meta)
            node.replace_all_uses_with(held, lambda user: user not in values)


def _can_fold(node: Node) -> bool:
    if node.op != "call_function" or is_random(node) or not inputs_of(node):
        return False
    return is_operation(node.target) or node.target is operator.getitem
