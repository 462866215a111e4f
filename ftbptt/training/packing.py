"""Sequences of different lengths on B running rows, a row restarting where a sequence ends."""

from __future__ import annotations

import copy
import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from .._compat.trees import tree_leaves, tree_map
from ..distributed.shares import share_of
from .contiguous import checked_layout
from .source import Chunk, TimeAxes, as_tensors, checked, naming

Tree = Any
_ROWS_AT_MOST = 1 << 20  # tells the seeds of epochs apart


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
        self.total: int | None = None
        self._like: Tree = None  # a step of a sequence, which all have to be like
        self._count()

    def _count(self) -> None:
        loads = [sum(self._lengths[i] for i in own) for own in self._dealt]
        self.rows, self.total = len(loads), max(loads)
        self.utilisation = sum(loads) / max(self.rows * max(loads), 1)
        self.begin(0)

    def share(self, rank: int, size: int) -> PackedSequences:
        """The part of ``rank`` out of ``size``: every sequence is in one of the parts.

        Rows have about as many steps each, so ranks have.
        """
        own = copy.copy(self)
        rows = share_of(self.rows, rank, size)
        own._dealt, own._first_row = [self._dealt[i] for i in rows], self._first_row + rows[0]
        own._count()
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
                # Of a row alone, so that it is the same on any number of ranks.
                generator = torch.Generator().manual_seed((self.seed + epoch) * _ROWS_AT_MOST + row)
                order = torch.randperm(len(own), generator=generator).tolist()
                own[:] = [own[i] for i in order]
        # By place in its row: those that a window has reached and none has passed.
        self._held: list[dict[int, Chunk]] = [{} for _ in range(self.rows)]
        # The first step of each sequence of a row, and after the last one.
        self._edges = [[0, *accumulate(self._lengths[i] for i in own)] for own in self._order]

    def read(self, start: int, stop: int) -> Chunk | None:
        assert self.total is not None
        stop = min(stop, self.total)
        if start >= stop:
            return None
        reset = torch.zeros(stop - start, self.rows, dtype=torch.bool)
        mask = torch.zeros(stop - start, self.rows, dtype=torch.bool)
        x: Tree = None
        y: Tree = None
        for row in range(self.rows):
            edges, held = self._edges[row], self._held[row]
            for passed in [i for i in held if edges[i + 1] <= start]:
                del held[passed]
            at = start
            while at < min(stop, edges[-1]):
                i = bisect_right(edges, at) - 1
                end = min(stop, edges[i + 1])
                reset[at - start, row] |= at == edges[i]
                mask[at - start : end - start, row] = True
                if i not in held:
                    held[i] = self._sequence(self._order[row][i])
                own = held[i]
                part = slice(at - edges[i], end - edges[i])
                to = slice(at - start, end - start)
                if x is None:
                    x, y = (self._zeros(tree, stop - start) for tree in (own.x, own.y))
                self._fill(x, own.x, to, row, part)
                self._fill(y, own.y, to, row, part)
                at = end
        if self.time_dim:
            x, y, reset, mask = tree_map(
                lambda leaf: leaf if leaf is None else leaf.transpose(0, 1), (x, y, reset, mask)
            )
        return Chunk(x, y, reset, mask)

    def _sequence(self, index: int) -> Chunk:
        chunk, found = _sequence(self.sequences, index)
        if found != self._lengths[index]:
            raise ValueError(
                f"sequences[{index}]: has {found} steps, but lengths says {self._lengths[index]}."
            )
        chunk = as_tensors(chunk)
        like = tree_map(lambda leaf: None if leaf is None else (leaf.dtype, leaf.shape[1:]), chunk)
        if self._like is None:
            self._like = like
        elif like != self._like:
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


def _sequence(sequences: Any, index: int) -> tuple[Chunk, int]:
    """A sequence and how many steps it has."""
    item = sequences[index]
    with naming(f"sequences[{index}]"):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise TypeError(f"expected (x, y), found {type(item).__name__}.")
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
