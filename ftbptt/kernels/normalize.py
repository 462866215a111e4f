"""A block's graph -> an equivalent graph with fewer kinds of nodes, as input for ``lower``.

Means and variances become sums; ``stack`` and the scatters become ``cat``. A view of an elementwise
result becomes the elementwise operation on views, so that the gates of an LSTM are slices of a
product, and the tensor of all gates is never stored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._compat import is_view_of
from ..compiler.graphs import VIEWS, Node, aten, value_of
from .expressions import is_constant, is_elementwise, refuse


def normalize(module: fx.GraphModule, has_rows: Callable[[Node], bool]) -> fx.Graph:
    """normalize : a block's step x (node -> whether it has a value per row) -> a new graph"""
    graph = copy.deepcopy(module.graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _REPLACEMENTS:
            with graph.inserting_before(node):
                _REPLACEMENTS[node.target](node)
    graph.eliminate_dead_code()
    for node in reversed(list(graph.nodes)):
        if is_elementwise(node) and not is_constant(node):
            _push_views(node, has_rows(node))
    graph.eliminate_dead_code()
    return graph


def _new(graph: fx.Graph, target: Any, *args: Any) -> Node:
    """A new node, with the shape and dtype of its value."""
    node = graph.call_function(target, args)

    def empty(arg: Node) -> Tensor:
        value = value_of(arg)
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    node.meta["val"] = target(*fx.node.map_arg(args, empty))
    return node


def _reduced(node: Node, dims: Sequence[int] | None) -> tuple[list[int], int]:
    """(the axes that the node reduces, the number of elements in them)"""
    shape = value_of(node.args[0]).shape
    axes = [d % len(shape) for d in (dims or range(len(shape)))]
    return axes, math.prod(shape[d] for d in axes)


def _mean_of(x: Node, axes: list[int], count: int, keep: bool) -> Node:
    total = _new(x.graph, aten.sum.dim_IntList, x, axes, keep)
    return _new(x.graph, aten.mul.Tensor, total, 1.0 / count)


def _replace_mean(node: Node) -> None:
    axes, count = _reduced(node, node.args[1] if len(node.args) > 1 else None)
    keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    if node.kwargs.get("dtype") is not None or count == 0:
        raise refuse(node, "a mean with a dtype argument, or of no elements")
    node.replace_all_uses_with(_mean_of(node.args[0], axes, count, keep))


def _variance(node: Node) -> tuple[Node, Node]:
    """(variance, mean), in two passes like torch's."""
    graph, x = node.graph, node.args[0]
    axes, count = _reduced(node, node.args[1] if len(node.args) > 1 else None)
    correction = node.kwargs.get("correction")
    correction = 1 if correction is None else correction
    keep = node.kwargs.get("keepdim", False)
    if count <= correction:
        raise refuse(node, "a variance of too few elements")
    broadcast_mean = _mean_of(x, axes, count, True)
    deviation = _new(graph, aten.sub.Tensor, x, broadcast_mean)
    square = _new(graph, aten.mul.Tensor, deviation, deviation)
    total = _new(graph, aten.sum.dim_IntList, square, axes, keep)
    variance = _new(graph, aten.mul.Tensor, total, 1.0 / (count - correction))
    mean = broadcast_mean if keep else _new(graph, aten.squeeze.dims, broadcast_mean, axes)
    return variance, mean


def _replace_var(node: Node) -> None:
    node.replace_all_uses_with(_variance(node)[0])


def _replace_var_mean(node: Node) -> None:
    parts = _variance(node)
    for user in list(node.users):
        user.replace_all_uses_with(parts[user.args[1]])


def _replace_stack(node: Node) -> None:
    dim = (node.args[1] if len(node.args) > 1 else 0) % value_of(node).dim()
    parts = [_new(node.graph, aten.unsqueeze.default, part, dim) for part in node.args[0]]
    _replace_by_cat(node, parts, dim)


def _replace_slice_scatter(node: Node) -> None:
    args = dict(zip(("input", "src", "dim", "start", "end", "step"), node.args, strict=False))
    if args.get("step", 1) != 1:
        raise refuse(node, "a slice with a step")
    base = args["input"]
    dim = args.get("dim", 0) % value_of(base).dim()
    size = value_of(base).shape[dim]
    start, end = _index(args.get("start"), size, 0), _index(args.get("end"), size, size)
    _replace_slice(node, base, args["src"], dim, start, end)


def _replace_select_scatter(node: Node) -> None:
    base, src, dim, index = node.args
    dim = dim % value_of(base).dim()
    index %= value_of(base).shape[dim]
    src = _new(node.graph, aten.unsqueeze.default, src, dim)
    _replace_slice(node, base, src, dim, index, index + 1)


def _index(index: int | None, size: int, default: int) -> int:
    """A bound of a slice as an index from 0 to ``size``."""
    index = default if index is None else index
    return min(max(index + size if index < 0 else index, 0), size)


def _replace_slice(node: Node, base: Node, src: Node, dim: int, start: int, end: int) -> None:
    """Replaces the node by ``base`` with ``src`` in place of its slice ``start:end``."""
    size = value_of(base).shape[dim]
    parts = [src]
    if start > 0:
        parts.insert(0, _new(node.graph, aten.slice.Tensor, base, dim, 0, start))
    if end < size:
        parts.append(_new(node.graph, aten.slice.Tensor, base, dim, end, size))
    _replace_by_cat(node, parts, dim)


def _replace_by_cat(node: Node, parts: list[Node], dim: int) -> None:
    cat = node.graph.call_function(aten.cat.default, (parts, dim))
    cat.meta["val"] = value_of(node)
    node.replace_all_uses_with(cat)


_REPLACEMENTS: dict[Any, Callable[[Node], None]] = {
    aten.stack.default: _replace_stack,
    aten.slice_scatter.default: _replace_slice_scatter,
    aten.select_scatter.default: _replace_select_scatter,
    aten.mean.dim: _replace_mean,
    aten.mean.default: _replace_mean,
    aten.var.correction: _replace_var,
    aten.var_mean.correction: _replace_var_mean,
}


def _push_views(node: Node, has_rows: bool) -> None:
    """Moves the views of an elementwise node from its result to its operands.

    Only if nothing is computed twice, for a node with a value per row. A node that all rows share
    (such as the negation of a shared flag) is always moved, towards the nodes that read it.
    """
    views = [user for user in node.users if user.op == "call_function" and user.target in VIEWS]
    distinct = {(v.target, str(v.args[1:]), str(v.kwargs)): v for v in views}
    work_after = sum(value_of(v).numel() for v in distinct.values())
    work_before = value_of(node).numel()
    if has_rows and (len(views) < len(node.users) or work_after > work_before):
        return
    for view in views:
        with node.graph.inserting_before(view):
            pushed = _on_views(node, view)
        if pushed is not None:
            view.replace_all_uses_with(pushed)
            node.graph.erase_node(view)
    if not node.users:  # at once, so that it no longer counts as a user of its operands
        node.graph.erase_node(node)


def _on_views(node: Node, view: Node) -> Node | None:
    """``view(op(a, b))`` as ``op(view(a), view(b))``; None if an operand has no such view."""
    graph, shape = node.graph, list(value_of(node).shape)

    def view_of(arg: Node) -> Node:
        if not is_constant(arg):
            if list(value_of(arg).shape) != shape:
                arg = _new(graph, aten.expand.default, arg, shape)
            return _new(graph, view.target, arg, *view.args[1:])
        return arg

    if view.kwargs or not all(_can_view(arg, view, shape) for arg in node.all_input_nodes):
        return None
    pushed = graph.call_function(node.target, fx.node.map_arg(node.args, view_of), node.kwargs)
    value = value_of(view)
    pushed.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return pushed


def _can_view(arg: Node, view: Node, shape: list[int]) -> bool:
    """Whether the view can be applied to this operand without a copy."""
    if is_constant(arg):
        return True
    value = value_of(arg)
    memory = torch.empty_strided(value.shape, value.stride(), device="meta")
    try:
        return is_view_of(view.target(memory.expand(shape), *view.args[1:]), memory)
    except (RuntimeError, ValueError):
        return False
