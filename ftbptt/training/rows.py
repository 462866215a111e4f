"""The rows of a batch: how many there are, and a batch in parts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._layout import Layout, SharedLayout
from .._trees import tree_leaves, tree_map
from .chunk import Chunk

Tree = Any


def count_rows(
    chunk: Chunk, state: Tree, layout: Layout, row_axis: Callable[[Tensor], int], least_axes: int
) -> int | None:
    """The rows of the batch; None for data without rows.

    ``least_axes``: those that ``x`` has if it has rows. Where neither that nor a flag decides, what
    tells features from rows is whether ``y`` and the state have as many.
    """
    for flags in (chunk.reset, chunk.mask):
        if flags is not None and flags.dim() > 1:
            return int(flags.shape[layout.x_rows])
    x = tree_leaves(chunk.x)[0]
    if isinstance(layout, SharedLayout):
        return int(x.shape[layout.x_rows])
    if x.dim() < least_axes:
        return None
    if x.dim() == 2 and any(leaf.dim() < 2 for leaf in tree_leaves(chunk.y) if leaf is not None):
        return None
    rows = int(x.shape[layout.x_rows])
    state_has_them = all(
        leaf.dim() > row_axis(leaf) and leaf.shape[row_axis(leaf)] == rows
        for leaf in tree_leaves(state)
        if isinstance(leaf, Tensor)
    )
    return rows if state_has_them else None


def valid_steps(mask: Tensor, steps: int, rows: int, context: int, layout: Layout) -> Tensor:
    """How many steps of all rows have a loss, on the mask's device."""
    if mask.dim() == 1:
        return mask[context:].sum() * rows
    return mask.narrow(layout.x_time, context, steps - context).sum()


def split_rows(
    chunk: Chunk, state: Tree, parts: int, layout: Layout, row_axis: Callable[[Tensor], int]
) -> list[tuple[Chunk, Tree]]:
    """The chunk and the state in nearly equal parts of their rows, none of them empty."""
    parts = min(parts, tree_leaves(chunk.x)[0].shape[layout.x_rows])

    def split(tree: Tree, axis_of: Callable[[Tensor], int | None]) -> list[Tree]:
        if tree is None:
            return [None] * parts

        def part(leaf: Tensor, i: int) -> Tensor:
            axis = axis_of(leaf)
            return leaf if axis is None else torch.tensor_split(leaf, parts, axis)[i]

        return [tree_map(lambda leaf, i=i: part(leaf, i), tree) for i in range(parts)]

    def of_flags(leaf: Tensor) -> int | None:
        return layout.x_rows if leaf.dim() > 1 else None

    chunks = zip(
        split(chunk.x, lambda leaf: layout.x_rows),
        split(chunk.y, lambda leaf: layout.y_rows),
        split(chunk.reset, of_flags),
        split(chunk.mask, of_flags),
        strict=True,
    )
    states = split(state, row_axis)
    return [(Chunk(*own), part) for own, part in zip(chunks, states, strict=True)]


def join_rows(states: list[Tree], row_axis: Callable[[Tensor], int]) -> Tree:
    """The states of parts of the rows as one."""
    if len(states) == 1:
        return states[0]
    return tree_map(lambda *leaves: torch.cat(leaves, row_axis(leaves[0])), *states)
