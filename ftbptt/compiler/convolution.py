"""Convolutions over all steps at once: time joins the rows, and a weight's gradient is one call.

``aten.convolution_backward`` makes three gradients in one call. Only that of the input belongs to
the recurrence; apart from each other, the two others leave the loop.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from .graphs import aten, is_getitem, value_of


def input_gradient(grad: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """Of ``convolution(x, weight, None, *options)``."""
    wanted = [True, False, False]
    return aten.convolution_backward.default(grad, x, weight, None, *options, wanted)[0]


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """Of ``convolution(x, weight, None, *options)``: over the rows, so more rows are a sum."""
    wanted = [False, True, False]
    return aten.convolution_backward.default(grad, x, weight, None, *options, wanted)[1]


def split_gradients(graph: fx.Graph) -> None:
    """Each gradient of a convolution as a node of its own; that of the bias is a sum."""
    for node in graph.find_nodes(
        op="call_function", target=aten.convolution_backward.default, sort=True
    ):
        grad, x, weight, _, *options, _ = node.args
        for item in filter(is_getitem, list(node.users)):
            with graph.inserting_before(item):
                if item.args[1] == 2:
                    axes = [d for d in range(value_of(grad).dim()) if d != 1]
                    apart = graph.call_function(aten.sum.dim_IntList, (grad, axes))
                else:
                    gradient = (input_gradient, weight_gradient)[item.args[1]]
                    apart = graph.call_function(gradient, (grad, x, weight, *options))
            apart.meta = dict(item.meta)
            item.replace_all_uses_with(apart)
            graph.erase_node(item)
        graph.erase_node(node)


def convolution_over_time(
    steps: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, int]:
    """vmap's rule for ``aten.convolution``."""
    if dims[1] is None and dims[2] is None:
        rows = in_front(steps, dims[0], x)
        value = aten.convolution.default(rows.flatten(0, 1), weight, bias, *options)
        return value.unflatten(0, (steps, rows.shape[1])), 0
    value = aten.convolution.default(
        _as_channels(steps, dims[0], x),
        in_front(steps, dims[1], weight).flatten(0, 1),
        None if bias is None else in_front(steps, dims[2], bias).flatten(),
        *_in_groups(steps, options),
    )
    return value.unflatten(1, (steps, -1)), 1


def input_gradient_over_time(
    steps: Any, dims: Any, grad: Tensor, x: Tensor, weight: Tensor, *options: Any
) -> tuple[Tensor, int]:
    if dims[2] is None:
        grad, x = in_front(steps, dims[0], grad), in_front(steps, dims[1], x)
        value = input_gradient(grad.flatten(0, 1), x.flatten(0, 1), weight, *options)
        return value.unflatten(0, (steps, x.shape[1])), 0
    value = input_gradient(
        _as_channels(steps, dims[0], grad),
        _as_channels(steps, dims[1], x),
        in_front(steps, dims[2], weight).flatten(0, 1),
        *_in_groups(steps, options),
    )
    return value.unflatten(1, (steps, -1)), 1


def weight_gradient_over_time(
    steps: Any, dims: Any, grad: Tensor, x: Tensor, weight: Tensor, *options: Any
) -> tuple[Tensor, int]:
    value = weight_gradient(
        _as_channels(steps, dims[0], grad),
        _as_channels(steps, dims[1], x),
        in_front(steps, dims[2], weight).flatten(0, 1),
        *_in_groups(steps, options),
    )
    return value.unflatten(0, (steps, -1)), 0


def in_front(steps: Any, dim: int | None, x: Any) -> Any:
    """The steps as axis 0; what is no tensor as it is."""
    if not isinstance(x, Tensor):
        return x
    return x.expand(steps, *x.shape) if dim is None else x.movedim(dim, 0)


def _as_channels(steps: Any, dim: int | None, x: Tensor) -> Tensor:
    """``[rows, steps * channels, ...]``: where each step has a weight of its own."""
    return in_front(steps, dim, x).movedim(0, 1).flatten(1, 2)


def _in_groups(steps: Any, options: Any) -> tuple[Any, ...]:
    *others, groups = options
    return (*others, groups * steps)
