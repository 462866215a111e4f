"""Utilities for FX graphs of ATen operations, shared by the passes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, fx

from .._compat.graph_modules import GraphModule
from .._compat.running import is_fake
from .._compat.tracing import may_be_a_view, written_arguments

# torch types a node's arguments as a union of everything that an argument can be, which would need
# a cast at every use.
Node: TypeAlias = Any
aten = torch.ops.aten

# Operations that return their input in another shape.
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default,
    aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.expand.default, aten.select.int,
    aten.slice.Tensor, aten.alias.default, aten.detach.default, aten.lift_fresh.default,
}  # fmt: skip

# Operations that give views of parts of their input.
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}

COMPARISONS = {getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")}

# Operations whose result, or the first of their results, is an element of their input.
_EXTREMES = {
    aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, aten.max.dim,
    aten.min.dim,
}  # fmt: skip

# Elementwise operations that are cheaper to repeat than to save.
CHEAP = {
    getattr(getattr(aten, name), overload)
    for name in (
        "add", "sub", "mul", "neg", "where", "eq", "ne", "lt", "le", "gt", "ge", "relu",
        "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not",
        "clone", "full", "full_like", "zeros_like", "ones_like", "scalar_tensor", "rsub", "abs",
        "maximum", "minimum", "_to_copy", "clamp", "clamp_min", "clamp_max", "threshold_backward",
        "sign", "empty", "arange",
    )
    for overload in getattr(aten, name).overloads()
    if "out" not in overload
}  # fmt: skip


def is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def has_dynamic_shape(node: Node) -> bool:
    """Whether the shape of the result depends on values."""
    return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())


def value_of(node: Node) -> Tensor:
    """The fake tensor that stands for the node's value at one step."""
    return node.meta["val"]


def nbytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def is_tuple(node: Node) -> bool:
    """Whether the node is an operation with several results, read through getitem."""
    return not isinstance(node.meta.get("val"), Tensor)


def is_getitem(node: Node) -> bool:
    return node.target is operator.getitem


def owner_of(node: Node, stop: Container[Node] = ()) -> Node:
    """The node whose memory this one's value may be a view of; nodes in ``stop`` own theirs."""
    while node not in stop and (
        node.target in VIEWS
        or may_be_a_view(node.target)
        or (is_getitem(node) and node.args[0].target in SPLITS)
    ):
        node = node.args[0]
    return node


def is_extreme(node: Any) -> bool:
    """Whether it is an operation that finds the largest or smallest element of its input."""
    return isinstance(node, fx.Node) and node.target in _EXTREMES


def extreme_in(operand: Any) -> Node | None:
    """The operation that found the largest or smallest element that an operand is a view of."""
    while isinstance(operand, fx.Node) and operand.target in VIEWS:
        operand = operand.args[0]
    if isinstance(operand, fx.Node) and is_getitem(operand) and operand.args[1] == 0:
        operand = operand.args[0]
    return operand if is_extreme(operand) else None


def compared_with_extremes(nodes: Iterable[Node]) -> set[Node]:
    """What the comparisons among these nodes compare with its largest or smallest element, as in
    the gradient of ``amax``, and that element.

    Computed again it may be rounded differently, in 16 bits it is not even rounded: no element
    would equal the one that was found.
    """
    return {
        owner_of(arg)
        for node in nodes
        if node.target in COMPARISONS and any(extreme_in(arg) is not None for arg in node.args)
        for arg in node.args
        if isinstance(arg, fx.Node)
    }


def written_by(node: Node) -> list[Node]:
    """The nodes whose values an operation changes in place."""
    written: list[Node] = []
    for i, name in written_arguments(node.target):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        fx.node.map_arg(value, written.append)
    return written


def is_outer_product(node: Node) -> bool:
    """Whether it is a batch of products of a column and a row: elementwise, with broadcasting."""
    return node.target is aten.bmm.default and value_of(node.args[0]).shape[-1] == 1


def inputs_of(node: Node) -> list[Node]:
    return node.all_input_nodes


def reachable_from(sources: Iterable[Node], nodes: Iterable[Node]) -> set[Node]:
    """The sources and every node that depends on one of them; ``nodes`` in graph order."""
    reached = set(sources)
    for node in nodes:
        if any(arg in reached for arg in inputs_of(node)):
            reached.add(node)
    return reached


def needed_for(targets: Iterable[Node], stop: Iterable[Node] = ()) -> set[Node]:
    """The targets and every node they depend on; nodes in ``stop`` are included, not followed."""
    stopped, needed, stack = set(stop), set(), list(targets)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            if node not in stopped:
                stack.extend(inputs_of(node))
    return needed


def is_transpose(node: Node) -> bool:
    """Whether it is the transpose of a matrix."""
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]


def join_axis(join: Node) -> int:
    """The axis of the result along which a ``cat`` or ``stack`` puts its parts."""
    axis = join.args[1] if len(join.args) > 1 else 0
    return int(axis) % value_of(join).dim()


def contains_parts_unchanged(join: Node) -> bool:
    """Whether a ``cat`` or ``stack`` neither converts a part nor drops an empty vector."""
    rank = value_of(join).dim() - (join.target is aten.stack.default)
    parts = [value_of(part) for part in join.args[0]]
    return all((part.dtype, part.dim()) == (value_of(join).dtype, rank) for part in parts)


