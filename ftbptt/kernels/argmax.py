"""``argmax`` and ``argmin`` as reductions that kernels have, for states of categories."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..compiler.graphs import aten, new_node, value_of

_EXTREMES = {aten.argmax.default: aten.amax.default, aten.argmin.default: aten.amin.default}


def expand_argmax(graph: fx.Graph) -> None:
    """Makes them the lowest of the places that have the extreme value, or NaN.

    The numbers of the places are the same at each step, so that a loop gets them as an input.
    """
    for node in graph.nodes:
        if node.target in _EXTREMES and len(node.args) > 1 and node.args[1] is not None:
            value = value_of(node.args[0])
            if value.is_floating_point() and value.dim() and value.shape[node.args[1]]:
                with graph.inserting_before(node):
                    node.args = (_first_place(node, *node.args),)
                # The same node, since it may be a result of the loop.
                node.target, node.kwargs = aten._to_copy.default, {"dtype": torch.int64}


def _first_place(node: fx.Node, x: Any, dim: int, keep: bool = False) -> fx.Node:
    graph = node.graph
    value: Any = value_of(x)  # a fake tensor
    dim %= value.dim()
    count, after = value.shape[dim], [1] * (value.dim() - 1 - dim)
    # In a dtype that has these numbers exactly.
    options = {"dtype": torch.promote_types(value.dtype, torch.float32), "device": value.device}
    extreme = new_node(graph, _EXTREMES[node.target], x, [dim], True)
    is_extreme = new_node(graph, aten.eq.Tensor, x, extreme)
    is_nan = new_node(graph, aten.ne.Tensor, x, x)
    found = new_node(graph, aten.logical_or.default, is_extreme, is_nan)
    with value.fake_mode:
        places = new_node(graph, aten.arange.default, count, **options)
        none = new_node(graph, aten.scalar_tensor.default, float(count), **options)
    places = new_node(graph, aten.reshape.default, places, [count, *after])
    candidates = new_node(graph, aten.where.self, found, places, none)
    return new_node(graph, aten.amin.default, candidates, [dim], keep)
