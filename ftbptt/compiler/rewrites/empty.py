"""Values without elements, such as a state of 0 features, need not be carried or read."""

from __future__ import annotations

from torch import Tensor, fx

from ..graphs import aten


def without_empty_values(module: fx.GraphModule) -> fx.GraphModule:
    """without_empty_values : step graph -> the same, with constants in the place of empty values

    Inductor cannot index a sequence of empty values by the step.
    """
    graph = module.graph
    first = graph.find_nodes(op="placeholder")[-1].next
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not value.numel() and node.users:
            with graph.inserting_before(first):
                options = {"dtype": value.dtype, "device": value.device}
                empty = graph.call_function(aten.full.default, (list(value.shape), 0), options)
                empty.meta["val"] = value
            node.replace_all_uses_with(empty)
    graph.eliminate_dead_code()
    module.recompile()
    return module
