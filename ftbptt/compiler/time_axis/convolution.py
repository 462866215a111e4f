"""Convolutions over all steps at once: time joins the batch, and a weight's gradient is one call.

``aten.convolution_backward`` computes three gradients in one call. Only that of the input belongs
to the recurrence. As separate operations, the other two can leave the loop.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ..graphs import aten, is_getitem, value_of


def input_gradient(grad: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """The gradient of ``convolution(x, weight, None, *options)`` by x."""
    output_mask = [True, False, False]
    return aten.convolution_backward.default(grad, x, weight, None, *options, output_mask)[0]


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """The gradient of ``convolution(x, weight, None, *options)`` by the weight.

    It is a sum over the batch: with all steps in the batch, the sum over the steps too.
    """
    output_mask = [False, True, False]
    return aten.convolution_backward.default(grad, x, weight, None, *options, output_mask)[1]


def split_gradients(graph: fx.Graph) -> None:
    """Replaces ``convolution_backward`` by a node for each gradient; the bias's is a sum."""
    for node in graph.find_nodes(
        op="call_function", target=aten.convolution_backward.default, sort=True
    ):
        grad, x, weight, _, *options, _ = node.args
        for item in filter(is_getitem, list(node.users)):
            result = item.args[1]  # 0: d_input, 1: d_weight, 2: d_bias
            with graph.inserting_before(item):
                if result == 2:
                    axes = [d for d in range(value_of(grad).dim()) if d != 1]
                    gradient = graph.call_function(aten.sum.dim_IntList, (grad, axes))
                else:
                    function = (input_gradient, weight_gradient)[result]
                    gradient = graph.call_function(function, (grad, x, weight, *options))
            gradient.meta = dict(item.meta)
            item.replace_all_uses_with(gradient)
            graph.erase_node(item)
        graph.erase_node(node)


def convolution_over_time(
    steps: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, int]:
    """vmap's rule for ``aten.convolution``."""
    if dims[1] is None and dims[2] is None:
        x = in_front(steps, dims[0], x)
        value = aten.convolution.default(x.flatten(0, 1), weight, bias, *options)
        return value.unflatten(0, (steps, x.shape[1])), 0
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
    """vmap's rule for :func:`input_gradient`."""
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
    """vmap's rule for :func:`weight_gradient`."""
    value = weight_gradient(
        _as_channels(steps, dims[0], grad),
        _as_channels(steps, dims[1], x),
        in_front(steps, dims[2], weight).flatten(0, 1),
        *_in_groups(steps, options),
    )
    return value.unflatten(0, (steps, -1)), 0


def in_front(steps: Any, dim: int | None, x: Any) -> Any:
    """A tensor with the steps as axis 0; other arguments unchanged."""
    if not isinstance(x, Tensor):
        return x
    return x.expand(steps, *x.shape) if dim is None else x.movedim(dim, 0)


def _as_channels(steps: Any, dim: int | None, x: Tensor) -> Tensor:
    """``[batch, steps * channels, ...]``, for a grouped convolution with a weight for each step."""
    return in_front(steps, dim, x).movedim(0, 1).flatten(1, 2)


def _in_groups(steps: Any, options: Any) -> tuple[Any, ...]:
    *others, groups = options
    return (*others, groups * steps)
