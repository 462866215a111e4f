"""Sequences of different lengths on B running rows, a row restarting where a sequence ends."""

from __future__ import annotations

import copy
import heapq
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from .._trees import tree_leaves, tree_map
from ..distributed.shares import share_of
from .checkpoint import random_state, same_random_state, set_random_state
from .chunk import Chunk, TimeAxes, as_tensors, checked, naming
from .contiguous import checked_layout

Tree = Any


class PackedSequences:
    """PackedSequences : [(x[n, ...], y[n, ...]), ...], rows -> Source of x[T, B, ...], y[T, B, ...]

    Each row runs through sequences one after the other; ``reset`` is true where one begins. There
    is padding, false in ``mask``, only where rows end before the longest: sequences are dealt out
    longest first, each to the row with the fewest steps so far (Graham, 1969), and only then
    shuffled within their rows. ``utilisation`` is the part of the steps that are valid; where a
    sequence is longer than the share of a row, fewer rows raise it.

    ``sequences`` is indexed, ``sequences[i] -> (x, y)``, such as a list or a map-style ``Dataset``;
    a sequence is asked for when a window reaches it, and kept until it is past. ``lengths`` saves
    asking for each of them once at the start. ``seed`` shuffles, in another way each epoch; None
    keeps each row longest first. With ``time_dim=1`` data is ``[B, T, ...]``.

    The loss must return one value per step and row, since there is a mask. Raises TypeError for
    anything but pairs of tensors or arrays, ValueError for an empty set or an empty sequence, for x
    and y of different lengths, and for sequences of different features.

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
        if lengths is None:
            lengths = [_sequence(sequences, i)[1] for i in range(len(sequences))]
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
        self._dealt = _deal(self._lengths, rows)
        self._first_row = 0  # of those that are shared with other ranks
        self.total: int | None = max(self._loads())
        self._none: Chunk | None = None  # no step of a sequence, which all have to be like
        self._begin_rows()

    def _loads(self) -> list[int]:
        return [sum(self._lengths[i] for i in own) for own in self._dealt]

    def _begin_rows(self) -> None:
        assert self.total is not None
        self.rows = len(self._dealt)
        self.utilisation = sum(self._loads()) / (self.rows * self.total)
        self.begin(0)

    def share(self, rank: int, size: int) -> PackedSequences:
        """The part of ``rank`` out of ``size``: every sequence is in one of the parts.

        Rows have about as many steps each, so ranks have. All parts have as many windows: one that
        reaches back sees steps of rows that have ended. A part is read by itself.
        """
        own = copy.copy(self)
        rows = share_of(self.rows, rank, size)
        own._dealt, own._first_row = [self._dealt[i] for i in rows], self._first_row + rows[0]
        own._begin_rows()
        return own

    def __repr__(self) -> str:
        return (
            f"PackedSequences({len(self._lengths)} sequences in {self.rows} rows of {self.total} "
            f"steps, {self.utilisation:.1%} of them valid)"
        )

    def begin(self, epoch: int) -> None:
        self._order = [list(own) for own in self._dealt]
        if self.seed is not None:
            for row, own in enumerate(self._order, self._first_row):
                # Each row has a generator, so that its order is the same on any number of ranks.
                # Python hashes a string (SHA-512) into all of its state.
                random.Random(f"{self.seed} {epoch} {row}").shuffle(own)
        # By place in its row: those that a window has reached and none has passed.
        self._held: list[dict[int, Chunk]] = [{} for _ in range(self.rows)]
        # The random numbers before a read that drew some, and the sequences it asked for: a data
        # set may draw their values, and what is read again must be the same.
        self._drawn: list[tuple[dict[str, Any], list[tuple[int, int]]]] = []
        # The first step of each sequence of a row, and after the last one.
        self._edges = [[0, *accumulate(self._lengths[i] for i in own)] for own in self._order]

    def read(self, start: int, stop: int) -> Chunk | None:
        assert self.total is not None
        stop = min(stop, self.total)
        if start >= stop:
            return None
        reset = torch.zeros(stop - start, self.rows, dtype=torch.bool)
        mask = torch.zeros(stop - start, self.rows, dtype=torch.bool)
        self._drop(start)
        self._ask(start, stop)
        none = self._like()
        x, y = (self._zeros(tree, stop - start) for tree in (none.x, none.y))
        for row in range(self.rows):
            edges, held = self._edges[row], self._held[row]
            at = start
            while at < min(stop, edges[-1]):
                i = bisect_right(edges, at) - 1
                end = min(stop, edges[i + 1])
                reset[at - start, row] |= at == edges[i]
                mask[at - start : end - start, row] = True
                own = held[i]
                part = slice(at - edges[i], end - edges[i])
                to = slice(at - start, end - start)
                self._fill(x, own.x, to, row, part)
                self._fill(y, own.y, to, row, part)
                at = end
        if self.time_dim:
            x, y, reset, mask = tree_map(
                lambda leaf: leaf if leaf is None else leaf.transpose(0, 1), (x, y, reset, mask)
            )
        return Chunk(x, y, reset, mask)

    def _drop(self, start: int) -> None:
        for edges, held in zip(self._edges, self._held, strict=True):
            for passed in [i for i in held if edges[i + 1] <= start]:
                del held[passed]
        self._drawn = [own for own in self._drawn if any(i in self._held[row] for row, i in own[1])]

    def _ask(self, start: int, stop: int) -> None:
        """Asks for the sequences that a window reaches and none before it has reached."""
        wanted = [
            (row, i)
            for row, (edges, held) in enumerate(zip(self._edges, self._held, strict=True))
            for i in range(bisect_right(edges, start) - 1, bisect_left(edges, stop))
            if i < len(edges) - 1 and i not in held
        ]
        if not wanted:
            return
        before = random_state()
        for row, i in wanted:
            self._held[row][i] = self._sequence(self._order[row][i])
        if not same_random_state(before, random_state()):
            self._drawn.append((before, wanted))

    def reading(self) -> dict[str, Any]:
        first = self._first_row
        return {"drawn": [[own, [[first + row, i] for row, i in asked]]
                          for own, asked in self._drawn]}  # fmt: skip

    def read_again(self, reading: dict[str, Any], epoch: int, start: int) -> None:
        """Sequences of random values are asked for again, in the same order."""
        self.begin(epoch)
        for state, asked in reading["drawn"]:
            mine = [(row - self._first_row, i) for row, i in asked]
            mine = [own for own in mine if 0 <= own[0] < self.rows]
            set_random_state(state)
            for row, i in mine:
                self._held[row][i] = self._sequence(self._order[row][i])
            self._drawn.append((state, mine))
        self._drop(start)

    def _like(self) -> Chunk:
        """A chunk of no steps of a sequence."""
        if self._none is None:  # no window of this reader has reached one yet
            before = random_state()
            self._sequence(0)
            set_random_state(before)
        assert self._none is not None
        return self._none

    def _sequence(self, index: int) -> Chunk:
        chunk, found = _sequence(self.sequences, index)
        if found != self._lengths[index]:
            raise ValueError(
                f"sequences[{index}]: has {found} steps, but lengths says {self._lengths[index]}."
            )
        chunk = as_tensors(chunk)
        none = tree_map(lambda leaf: None if leaf is None else leaf[:0], chunk)
        if self._none is None:
            self._none = tree_map(lambda leaf: None if leaf is None else leaf.clone(), none)
        elif _kinds(none) != _kinds(self._none):
            raise ValueError(
                f"sequences[{index}]: is not like one before it. All must have the same structure, "
                "dtypes and features; only their number of steps may differ."
            )
        return chunk

    def _zeros(self, tree: Tree, steps: int) -> Tree:
        if tree is None:
            return None
        return tree_map(lambda leaf: leaf.new_zeros((steps, self.rows, *leaf.shape[1:])), tree)

    def _fill(self, into: Tree, own: Tree, to: slice, row: int, part: slice) -> None:
        if own is None:
            return
        for target, leaf in zip(tree_leaves(into), tree_leaves(own), strict=True):
            target[to, row] = leaf[part]


def _kinds(tree: Tree) -> Any:
    return tree_map(lambda leaf: None if leaf is None else (leaf.dtype, leaf.shape), tree)


def _sequence(sequences: Any, index: int) -> tuple[Chunk, int]:
    """A sequence and how many steps it has."""
    item = sequences[index]
    with naming(f"sequences[{index}]"):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise TypeError(
                f"expected (x, y), found {type(item).__name__}. For sequences without a target: "
                "(x, None)."
            )
        chunk = checked(Chunk(*item))
        return chunk, TimeAxes().length(chunk)


def _deal(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """The sequences of each row: the longest first, to the row with the fewest steps."""
    loads = [(0, row) for row in range(rows)]
    dealt: list[list[int]] = [[] for _ in range(rows)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, row = heapq.heappop(loads)
        dealt[row].append(i)
        heapq.heappush(loads, (load + lengths[i], row))
    return dealt
