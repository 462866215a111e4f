"""The rows of a batch: how many there are, and how a batch is split into parts of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..._trees import Tree, tree_leaves, tree_map
from ...contract.layout import InDimsLayout, Layout
from .chunk import Chunk


def leaf_with_rows(x: Tree) -> Tensor:
    """The first leaf with the most axes: others may be the same for all rows, as the time is."""
    leaf: Tensor = x if isinstance(x, Tensor) else max(tree_leaves(x), key=lambda leaf: leaf.dim())
    return leaf


def count_rows(
    chunk: Chunk, state: Tree, layout: Layout, row_axis: Callable[[Tensor], int], batched_axes: int
) -> int | None:
    """The number of rows in the batch; None for data without rows.

    ``batched_axes`` is the fewest axes that ``x`` has with rows. Where neither that nor a flag
    decides, an axis of ``x`` is taken for rows, and not for features, if ``y`` and the state have
    it too. (Of ``y`` one leaf is enough: beside the targets there may be a weight of each step. A
    leaf of the state without that axis, such as a count of steps, is the same for all rows.)
    """
    for flags in (chunk.reset, chunk.mask):
        if flags is not None and (axis := layout.flag_axes(flags.dim())[1]) is not None:
            return int(flags.shape[axis])
    x = leaf_with_rows(chunk.x)
    if isinstance(layout, InDimsLayout):
        return int(x.shape[layout.x_rows])
    if x.dim() < batched_axes:
        return None
    targets = [leaf for leaf in tree_leaves(chunk.y) if leaf is not None]
    if x.dim() == 2 and targets and all(leaf.dim() < 2 for leaf in targets):
        return None
    rows = int(x.shape[layout.x_rows])
    leaves = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    sizes = [leaf.shape[row_axis(leaf)] for leaf in leaves if leaf.dim() > row_axis(leaf)]
    state_has_rows = all(size == rows for size in sizes) and (sizes or not leaves)
    return rows if state_has_rows else None


def valid_steps(mask: Tensor, steps: int, rows: int, context: int, layout: Layout) -> Tensor:
    """The number of steps with a loss, summed over rows, on the mask's device."""
    if mask.dim() == 1:
        return mask[context:].sum() * rows
    return mask.narrow(layout.flag_axes(mask.dim())[0], context, steps - context).sum()


def split_rows(
    chunk: Chunk, state: Tree, parts: int, layout: Layout, row_axis: Callable[[Tensor], int]
) -> list[tuple[Chunk, Tree]]:
    """The chunk and the state in at most ``parts`` nearly equal parts of their rows, none empty.

    A leaf without an axis of rows, such as a weight of each step in ``y``, belongs to all of them.
    """
    rows = leaf_with_rows(chunk.x).shape[layout.x_rows]
    parts = min(parts, rows)

    def split(tree: Tree, axis_of: Callable[[Tensor], int | None]) -> list[Tree]:
        if tree is None:
            return [None] * parts

        def part(leaf: Tensor, i: int) -> Tensor:
            axis = axis_of(leaf)
            if axis is None or leaf.dim() <= axis or leaf.shape[axis] != rows:
                return leaf
            return torch.tensor_split(leaf, parts, axis)[i]

        return [tree_map(lambda leaf, i=i: part(leaf, i), tree) for i in range(parts)]

    def flag_axis(flags: Tensor) -> int | None:
        return layout.flag_axes(flags.dim())[1]

    chunks = zip(
        split(chunk.x, lambda leaf: layout.x_rows),
        split(chunk.y, lambda leaf: layout.y_rows),
        split(chunk.reset, flag_axis),
        split(chunk.mask, flag_axis),
        strict=True,
    )
    states = split(state, row_axis)
    return [(Chunk(*leaves), part) for leaves, part in zip(chunks, states, strict=True)]


def join_rows(states: list[Tree], row_axis: Callable[[Tensor], int]) -> Tree:
    """The states of parts of the rows as one."""
    if len(states) == 1:
        return states[0]
    return tree_map(lambda *leaves: torch.cat(leaves, row_axis(leaves[0])), *states)
