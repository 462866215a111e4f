"""Where time, rows and the axis of ``in_dims`` lie in the caller's data; inside, time is axis 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._trees import Tree, tree_leaves, tree_map
from .step import Step

# The batch axes of (params, state, x, y) that a single call of the step does not see.
InDims = tuple[None, int | None, int, int | None]


@dataclass(frozen=True)
class Layout:
    """The time axis of ``x``, ``y`` and ``out``."""

    time_dim: int

    @classmethod
    def of(cls, step: Step, time_dim: int | None, x: Tree, batch_axes: int = 0) -> Layout:
        """The caller's ``time_dim``; if None, 1 for batched data of a ``batch_first`` step, else 0.

        ``batch_axes``: axes of ``x`` that a single call of the step does not see.
        """
        if time_dim is None:
            leaves = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]
            least = step.batched_axes + batch_axes
            batched = bool(leaves) and all(leaf.dim() >= least for leaf in leaves)
            time_dim = 1 if step.batch_first and batched else 0
        return cls(time_dim)

    @property
    def x_time(self) -> int:
        """The axis of time in the caller's ``x``."""
        return self.time_dim

    @property
    def y_time(self) -> int:
        return self.time_dim

    @property
    def x_rows(self) -> int:
        """The axis of the rows in the caller's ``x``, if it has rows."""
        return 1 - self.time_dim

    @property
    def y_rows(self) -> int | None:
        """The same in ``y``; None if all rows have the same."""
        return 1 - self.time_dim

    def at_step(self, leaf: Tensor, t: int) -> Tensor:
        """Step ``t`` of a state leaf that came as a part of ``out``."""
        return leaf.select(self.time_dim, t)

    def time_first(self, tree: Tree) -> Tree:
        return self._moved(tree, self.time_dim, 0)

    def time_back(self, tree: Tree) -> Tree:
        try:
            return self._moved(tree, 0, self.time_dim)
        except IndexError as error:
            raise ValueError(
                "out: a part of it is a single number at each step, so that time cannot be on axis "
                f"{self.time_dim} of it, where x has it. Return a number for each row, as by "
                "expand, or give time on axis 0."
            ) from error

    def _moved(self, tree: Tree, source: int, target: int) -> Tree:
        if source == target or tree is None:
            return tree
        return tree_map(lambda leaf: leaf.movedim(source, target), tree)

    def flag_axes(self, axes: int) -> tuple[int, int | None]:
        """The axes of time and of the rows in ``reset`` or ``mask``, of ``axes`` axes.

        They lie in the order in which ``x`` has them. Flags of one axis hold for all rows.
        """
        return (0, None) if axes < 2 else (self.time_dim, 1 - self.time_dim)

    def flags_first(self, flags: Tensor) -> Tensor:
        """``reset`` or ``mask`` -> [K], or [K, B, ...]"""
        time, rows = self.flag_axes(flags.dim())
        return flags if rows is None else flags.movedim((time, rows), (0, 1))

    def flags_back(self, flags: Tensor) -> Tensor:
        time, rows = self.flag_axes(flags.dim())
        return flags if rows is None else flags.movedim((0, 1), (time, rows))


@dataclass(frozen=True)
class InDimsLayout(Layout):
    """As Layout, with a batch axis that the step does not see (``in_dims``) right behind time.

    ``state_dim``, ``x_dim`` and ``y_dim`` are where the caller has that axis, or None.
    """

    state_dim: int | None
    x_dim: int
    y_dim: int | None

    @property
    def x_time(self) -> int:
        return self.time_dim + (self.x_dim <= self.time_dim)

    @property
    def y_time(self) -> int:
        return self.time_dim + (self.y_dim is not None and self.y_dim <= self.time_dim)

    @property
    def x_rows(self) -> int:
        return self.x_dim

    @property
    def y_rows(self) -> int | None:
        return self.y_dim

    def at_step(self, leaf: Tensor, t: int) -> Tensor:
        return self.state_back(self.sequence_first(leaf, self.x_dim)[t])

    def sequence_first(self, leaf: Tensor, dim: int | None) -> Tensor:
        """The caller's sequence -> [K, B, ...], or [K, ...] without the axis."""
        if dim is None:
            return leaf.movedim(self.time_dim, 0)
        return leaf.movedim(dim, 0).movedim(self.time_dim + 1, 0)

    def sequence_back(self, leaf: Tensor) -> Tensor:
        """[K, B, ...] -> the layout of ``x``."""
        if leaf.dim() <= max(self.x_dim, self.time_dim + 1):
            steps, rows, *shape = leaf.shape
            raise ValueError(
                f"out: has shape {shape} at each of {steps} steps of {rows} sequences, so that "
                f"none of its axes can be {self.x_dim}, where in_dims has the sequences of x. "
                "Name a lower axis of x, or return more axes."
            )
        return leaf.movedim(0, self.time_dim + 1).movedim(0, self.x_dim)

    def flag_axes(self, axes: int) -> tuple[int, int | None]:
        """As of a Layout; three axes if a single sequence has rows of its own."""
        if axes < 2:
            return 0, None
        rows_of_one = 1 - self.time_dim
        in_x = [self.x_time, self.x_dim, rows_of_one + (self.x_dim <= rows_of_one)][:axes]
        time, rows = (sum(other < axis for other in in_x) for axis in in_x[:2])
        return time, rows

    def state_back(self, leaf: Tensor) -> Tensor:
        return leaf if self.state_dim is None else leaf.movedim(0, self.state_dim)


def where_rows(rows: Tensor, yes: Tree, no: Tree, row_axis: Callable[[Tensor], int]) -> Tree:
    """``torch.where(rows, yes, no)`` for each leaf; ``rows`` is a scalar or one bool per row."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        flags = rows
        if rows.dim():
            axis = row_axis(b)
            flags = rows.reshape([-1 if d == axis else 1 for d in range(b.dim())])
        return torch.where(flags, a, b)

    return tree_map(choose, yes, no)
