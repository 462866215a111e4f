"""Sequences of different lengths, packed end to end into B rows that reset between them."""

from __future__ import annotations

import copy
import heapq
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ..._random_state import random_state, same_random_state, set_random_state
from ..._trees import Tree, tree_leaves
from ...distributed.shares import share_of
from .chunk import Chunk, TimeAxes, as_tensors, check_leaves, error_prefix, map_leaves
from .contiguous import checked_layout


class _Slot(NamedTuple):
    """A sequence by where it is: at ``position`` in the order of ``row``."""

    row: int
    position: int


class _RandomLoad(NamedTuple):
    """Slots whose sequences were loaded one after the other, and drew random numbers.

    ``random`` is the state before that, so that they can be loaded again with the same values.
    """

    random: dict[str, Any]
    slots: list[_Slot]


class PackedSequences:
    """PackedSequences : [(x[n, ...], y[n, ...]), ...], rows -> Source of x[T, B, ...], y[T, B, ...]

    Each row runs through sequences one after the other; ``reset`` is true where one begins. There
    is padding, false in ``mask``, only where rows end before the longest one. Sequences are
    assigned longest first, each to the row with the fewest steps so far (LPT scheduling; Graham,
    1969), and are then shuffled within their rows. ``utilisation`` is the fraction of steps that
    are valid. If a sequence is longer than the average row, fewer rows raise it.

    ``sequences``
        Indexed as ``sequences[i] -> (x, y)``, such as a list or a map-style ``Dataset``; ``(x,
        None)`` without a target. A sequence is loaded when a window reaches it, and held until no
        window can reach back to it.
    ``lengths``
        The number of steps of each sequence; saves loading all of them once at the start.
    ``seed``
        Shuffles, differently in each epoch. None: the longest comes first in each row.
    ``time_dim``
        With 1, data is ``[B, T, ...]``.

    The loss must return one value per step and row, since there is a mask. Raises TypeError for
    anything but pairs of tensors or arrays; ValueError if there are no sequences, for an empty
    sequence, for masked arrays, for x and y of different lengths, and for sequences with different
    features.

    >>> x = [torch.arange(n) for n in (3, 1, 2)]
    >>> packed = PackedSequences([(s, s) for s in x], rows=2, seed=None)
    >>> chunk = packed.read(0, 3)
    >>> chunk.x.tolist(), chunk.reset.tolist(), packed.utilisation
    ([[0, 0], [1, 1], [2, 0]], [[True, True], [False, False], [False, True]], 1.0)
    """

    def __init__(
        self,
        sequences: Any,
        rows: int,
        *,
        lengths: Sequence[int] | None = None,
        seed: int | None = 0,
        time_dim: int = 0,
    ) -> None:
        rows, time_dim = checked_layout(rows, time_dim)
        if not hasattr(sequences, "__len__"):
            raise TypeError(
                "sequences: expected a list of (x, y), or an object with len() and indices, found "
                f"{type(sequences).__name__}. A generator can be listed: list(sequences)."
            )
        if lengths is None:
            lengths = [_load(sequences, i)[1] for i in range(len(sequences))]
        elif len(lengths) != len(sequences):
            raise ValueError(
                f"lengths: has {len(lengths)}, but there are {len(sequences)} sequences."
            )
        if not len(lengths):
            raise ValueError("sequences: expected at least one, found none.")
        for i, length in enumerate(lengths):
            if length < 1:
                raise ValueError(f"sequences[{i}]: has {length} steps. Leave empty ones out.")
        self.sequences, self.rows, self.seed, self.time_dim = sequences, rows, seed, time_dim
        self._lengths = [int(length) for length in lengths]
        self._assignment = _assign(self._lengths, rows)  # the sequences of each row, longest first
        self._first_row = 0  # the number of this reader's first row among those of all ranks
        self.total: int | None = max(self._row_lengths())
        self._example: Chunk | None = None  # no steps; every sequence must have its kinds of leaves
        self._begin_rows()

    def _row_lengths(self) -> list[int]:
        return [sum(self._lengths[i] for i in sequences) for sequences in self._assignment]

    def _begin_rows(self) -> None:
        assert self.total is not None
        self.rows = len(self._assignment)
        self.utilisation = sum(self._row_lengths()) / (self.rows * self.total)
        self.begin(0)

    def share(self, rank: int, size: int) -> PackedSequences:
        """The rows of ``rank`` out of ``size``, read independently. Each row belongs to one rank.

        All rows have about as many steps, and so have all ranks. Every part has the same number of
        windows: one whose rows have all ended reads padding.
        """
        part = copy.copy(self)
        rows = share_of(self.rows, rank, size)
        part._assignment = [self._assignment[row] for row in rows]
        part._first_row = self._first_row + rows[0]
        part._begin_rows()
        return part

    def __repr__(self) -> str:
        return (
            f"PackedSequences({len(self._lengths)} sequences in {self.rows} rows of {self.total} "
            f"steps, {self.utilisation:.1%} of them valid)"
        )

    def begin(self, epoch: int) -> None:
        """See :class:`Source`. With a ``seed``, each epoch has an order of its own."""
        self._order = [list(sequences) for sequences in self._assignment]
        if self.seed is not None:
            for row, sequences in enumerate(self._order, self._first_row):
                # One generator per row: its order does not depend on the number of ranks. Of a
                # string, random.Random takes a SHA-512 hash, so all three numbers are mixed.
                random.Random(f"{self.seed} {epoch} {row}").shuffle(sequences)
        # For each row, the first step of each of its sequences, and the step after the last one.
        self._edges = [
            [0, *accumulate(self._lengths[i] for i in sequences)] for sequences in self._order
        ]
        # For each row, by position in it: sequences that a window has reached and none has passed.
        self._held: list[dict[int, Chunk]] = [{} for _ in range(self.rows)]
        # Those of the loads of held sequences that drew random numbers, as a data set with
        # augmentation does.
        self._random_loads: list[_RandomLoad] = []

    # -- reading ----------------------------------------------------------------------------------

    def read(self, start: int, stop: int) -> Chunk | None:
        """See :class:`Source`. Steps after the end of a row are padding."""
        assert self.total is not None
        stop = min(stop, self.total)
        if start >= stop:
            return None
        self._drop_before(start)
        self._load_window(start, stop)
        steps, example = stop - start, self._get_example()
        x, y = self._zeros(example.x, steps), self._zeros(example.y, steps)
        like = tree_leaves(x)[0]
        reset, mask = (like.new_zeros(steps, self.rows, dtype=torch.bool) for _ in range(2))
        for row, (edges, held) in enumerate(zip(self._edges, self._held, strict=True)):
            at = start
            while at < min(stop, edges[-1]):
                i = bisect_right(edges, at) - 1
                first, end = edges[i], min(stop, edges[i + 1])
                target, source = slice(at - start, end - start), slice(at - first, end - first)
                reset[at - start, row] |= at == first
                mask[target, row] = True
                _copy_steps(x, held[i].x, target, row, source)
                _copy_steps(y, held[i].y, target, row, source)
                at = end
        chunk = Chunk(x, y, reset, mask)
        if self.time_dim:
            chunk = map_leaves(lambda leaf: leaf.transpose(0, 1), chunk)
        return chunk

    def _drop_before(self, start: int) -> None:
        """Drops the sequences that end before a step, which no window reads any more."""
        for edges, held in zip(self._edges, self._held, strict=True):
            for passed in [i for i in held if edges[i + 1] <= start]:
                del held[passed]
        self._random_loads = [
            load
            for load in self._random_loads
            if any(slot.position in self._held[slot.row] for slot in load.slots)
        ]

    def _load_window(self, start: int, stop: int) -> None:
        """Loads the sequences that this window is the first to reach."""
        slots = [
            _Slot(row, i)
            for row, (edges, held) in enumerate(zip(self._edges, self._held, strict=True))
            for i in range(bisect_right(edges, start) - 1, bisect_left(edges, stop))
            if i < len(edges) - 1 and i not in held
        ]
        if not slots:
            return
        before = random_state()
        self._load_slots(slots)
        if not same_random_state(before, random_state()):
            self._random_loads.append(_RandomLoad(before, slots))

    def _load_slots(self, slots: list[_Slot]) -> None:
        for slot in slots:
            self._held[slot.row][slot.position] = self._sequence(
                self._order[slot.row][slot.position]
            )

    def _sequence(self, number: int) -> Chunk:
        chunk, length = _load(self.sequences, number)
        if length != self._lengths[number]:
            raise ValueError(
                f"sequences[{number}]: has {length} steps, but lengths says "
                f"{self._lengths[number]}."
            )
        chunk = as_tensors(chunk)
        no_steps = map_leaves(lambda leaf: leaf[:0], chunk)
        if self._example is None:
            # A copy: a slice would keep the memory of the sequence alive.
            self._example = map_leaves(torch.clone, no_steps)
        elif _kinds(no_steps) != _kinds(self._example):
            raise ValueError(
                f"sequences[{number}]: is not like one before it. All must have the same "
                "structure, dtypes and features; only their number of steps may differ."
            )
        return chunk

    def _get_example(self) -> Chunk:
        if self._example is None:  # this reader's rows have no sequence in any window so far
            before = random_state()
            self._sequence(0)
            set_random_state(before)
        assert self._example is not None
        return self._example

    def _zeros(self, tree: Tree, steps: int) -> Tree:
        return map_leaves(lambda leaf: leaf.new_zeros((steps, self.rows, *leaf.shape[1:])), tree)

    # -- reading again ----------------------------------------------------------------------------

    def reading(self) -> dict[str, Any]:
        """The random numbers that the loaded sequences were drawn with, for a checkpoint."""
        loads = [
            [load.random, [[self._first_row + slot.row, slot.position] for slot in load.slots]]
            for load in self._random_loads
        ]
        return {"drawn": loads}

    def read_again(self, reading: dict[str, Any], epoch: int, start: int) -> None:
        """Loads the sequences with random values again, in the same order."""
        self.begin(epoch)
        for state, all_slots in reading["drawn"]:
            slots = [_Slot(row - self._first_row, i) for row, i in all_slots]
            slots = [slot for slot in slots if 0 <= slot.row < self.rows]
            set_random_state(state)
            self._load_slots(slots)
            self._random_loads.append(_RandomLoad(state, slots))
        self._drop_before(start)


