"""Stacked state split into its parts: ``nn.LSTM``'s ``[L, B, H]``, or ``cat([h, c])``.

A state leaf that the step only reads by ``select`` (or ``split``) and writes by ``stack`` (or
``cat``) along the same axis is several states in one tensor. As one carry it would tie all layers
into one recurrence. As several, loop distribution separates the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from ..graphs import Node, aten, contains_parts_unchanged, is_getitem, join_axis, new_node, value_of


@dataclass(frozen=True)
class Packing:
    """How a state leaf is made of parts: stacked, concatenated, or one part (``dim`` None)."""

    dim: Any = None  # the axis
    sizes: tuple[int, ...] = ()  # along dim; empty for a stack of ``count`` slices
    count: int = 1
    transposed: bool = False  # the parts, see ``columns``

    def unpack(self, leaf: Tensor, batch_axes: int = 0) -> list[Tensor]:
        """The parts of a leaf with ``batch_axes`` additional leading axes."""
        parts = self._parts(leaf, batch_axes)
        return [part.mT.contiguous() for part in parts] if self.transposed else parts

    def _parts(self, leaf: Tensor, batch_axes: int) -> list[Tensor]:
        if self.dim is None:
            return [leaf]
        dim = self.dim + batch_axes
        return list(leaf.split(self.sizes, dim) if self.sizes else leaf.unbind(dim))

    def row_axis(self, axis: int) -> int:
        """The batch axis in each part, from that in the leaf."""
        stacked = self.dim is not None and not self.sizes
        axis = axis - 1 if stacked and self.dim < axis else axis
        return 1 - axis if self.transposed else axis

    def pack(self, parts: Sequence[Tensor], batch_axes: int = 0) -> Tensor:
        if self.transposed:
            parts = [part.mT.contiguous() for part in parts]
        if self.dim is None:
            return parts[0]
        dim = self.dim + batch_axes
        return torch.cat(list(parts), dim) if self.sizes else torch.stack(list(parts), dim)


def split_stacked_state(
    module: fx.GraphModule, first_state: int, unsplit_axes: Sequence[int]
) -> tuple[fx.GraphModule, list[Packing]]:
    """split_stacked_state : step graph -> step graph on the parts, one Packing per state leaf

    The state leaves are the inputs from ``first_state`` on and the last outputs. ``unsplit_axes``
    is for each the axis along which it must not be split (the batch's, if its rows restart one by
    one), or -1.
    """
    graph = module.graph
    leaves = graph.find_nodes(op="placeholder")[first_state:]
    output = graph.output_node()
    _move_size_one_axes(graph, leaves)
    values = list(output.args[0])
    n_outs = len(values) - len(leaves)
    outs, leaves_after = values[:n_outs], values[n_outs:]
    packings: list[Packing] = []
    parts_after: list[Node] = []
    reads_of: dict[Node, dict[Node, int]] = {}
    for leaf, after, unsplit_axis in zip(leaves, leaves_after, unsplit_axes, strict=True):
        packing = _packing(after)
        reads = None
        if packing.dim not in (None, unsplit_axis):
            reads = _reads_of_parts(leaf, packing)
        if reads is None:
            packings.append(Packing())
            parts_after.append(after)
        else:
            packings.append(packing)
            parts_after.extend(after.args[0])
            reads_of[leaf] = reads
    output.args = ([*outs, *parts_after],)
    for leaf, packing in zip(leaves, packings, strict=True):
        if leaf in reads_of:
            _replace_by_parts(leaf, packing, reads_of[leaf])
    graph.eliminate_dead_code()
    for leaf in reads_of:
        graph.erase_node(leaf)
    module.recompile()
    return module, packings


def _replace_by_parts(leaf: Node, packing: Packing, reads: dict[Node, int]) -> None:
    """Adds an input for each part before the leaf's, for the reads of the part."""
    with leaf.graph.inserting_before(leaf):
        parts = [leaf.graph.placeholder(f"{leaf.name}_{i}") for i in range(packing.count)]
    for part, fake in zip(parts, packing.unpack(value_of(leaf)), strict=True):
        part.meta["val"] = fake
    for read, number in reads.items():
        read.replace_all_uses_with(parts[number])


