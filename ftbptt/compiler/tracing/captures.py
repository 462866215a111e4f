"""Tensors that a function closes over, as inputs of its graph."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, fx

from ..._compat.graph_modules import GraphModule
from ..._compat.running import is_fake
from ..._memory import resolved
from ..graphs import Node, aten
from .step_checks import forbid_trained_captures


def lift_captures(argument: str, module: fx.GraphModule, after: int, remedy: str) -> list[Tensor]:
    """Turns the tensors that ``argument`` closes over into inputs, after the first ``after``.

    Returns them. Raises TypeError for what cannot be an input, ValueError for a tensor that
    requires grad; ``remedy`` is what to do about that.
    """
    nodes = module.graph.find_nodes(op="get_attr")
    values = [getattr(module, node.target) for node in nodes]
    if not all(isinstance(value, Tensor) for value in values):
        raise TypeError(
            f"{argument}: uses an operation that contains graphs, such as torch.cond, which cannot "
            "be done for all steps at once. Write it with torch.where."
        )
    forbid_trained_captures(argument, module, remedy)
    _as_inputs(module.graph, nodes, after)
    module.recompile()
    return values


def numbers_as_nodes(module: fx.GraphModule) -> None:
    """Has the graph of a gradient make the single numbers that it holds, as a Function's backward.

    Raises TypeError for larger tensors: they would have to be inputs of the step.
    """
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target)
        if is_fake(value) or value.numel() != 1:
            raise TypeError(
                "step: the backward of a torch.autograd.Function reads a tensor that it makes or "
                f"closes over, of shape {list(value.shape)}. Use it in forward too, and save it "
                "there: ctx.save_for_backward(...)."
            )
        with module.graph.inserting_before(node):
            options = {"dtype": value.dtype, "device": value.device}
            number = module.graph.call_function(
                aten.full.default, (list(value.shape), value.item()), options
            )
            number.meta = dict(node.meta)
        node.replace_all_uses_with(number)
        module.graph.erase_node(node)


def with_tensors_as_inputs(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """A copy of a graph with the tensors that it holds as its last inputs, and these tensors."""
    graph = deepcopy(module.graph)
    attributes = graph.find_nodes(op="get_attr")
    held = [node for node in attributes if isinstance(getattr(module, node.target), Tensor)]
    tensors = [getattr(module, node.target) for node in held]
    _as_inputs(graph, held, after=len(graph.find_nodes(op="placeholder")))
    return GraphModule(module, graph), tensors


def _as_inputs(graph: fx.Graph, nodes: Sequence[Node], after: int) -> None:
    """Turns nodes that hold a tensor into inputs, after the first ``after``."""
    before = next(node for node in list(graph.nodes)[after:] if node not in nodes)
    for i, node in enumerate(nodes):
        with graph.inserting_before(before):
            lifted = graph.placeholder(f"captured_{i}")
            lifted.meta = dict(node.meta)
        node.replace_all_uses_with(lifted)
        graph.erase_node(node)


def materialized(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor with pending conjugations and negations computed; a single number on ``device``.

    torch takes single numbers from the CPU beside tensors of any device: a kernel does not.
    """
    tensor = tensor if tensor.dim() else tensor.to(device)
    return resolved(tensor)
