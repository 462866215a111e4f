"""The layout of a segment's data and state: where time and rows are, how many, and in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._trees import (
    Tree,
    in_order_of,
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
)
from ...contract.layout import InDimsLayout, Layout, where_rows
from ...distributed.shares import share_of
from ...segment.train_segment import TrainSegment
from .chunk import Chunk, TimeAxes, as_tensors, check_leaves, error_prefix
from .rows import count_rows, join_rows, leaf_with_rows, split_rows, valid_steps


class Counts(NamedTuple):
    """What a chunk has: see :meth:`DataLayout.count`."""

    rows: int | None
    weight: int | Tensor
    steps: int
    tokens: int


class DataLayout:
    """Where time and rows are in the data and the state of a segment.

    ``inner`` is the segment that knows; None for a caller's function, which has time on axis
    ``time_dim`` of data and rows on axis 0 of the state. What is found out from the first data
    holds for all of it, and is kept.
    """

    def __init__(self, inner: TrainSegment | None, time_dim: int | None) -> None:
        self.inner = inner
        self.first_row = 0  # of this rank's share, among the rows of all
        self._time_dim = time_dim
        self._layout: Layout | None = None
        self._axes: TimeAxes | None = None
        self._rows: dict[int, int | None] = {}  # by the size of the axis of x where rows would be

    def layout(self, x: Tree) -> Layout:
        """The layout of the data, of which ``x`` is a part: tensors or arrays."""
        if self._layout is None:
            self._layout = self._layout_of(x)
        return self._layout

    def _layout_of(self, x: Tree) -> Layout:
        if self.inner is None:
            return Layout(self._time_dim or 0)
        if not isinstance(x, Tensor):
            x = tree_map(lambda leaf: torch.empty(tuple(leaf.shape), device="meta"), x)
        return self.inner.layout(x)

    def axes(self, x: Tree) -> TimeAxes:
        """The time axes alone."""
        if self._axes is None:
            self._axes = TimeAxes.of(self.layout(x))
        return self._axes

    def row_axis(self, leaf: Tensor) -> int:
        """The axis of the rows in a leaf of the state."""
        return 0 if self.inner is None else self.inner.row_axis(leaf)

    def prepared(self, prepare: Callable[[Tree, Tree], tuple[Tree, Tree]], chunk: Chunk) -> Chunk:
        """The chunk with ``prepare(x, y)`` as its ``x`` and ``y``.

        Raises TypeError and ValueError if that is not a pair of sequences of the same length, with
        time on the same axis.
        """
        result = prepare(chunk.x, chunk.y)
        with error_prefix("prepare"):
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                raise TypeError(f"expected it to return (x, y), found {type(result).__name__}.")
            axes, after = self.axes(chunk.x), chunk._replace(x=result[0], y=result[1])
            after = as_tensors(check_leaves(after))
            axis_after = self._layout_of(after.x).x_time
            if axis_after != axes.x:
                raise ValueError(
                    f"time is on axis {axes.x} of the x that it is given, but on axis {axis_after} "
                    "of what it returns. Say where: make_train_segment(..., "
                    f"time_dim={axis_after})."
                )
            steps, steps_after = axes.steps(chunk), axes.length(after)
            if steps_after != steps:
                raise ValueError(f"it was given {steps} steps and returned {steps_after}.")
        return after

    # -- counting ---------------------------------------------------------------------------------

    def steps(self, chunk: Chunk) -> int:
        """The number of steps of a chunk."""
        return self.axes(chunk.x).steps(chunk)

    def rows(self, chunk: Chunk, state: Tree) -> int | None:
        """The number of rows in the batch; None for data without rows."""
        layout = self._layout or self.layout(chunk.x)
        x = leaf_with_rows(chunk.x)
        size = x.shape[layout.x_rows] if x.dim() > layout.x_rows else 0
        if size not in self._rows:
            batched_axes = 2 if self.inner is None else self.inner.batched_axes
            self._rows[size] = count_rows(chunk, state, layout, self.row_axis, batched_axes)
        return self._rows[size]

    def count(self, chunk: Chunk, state: Tree, context: int) -> Counts:
        """The rows of a chunk, the weight of its loss in a mean, its steps and its tokens.

        Tokens are the steps of all rows, valid or not. The weight is the number of those with a
        loss: the valid ones after the first ``context``. With ``in_dims`` the segment's loss is a
        mean over sequences, however many valid steps each has. There the weight is the number of
        all steps after ``context``, so that parts of a batch weigh as many as their sequences.
        """
        rows, layout, steps = self.rows(chunk, state), self.layout(chunk.x), self.steps(chunk)
        all_rows = self._all_rows(chunk, state)
        weight: int | Tensor = (steps - context) * all_rows
        if chunk.mask is not None and not isinstance(layout, InDimsLayout):
            weight = valid_steps(chunk.mask, steps, all_rows, context, layout)
        return Counts(rows, weight, steps, steps * all_rows)

    def count_of_models(self, chunk: Chunk, state: Tree, context: int, loss: Tensor) -> Counts:
        """The same of each of M models, if ``loss`` is [M], as of a segment under vmap.

        Of models with masks of their own the weight is [M].
        """
        leaves = [leaf for leaf in tree_leaves(state) if leaf is not None]
        has_models = loss.dim() == 1 and all(leaf.shape[:1] == loss.shape for leaf in leaves)
        if self.inner is not None or not has_models:
            return self.count(chunk, state, context)
        layout, mask = self.layout(chunk.x), chunk.mask
        one = chunk._replace(reset=None, mask=None)
        if has_own_data := layout.x_time == 1:
            first = tree_map(lambda leaf: None if leaf is None else leaf[0], (chunk.x, chunk.y))
            one, layout = Chunk(*first), Layout(0)
        rows = count_rows(one, state, layout, lambda leaf: 1, 2) or 1
        steps = self.steps(chunk)
        weight: int | Tensor = (steps - context) * rows
        if mask is not None and mask.dim() > 1 and has_own_data:
            valid = mask[:, context:].flatten(1).sum(1)
            weight = valid if mask.dim() > 2 else valid * rows
        elif mask is not None:
            weight = valid_steps(mask, steps, rows, context, layout)
        return Counts(self.rows(chunk, state), weight, steps, steps * rows)

    def valid_steps(self, chunk: Chunk, state: Tree) -> int | Tensor:
        """The number of valid steps, summed over rows."""
        rows, steps = self._all_rows(chunk, state), self.steps(chunk)
        if chunk.mask is None:
            return steps * rows
        return valid_steps(chunk.mask, steps, rows, 0, self.layout(chunk.x))

    def _all_rows(self, chunk: Chunk, state: Tree) -> int:
        """The number of rows, 1 without any; in an ensemble's state they are behind the models."""
        rows = self.rows(chunk, state)
        if rows is None and self.inner is None:
            rows = count_rows(chunk, state, self.layout(chunk.x), lambda leaf: 1, 2)
        return rows or 1

    # -- parts of the rows ------------------------------------------------------------------------

    def micro_batches(self, chunk: Chunk, state: Tree, parts: int) -> list[tuple[Chunk, Tree]]:
        """The chunk and the state in parts of their rows."""
        if self.rows(chunk, state) is None:
            raise ValueError(
                "micro_batches: x, y and the state have no rows in common that could be split."
            )
        for path, leaf in tree_flatten_with_path(state)[0]:
            if leaf is not None and leaf.dim() <= self.row_axis(leaf):
                raise ValueError(
                    f"micro_batches: state{keystr(path)} has shape {list(leaf.shape)}, without the "
                    "axis of rows, which are split. Give each row its own."
                )
        return split_rows(chunk, state, parts, self.layout(chunk.x), self.row_axis)

    def join_states(self, states: list[Tree]) -> Tree:
        """The states of micro-batches as one."""
        return join_rows(states, self.row_axis)

    def set_share(self, rows: int, rank: int, size: int) -> None:
        """Says of how many rows the data to come is a rank's share.

        Raises ValueError if there are fewer rows than ranks.
        """
        self.first_row = share_of(rows, rank, size).start

    def own_rows(self, rank: int, size: int, state: Tree, chunk: Chunk) -> Chunk:
        """The part of a chunk in the rows of a rank; ``state`` is that of all rows."""
        layout = self.layout(chunk.x)
        x = leaf_with_rows(chunk.x)
        if x.dim() <= layout.x_rows or self.rows(chunk, state) is None:
            raise ValueError(
                f"mesh: x of shape {list(x.shape)}, y and the state have no rows in common, which "
                "the ranks would share. Give all of them an axis of as many rows; the last batch "
                "of a DataLoader may have fewer: drop_last=True."
            )
        self.set_share(x.shape[layout.x_rows], rank, size)
        return split_rows(chunk, (), size, layout, self.row_axis)[rank][0]

    def own_state(self, rank: int, size: int, state: Tree) -> Tree:
        """The rows of a state that belong to a rank."""
        if state is None:
            return None
        for path, leaf in tree_flatten_with_path(state)[0]:
            if leaf.dim() <= self.row_axis(leaf):
                raise ValueError(
                    f"mesh: state{keystr(path)} has shape {list(leaf.shape)}, without the axis of "
                    "rows, which the ranks share. Give each row its own."
                )
        return tree_map(lambda leaf: leaf.tensor_split(size, self.row_axis(leaf))[rank], state)

    def restart_nonfinite_rows(self, state: Tree, initial: Tree, rows: int | None) -> Tree:
        """The state, with rows that are not finite replaced by those of ``initial`` (None: zeros).

        Data without rows (None) is replaced as one, and so is a state of which all rows share a
        part. None stays: the state that a step starts from.
        """
        if state is None:
            return None
        if initial is None:
            initial = tree_map(torch.zeros_like, state)
        initial = tree_map(self._with_row_axis, in_order_of(state, initial), state)
        leaves = tree_leaves(state)
        if rows is None or any(leaf.dim() <= self.row_axis(leaf) for leaf in leaves):
            return state if all(leaf.isfinite().all() for leaf in leaves) else initial
        for leaf in leaves:
            axis = self.row_axis(leaf)
            is_bad = ~torch.isfinite(leaf.movedim(axis, 0).reshape(leaf.shape[axis], -1)).all(1)
            state = where_rows(is_bad, initial, state, self.row_axis)
        return state

    def _with_row_axis(self, initial: Tensor, leaf: Tensor) -> Tensor:
        """A leaf of ``initial_state``, with a row axis if it has none, as ``leaf`` has it."""
        if initial.dim() == leaf.dim() - 1:
            return initial.unsqueeze(self.row_axis(leaf))
        return initial
