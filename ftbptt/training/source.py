"""Where windows of data come from: tensors, arrays on disk, chunks, or a source of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from .chunk import Chunk, TimeAxes, as_chunk, as_tensors, is_of_tensors, naming
from .chunk_stream import ChunkStream

Tree = Any
_AHEAD = 32  # windows that are cut at once, which takes a third of the time


@runtime_checkable
class Source(Protocol):
    """A stream that is read in windows. An epoch reads it from step 0 on."""

    total: int | None  # steps of an epoch, if known

    def begin(self, epoch: int) -> None:
        """An epoch starts. A run that is resumed within it reads on from where it stood."""

    def read(self, start: int, stop: int) -> Chunk | None:
        """Steps ``[start, stop)`` of the epoch, fewer at the end of the stream, None after it.

        Neither ``start`` nor ``stop`` ever goes back within an epoch.
        """


@runtime_checkable
class Rereadable(Protocol):
    """A source that knows more than its epoch: what it holds, and how that was drawn."""

    def reading(self) -> dict[str, Any]:
        """Where reading stands: tensors, numbers, lists and dicts."""

    def read_again(self, reading: dict[str, Any], epoch: int, start: int) -> None:
        """Goes to where reading stood in an epoch, of which step ``start`` is to be read next."""


@runtime_checkable
class Shareable(Protocol):
    """A source whose rows can be shared out."""

    def share(self, rank: int, size: int) -> Source:
        """The part of one of ``size`` ranks; it is read by itself, whatever others read."""


def check_axes(source: Source, axes: TimeAxes) -> None:
    """Raises ValueError for a source that has time elsewhere than the segment."""
    own = getattr(source, "time_dim", axes.x)
    if own != axes.x:
        raise ValueError(
            f"data: {type(source).__name__} has time on axis {own}, but train_segment on axis "
            f"{axes.x}. Give both the same time_dim."
        )


def as_source(data: Any, axes_of: Callable[[Tree], TimeAxes]) -> Source:
    """as_source : what the caller has, where time is in such an x -> Source

    - a ``Source``, such as ``ContiguousStreams`` or ``PackedSequences``, as it is;
    - a tuple ``(x, y)`` or a ``Chunk`` of tensors or arrays: the whole stream;
    - an iterable of those, such as a list or a ``DataLoader``: chunks of any lengths, one after
      the other.

    Raises TypeError for what is none of these, ValueError for x and y of different lengths.
    """
    if isinstance(data, Shareable):  # a reader of its own, so that others do not disturb it
        return data.share(0, 1)
    if isinstance(data, Source):
        return data
    if isinstance(data, tuple):
        with naming("data"):
            chunk = as_chunk(data)
            return Arrays(chunk, axes_of(chunk.x))
    if isinstance(data, Iterable) and not isinstance(data, (Tensor, dict, str)):
        return ChunkStream(data, axes_of)
    raise TypeError(
        "data: expected a tuple (x, y), an iterable of such tuples, or a source, found "
        f"{type(data).__name__}. For data without a target: (x, None)."
    )


class Arrays:
    """A stream that can be read anywhere: tensors, or arrays that give tensors when sliced.

    Arrays are whatever has ``shape`` and slices, such as ``numpy.memmap``: only the steps of a
    window are read from disk.
    """

    def __init__(self, chunk: Chunk, axes: TimeAxes) -> None:
        self.chunk, self.axes = chunk, axes
        self.total: int | None = axes.length(chunk)
        self._of_tensors = is_of_tensors(chunk)
        self._ahead: list[Chunk] = []  # cut already, the next one last
        self._size = self._end = 0  # of the window before

    def begin(self, epoch: int) -> None:
        pass

    def read(self, start: int, stop: int) -> Chunk | None:
        assert self.total is not None
        if start >= self.total:
            return None
        follows = start == self._end and stop - start == self._size
        self._size, self._end = stop - start, stop
        if not self._of_tensors:
            return as_tensors(self.axes.cut(self.chunk, start, stop))
        if not follows:
            self._ahead.clear()
            return self.axes.cut(self.chunk, start, stop)
        if not self._ahead:
            part = self.axes.cut(self.chunk, start, start + _AHEAD * self._size)
            self._ahead = self.axes.split(part, self._size)[::-1]
        return self._ahead.pop()