def _copy_steps(batch: Tree, sequence: Tree, target: slice, row: int, source: slice) -> None:
    """Writes steps ``source`` of a sequence to steps ``target`` of a row of the batch."""
    if sequence is None:
        return
    for batch_leaf, leaf in zip(tree_leaves(batch), tree_leaves(sequence), strict=True):
        batch_leaf[target, row] = leaf[source]


def _kinds(tree: Tree) -> Any:
    return map_leaves(lambda leaf: (leaf.dtype, leaf.shape), tree)


def _load(sequences: Any, number: int) -> tuple[Chunk, int]:
    """A sequence, and its number of steps."""
    item = sequences[number]
    with error_prefix(f"sequences[{number}]"):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise TypeError(
                f"expected (x, y), found {type(item).__name__}. For sequences without a target: "
                "(x, None)."
            )
        chunk = check_leaves(Chunk(*item))
        return chunk, TimeAxes().length(chunk)


def _assign(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """The sequences of each row: the longest first, to the row with the fewest steps."""
    shortest_first = [(0, row) for row in range(rows)]  # a heap of (steps, row)
    assignment: list[list[int]] = [[] for _ in range(rows)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        steps, row = heapq.heappop(shortest_first)
        assignment[row].append(i)
        heapq.heappush(shortest_first, (steps + lengths[i], row))
    return assignment
