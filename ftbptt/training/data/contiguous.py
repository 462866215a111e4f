"""One long token stream, cut into B rows that are trained on in parallel."""

from __future__ import annotations

import copy
from mmap import mmap
from typing import Any

import torch

from ..._checks import check_int
from ...distributed.shares import share_of
from .chunk import Chunk, as_array, as_tensor


class ContiguousStreams:
    """ContiguousStreams : tokens[N, ...], rows -> Source of x[T, rows, ...], y[T, rows, ...]

    Cuts ``tokens`` into ``rows`` contiguous parts of ``T = (N - 1) // rows`` steps; ``y`` is one
    token ahead of ``x``. ``tokens`` is a tensor, ``bytes``, or an array such as ``numpy.memmap``,
    of which only the current window is read. With ``time_dim=1`` data is ``[rows, T, ...]``.

    ``left_out`` is the number of tokens at the end that are not used, at most ``rows - 1``.

    Raises TypeError if ``tokens`` is not one tensor or array, ValueError if there are fewer than
    ``rows + 1`` tokens, or masked ones.

    >>> streams = ContiguousStreams(torch.arange(10), rows=2)
    >>> x, y, *_ = streams.read(0, 3)
    >>> x.tolist(), y.tolist(), streams.left_out
    ([[0, 4], [1, 5], [2, 6]], [[1, 5], [2, 6], [3, 7]], 1)
    """

    def __init__(self, tokens: Any, rows: int, *, time_dim: int = 0) -> None:
        rows, time_dim = checked_layout(rows, time_dim)
        _check_tokens(tokens)
        if isinstance(tokens, (bytes, bytearray, mmap)):  # of which NumPy makes a string
            tokens = memoryview(tokens)
        tokens = as_array("tokens", tokens)
        count = len(tokens)
        if count <= rows:
            raise ValueError(
                f"tokens: {count} are too few for {rows} rows, each of which needs a step and its "
                "target. Give more tokens or fewer rows."
            )
        self.tokens, self.rows, self.time_dim = tokens, rows, time_dim
        steps = (count - 1) // rows
        self.total: int | None = steps
        self.left_out = count - 1 - rows * steps
        self._row_starts = [row * steps for row in range(rows)]

    def share(self, rank: int, size: int) -> ContiguousStreams:
        """The rows of ``rank`` out of ``size``. Each row belongs to one rank."""
        part = copy.copy(self)
        part._row_starts = [self._row_starts[row] for row in share_of(self.rows, rank, size)]
        part.rows = len(part._row_starts)
        return part

    def begin(self, epoch: int) -> None:
        """See :class:`Source`. Every epoch reads the same."""

    def read(self, start: int, stop: int) -> Chunk | None:
        """See :class:`Source`."""
        assert self.total is not None
        stop = min(stop, self.total)
        if start >= stop:
            return None
        # One more token than steps: x is all but the last, y all but the first.
        rows = [
            as_tensor(self.tokens[first + start : first + stop + 1]) for first in self._row_starts
        ]
        tokens = torch.stack(rows, 1 - self.time_dim)
        steps = stop - start
        return Chunk(tokens.narrow(self.time_dim, 0, steps), tokens.narrow(self.time_dim, 1, steps))


def _check_tokens(tokens: Any) -> None:
    """Raises TypeError for anything but one sequence of tokens, such as a pair ``(x, y)``."""
    description = type(tokens).__name__
    if isinstance(tokens, (tuple, list)) and any(getattr(item, "ndim", 0) for item in tokens[:1]):
        description = f"a {description} of {type(tokens[0]).__name__}"
    elif getattr(tokens, "shape", None) == ():
        description += " of shape []"
    elif isinstance(tokens, str):
        description += ". Give a text as bytes, tokens.encode(), or the numbers of its tokens"
    elif isinstance(tokens, list):
        description += ". Convert it: torch.tensor(tokens)"
    elif hasattr(tokens, "__len__") and not isinstance(tokens, dict):
        return
    raise TypeError(
        f"tokens: expected one tensor or array [N, ...], found {description}. Targets are the "
        "tokens themselves, one step ahead. Pass data that has targets, (x, y), to train_stream or "
        "evaluate_stream as it is."
    )


def checked_layout(rows: int, time_dim: int) -> tuple[int, int]:
    """Both as integers. Raises TypeError and ValueError for invalid ones."""
    time_dim = check_int("time_dim", time_dim, 0)
    if time_dim > 1:
        raise ValueError(f"time_dim: expected 0 or 1, found {time_dim}.")
    return check_int("rows", rows, 1), time_dim
