"""A state of columns, ``[units, rows]``, is carried as rows.

Kernels share out the first axes of what is carried: with columns, all of it would be one row.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from torch import fx

from ..graphs import Node, aten, is_transpose, new_node, value_of
from .split_state import Packing


def carry_rows(
    graph: fx.Graph, first_state: int, packings: Sequence[Packing], columns: Container[Node]
) -> list[Packing]:
    """carry_rows : graph of a step x which inputs weights are multiplied with -> Packings

    The state is the inputs from ``first_state`` on and the last outputs. Changes the graph to take
    and return the transpose of what is of columns, and of what has as many.
    """
    parts = graph.find_nodes(op="placeholder")[first_state:]
    widths = {value_of(p).shape[1] for p in parts if p in columns and value_of(p).dim() == 2}
    found, remaining = [], iter(parts)
    for packing in packings:
        own = [next(remaining) for _ in range(packing.count)]
        if all(value_of(p).dim() == 2 and value_of(p).shape[1] in widths for p in own):
            for part in own:
                _transpose(part, position=parts.index(part) - len(parts))
            packing = replace(packing, transposed=True)
        found.append(packing)
    return found


def _transpose(part: Node, position: int) -> None:
    """Makes an input the transpose of what it was, and the output at ``position`` too."""
    graph, output = part.graph, part.graph.output_node()
    part.meta["val"] = value_of(part).mT.contiguous()
    with graph.inserting_after(part):
        before = new_node(graph, aten.permute.default, part, [1, 0])
    part.replace_all_uses_with(before, delete_user_cb=lambda user: user is not before)
    for user in list(before.users):
        if is_transpose(user):
            user.replace_all_uses_with(part)
    results = list(output.args[0])
    after = results[position]
    if is_transpose(after):
        results[position] = after.args[0]
    else:
        with graph.inserting_before(output):
            results[position] = new_node(graph, aten.permute.default, after, [1, 0])
    output.args = (results,)
    graph.eliminate_dead_code()