def _move_size_one_axes(graph: fx.Graph, leaves: Sequence[Node]) -> None:
    """Lets unbatched layers, which add a batch axis to their state, add it to the parts instead.

    ``leaf.unsqueeze(d).select(...)`` becomes ``leaf.select(...).unsqueeze(d)``, and
    ``stack(parts).squeeze(d)`` a ``stack`` of squeezed parts.
    """
    call = partial(new_node, graph)

    for leaf in leaves:
        rank = value_of(leaf).dim() + 1
        for view in [user for user in leaf.users if user.target is aten.unsqueeze.default]:
            for reader in [user for user in view.users if user.target is aten.select.int]:
                added, dim = view.args[1] % rank, reader.args[1] % rank
                if added != dim:
                    with graph.inserting_before(reader):
                        part = call(aten.select.int, leaf, dim - (dim > added), reader.args[2])
                        part = call(aten.unsqueeze.default, part, added - (added > dim))
                    reader.replace_all_uses_with(part)
    output = graph.output_node()
    values = list(output.args[0])
    for i in range(len(values) - len(leaves), len(values)):
        if values[i].target is not aten.squeeze.dim:
            continue
        stack, dropped = values[i].args
        if stack.target is aten.stack.default:
            dim, dropped = join_axis(stack), dropped % value_of(stack).dim()
            if dim != dropped and value_of(stack).shape[dropped] == 1:
                with graph.inserting_before(output):
                    parts = [
                        call(aten.squeeze.dim, part, dropped - (dropped > dim))
                        for part in stack.args[0]
                    ]
                    values[i] = call(aten.stack.default, parts, dim - (dim > dropped))
    output.args = (values,)
    graph.eliminate_dead_code()


def _packing(after: Node) -> Packing:
    """How the step puts the next value of a leaf together."""
    is_stack = after.target is aten.stack.default
    is_join = is_stack or after.target is aten.cat.default
    if not is_join or not contains_parts_unchanged(after):  # parts would be of another dtype
        return Packing()
    dim, parts = join_axis(after), after.args[0]
    sizes = () if is_stack else tuple(value_of(part).shape[dim] for part in parts)
    return Packing(dim, sizes, len(parts))


def _reads_of_parts(leaf: Node, packing: Packing) -> dict[Node, int] | None:
    """What reads the leaf, each with the number of its part; None if a read is not of one part."""
    reads: dict[Node, int] = {}
    for user in leaf.users:
        if (part := _part_taken(user, packing)) is not None:
            reads[user] = part
        elif _divides(user, packing) and all(map(is_getitem, user.users)):
            reads |= {item: item.args[1] for item in user.users}
        else:
            return None
    return reads


def _divides(user: Node, packing: Packing) -> bool:
    """Whether it takes the leaf apart into exactly its parts."""
    if not packing.sizes:
        if user.target is not aten.unbind.int:
            return False
        dims = user.args[1:]
    elif user.target in (aten.split.Tensor, aten.split_with_sizes.default):
        dims = user.args[2:]
    else:
        return False
    if (dims[0] if dims else 0) % value_of(user.args[0]).dim() != packing.dim:
        return False
    pieces = tuple(piece.shape[packing.dim] for piece in user.meta["val"]) if packing.sizes else ()
    return pieces == packing.sizes


def _part_taken(user: Node, packing: Packing) -> int | None:
    """The number of the part, if it selects or slices one."""
    if user.target is not (aten.slice.Tensor if packing.sizes else aten.select.int):
        return None
    if packing.sizes and len(user.args) != 4:  # without an end, or with a step
        return None
    leaf, dim, *bounds = user.args
    if dim % value_of(leaf).dim() != packing.dim:
        return None
    if not packing.sizes:
        return bounds[0] % packing.count
    found = bounds[0] or 0, min(bounds[1], value_of(leaf).shape[packing.dim])
    ends = [*accumulate(packing.sizes)]
    parts = [*zip([0, *ends], ends, strict=False)]
    return parts.index(found) if found in parts else None