def has_same_code(a: fx.Graph, b: fx.Graph, same_values: bool = False) -> bool:
    """Whether two graphs that were traced in the same way are of the same operations.

    On the same tensors, if they hold any; ``same_values``: or on equal ones. Of gradients that
    someone wrote only the names are compared.
    """
    held = [
        [getattr(graph.owning_module, node.target) for node in graph.find_nodes(op="get_attr")]
        for graph in (a, b)
    ]
    code, other = (graph.python_code("self").src for graph in (a, b))
    is_same = _has_same_values if same_values else operator.is_
    return code == other and len(held[0]) == len(held[1]) and all(map(is_same, *held))


def _has_same_values(a: Any, b: Any) -> bool:
    if a is b or not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b
    if is_fake(a) or is_fake(b):  # made while traced, without values: refused for that later
        return is_fake(a) and is_fake(b) and (a.shape, a.dtype) == (b.shape, b.dtype)
    return a.device == b.device and has_equal_values(a, b)


def has_equal_values(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one shape, dtype and the same values; NaN is equal to NaN."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if torch.equal(tensor, other):
        return True
    both_are_nan = (tensor != tensor) & (other != other)
    return bool(((tensor == other) | both_are_nan).all())


def is_same_graph(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    """As :func:`has_same_code`, of graphs that are for nothing else: it changes them.

    A size that one of them leaves to be inferred (-1) is written out in both.
    """
    for module in (a, b):
        for reshape in (aten.reshape.default, aten.view.default):
            for node in module.graph.find_nodes(op="call_function", target=reshape):
                node.args = (node.args[0], list(value_of(node).shape))
    return has_same_code(a.graph, b.graph)


def varying_with(sources: Iterable[Node], graph: fx.Graph) -> set[Node]:
    """Nodes that depend on ``sources``, or on random numbers, which are others at each step."""
    return reachable_from([*sources, *filter(is_random, graph.nodes)], graph.nodes)


def new_node(graph: fx.Graph, target: Any, *args: Any, **options: Any) -> Node:
    """A call at the graph's insertion point, with the fake value of its result."""
    node = graph.call_function(target, args, options)
    node.meta["val"] = target(*fx.node.map_arg(args, lambda arg: arg.meta["val"]), **options)
    return node


def extract(inputs: Sequence[Node], outputs: Sequence[Node], whole: fx.Graph) -> fx.GraphModule:
    """The part of a graph that computes ``outputs`` from ``inputs``: (*inputs) -> [*outputs]."""
    needed = needed_for(outputs, stop=inputs)
    graph, copies = fx.Graph(), {}
    for i, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"in_{i}")
        copies[node].meta = dict(node.meta)
    for node in whole.nodes:
        if node in needed and node not in copies:
            if node.op == "placeholder":
                raise AssertionError(f"{node} is needed but not an input of the block")
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    return GraphModule({}, graph)


def vjp_by(
    function: Callable[..., Sequence[Tensor]],
    values: Sequence[Tensor],
    trained: Sequence[int],
    with_grad: Sequence[int],
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], tuple[Tensor, ...]]]:
    """The results of ``function(*values)``, and their vjp: of ``with_grad`` by ``trained``.

    ``trained`` are indices of the values, ``with_grad`` of the results.
    """
    if not with_grad:  # torch's vjp needs a result
        zeros = tuple(torch.zeros_like(values[i]) for i in trained)
        return list(function(*values)), lambda _: zeros

    def primal(*trained_values: Tensor) -> tuple[Any, Any]:
        args = list(values)
        for i, value in zip(trained, trained_values, strict=True):
            args[i] = value
        results = list(function(*args))
        return tuple(results[i] for i in with_grad), results

    _, pull, results = cast(
        Any, torch.func.vjp(primal, *(values[i] for i in trained), has_aux=True)
    )
    return results, lambda cotangents: pull(tuple(cotangents))


def matrix_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` with any leading axes.

    Equal ones go without ``matmul``, which fixes a symbolic K to a number in torch 2.11.
    """
    if a.dim() == b.dim() == 3:
        return torch.bmm(a, b)
    if a.dim() == b.dim() == 4:
        product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1))
        return product.unflatten(0, (a.shape[0], a.shape[1]))
    return torch.matmul(a, b)


def skip_identities(graph: fx.Graph) -> None:
    """Has every reader of a view that shows a tensor as it is, such as einsum's, read the tensor.

    A recurrence would write the tensor once more for each of them.
    """
    for node in graph.nodes:
        if node.target in _RESHAPING and _is_unchanged(node):
            node.replace_all_uses_with(node.args[0])


_RESHAPING = {aten.reshape.default, aten.expand.default, aten.permute.default}


def _is_unchanged(node: fx.Node) -> bool:
    if node.target is aten.permute.default:
        return list(node.args[1]) == list(range(len(node.args[1])))
    before, after = (n.meta["val"].shape for n in (node.args[0], node))
    return all(isinstance(size, int) for size in (*before, *after)) and before == after
