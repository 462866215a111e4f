"""Where windows of data come from: tensors, arrays on disk, chunks, or a caller's source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..._compat.running import versions_of
from ..._trees import Tree, tree_leaves
from .chunk import Chunk, TimeAxes, as_chunk, as_tensors, error_prefix, has_only_tensors
from .chunk_stream import ChunkStream

_WINDOWS_PER_SPLIT = 32  # one split into many windows takes a third of the time of as many slices


@runtime_checkable
class Source(Protocol):
    """A stream that is read in windows. Each epoch reads it from step 0.

    Any object with these members can be the ``data`` of :func:`train_stream` and
    :func:`evaluate_stream`.

    >>> import torch
    >>> class Noise:
    ...     total = 1000
    ...     def begin(self, epoch):
    ...         self.epoch = epoch
    ...     def read(self, start, stop):
    ...         steps = range(start, min(stop, self.total))
    ...         return Chunk(torch.stack([self.step(t) for t in steps])) if steps else None
    ...     def step(self, t):
    ...         generator = torch.Generator().manual_seed(self.total * self.epoch + t)
    ...         return torch.randn(2, 3, generator=generator)
    >>> isinstance(Noise(), Source)
    True
    """

    total: int | None  # steps per epoch, if known

    def begin(self, epoch: int) -> None:
        """Starts an epoch.

        What is read depends on the epoch and the steps alone: a resumed run goes on reading from
        the step where it stopped.
        """

    def read(self, start: int, stop: int) -> Chunk | None:
        """Steps ``[start, stop)`` of the epoch, fewer at the end of the stream, None after it.

        Neither ``start`` nor ``stop`` decreases within an epoch.
        """


@runtime_checkable
class Rereadable(Protocol):
    """A source that must do more than ``begin`` to be read again as it was read the first time."""

    def reading(self) -> dict[str, Any]:
        """The position of the reader, for a checkpoint: tensors, numbers, lists and dicts."""

    def read_again(self, reading: dict[str, Any], epoch: int, start: int) -> None:
        """Returns to a position in ``epoch``, from which step ``start`` is the next to be read."""


@runtime_checkable
class Shareable(Protocol):
    """A source whose rows can be divided among ranks."""

    def share(self, rank: int, size: int) -> Source:
        """The part of one of ``size`` ranks, which reads independently of this source."""


def check_axes(source: Source, axes: TimeAxes) -> None:
    """Raises ValueError if the source's time axis is not the segment's."""
    time_dim = getattr(source, "time_dim", axes.x)
    if time_dim != axes.x:
        raise ValueError(
            f"data: {type(source).__name__} has time on axis {time_dim}, but train_segment on axis "
            f"{axes.x}. Give both the same time_dim."
        )


def as_source(data: Any, axes_of: Callable[[Tree], TimeAxes], *, carries: bool = True) -> Source:
    """as_source : data, function x -> TimeAxes, whether the state is carried -> Source

    - A ``Source``, such as ``ContiguousStreams`` or ``PackedSequences``, is used as it is.
    - A tuple ``(x, y)`` or a ``Chunk`` of tensors or arrays is the full stream.
    - An iterable of those, such as a list or a ``DataLoader``, gives chunks of any lengths, one
      after the other.

    Raises TypeError for anything else, ValueError for x and y of different lengths.
    """
    if isinstance(data, Shareable):  # a separate reader: other runs may read the same object
        return data.share(0, 1)
    if isinstance(data, Source):
        return data
    if isinstance(data, tuple):
        with error_prefix("data"):
            chunk = as_chunk(data)
            return Arrays(chunk, axes_of(chunk.x))
    if isinstance(data, Iterable) and not isinstance(data, (Tensor, dict, str)):
        return ChunkStream(data, axes_of, carries=carries)
    raise TypeError(
        "data: expected a tuple (x, y), an iterable of such tuples, or a source, found "
        f"{type(data).__name__}. For data without a target: (x, None)."
    )


class Arrays:
    """A stream with random access: tensors, or arrays whose slices can be made tensors.

    An array is any object with ``shape`` that can be sliced, such as ``numpy.memmap``: only the
    steps of a window are read from disk.
    """

    def __init__(self, chunk: Chunk, axes: TimeAxes) -> None:
        self.chunk, self.axes = chunk, axes
        self.total: int | None = axes.length(chunk)
        self.has_only_tensors = has_only_tensors(chunk)
        self._next_windows: list[Chunk] = []  # split in advance, in reverse order
        self._last_size = self._last_stop = 0  # of the window that was read last

    def begin(self, epoch: int) -> None:
        pass

    def read(self, start: int, stop: int) -> Chunk | None:
        assert self.total is not None
        if start >= self.total:
            return None
        size = stop - start
        is_regular = start == self._last_stop and size == self._last_size
        self._last_size, self._last_stop = size, stop
        if not self.has_only_tensors:
            return as_tensors(self.axes.cut(self.chunk, start, stop))
        if not is_regular:
            self._next_windows.clear()
            return self.axes.cut(self.chunk, start, stop)
        if not self._next_windows:
            part = self.axes.cut(self.chunk, start, start + _WINDOWS_PER_SPLIT * size)
            self._next_windows = self.axes.split(part, size)[::-1]
        return self._next_windows.pop()


def leaving_data(
    prepare: Callable[[Tree, Tree], tuple[Tree, Tree]], source: Source
) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
    """``prepare``, which raises ValueError if it writes to the caller's own tensors.

    Those are what windows of whole tensors are views of; other sources give windows new ones.
    """
    if not isinstance(source, Arrays) or not source.has_only_tensors:
        return prepare

    def checked(x: Tree, y: Tree) -> tuple[Tree, Tree]:
        given = [leaf for leaf in tree_leaves((x, y)) if leaf is not None]
        before = versions_of(given)
        result = prepare(x, y)
        if versions_of(given) != before:
            raise ValueError(
                "prepare: it wrote to your own data, of which it is given a view, so that the next "
                "epoch, or a window that overlaps, would find it changed. Return new tensors: "
                "x / 255, not x.div_(255)."
            )
        return result

    return checked
