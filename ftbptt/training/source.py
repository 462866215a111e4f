"""Where windows of data come from: tensors, arrays on disk, or chunks of any length, cut anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .._compat.loading import has_workers, with_workers
from .._compat.trees import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from .checkpoint import random_state, set_random_state

Tree = Any
_AHEAD = 32  # windows that are cut at once, which takes a third of the time


class Chunk(NamedTuple):
    """Consecutive steps: the arguments of ``train_segment`` behind the state.

    ``x`` and ``y`` are trees of tensors or arrays, ``[K, ...]``; ``reset`` and ``mask`` are bool,
    ``[K]`` or ``[K, B]``.
    """

    x: Tree
    y: Tree = None
    reset: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class TimeAxes:
    """The axis of time in the leaves of ``x`` and of ``y``; ``reset`` and ``mask`` are as ``x``."""

    x: int = 0
    y: int = 0

    def cut(self, chunk: Chunk, start: int, stop: int) -> Chunk:
        """Steps ``[start, stop)`` of a chunk."""
        x, y, reset, mask = chunk
        x = _part(x, self.x, start, stop)
        if y is not None:
            y = _part(y, self.y, start, stop)
        if reset is not None:
            reset = _part(reset, self._of_flags(reset), start, stop)
        if mask is not None:
            mask = _part(mask, self._of_flags(mask), start, stop)
        return Chunk(x, y, reset, mask)

    def split(self, chunk: Chunk, size: int) -> list[Chunk]:
        """The chunk in pieces of ``size`` steps, the last one shorter."""
        count = -(-self.steps(chunk) // size)

        def pieces(tree: Tree, axis: int) -> Sequence[Tree]:
            if tree is None:
                return [None] * count
            if isinstance(tree, Tensor):
                return tree.split(size, axis)
            leaves, spec = tree_flatten(tree)
            split = zip(*(leaf.split(size, axis) for leaf in leaves), strict=True)
            return [tree_unflatten(own, spec) for own in split]

        x, y, *flags = chunk
        of_flags = [pieces(own, self._of_flags(own)) for own in flags]
        parts = zip(pieces(x, self.x), pieces(y, self.y), *of_flags, strict=True)
        return [Chunk(*own) for own in parts]

    def _of_flags(self, flags: Tensor | None) -> int:
        return self.x if flags is not None and flags.ndim > 1 else 0

    def steps(self, chunk: Chunk) -> int:
        """The steps of a chunk whose parts are known to have the same."""
        steps: int = tree_leaves(chunk.x)[0].shape[self.x]
        return steps

    def join(self, chunks: Sequence[Chunk]) -> Chunk:
        """Chunks one after the other; one without reset or mask restarts and leaves out nothing."""
        first = chunks[0]
        if any((chunk.y is None) != (first.y is None) for chunk in chunks):
            raise ValueError("some have y, others have none")

        def joined(trees: Sequence[Tree], axis: int) -> Tree:
            return tree_map(lambda *leaves: torch.cat(leaves, axis), *trees)

        def rows(name: str, default: bool) -> Tensor | None:
            given = [getattr(chunk, name) for chunk in chunks]
            like = next((flags for flags in given if flags is not None), None)
            if like is None:
                return None
            axis = self.x if like.dim() > 1 else 0
            for i, flags in enumerate(given):
                if flags is None:
                    shape = list(like.shape)
                    shape[axis] = self.length(chunks[i])
                    given[i] = like.new_full(shape, default)
            return torch.cat(given, axis)

        y = None if first.y is None else joined([c.y for c in chunks], self.y)
        x = joined([c.x for c in chunks], self.x)
        return Chunk(x, y, rows("reset", False), rows("mask", True))

    def length(self, chunk: Chunk) -> int:
        """The steps of a chunk, the same in every leaf.

        Raises ValueError where they differ.
        """
        steps: int | None = None
        first = "x"
        rows = [("reset", chunk.reset), ("mask", chunk.mask)]
        flags = [(n, f, self.x if f.ndim > 1 else 0) for n, f in rows if f is not None]
        for name, tree, axis in [("x", chunk.x, self.x), ("y", chunk.y, self.y), *flags]:
            for path, leaf in tree_flatten_with_path(tree)[0]:
                if leaf is None:  # no y
                    continue
                here = f"{name}{keystr(path)}"
                if not -len(leaf.shape) <= axis < len(leaf.shape):
                    found = list(leaf.shape)
                    raise ValueError(f"{here}: expected time on axis {axis}, found shape {found}.")
                if steps is None:
                    steps, first = leaf.shape[axis], here
                elif leaf.shape[axis] != steps:
                    raise ValueError(
                        f"{here}: has {leaf.shape[axis]} steps on axis {axis}, but {first} has "
                        f"{steps}. All parts of the data must have the same length; nothing is cut "
                        "silently."
                    )
        assert steps is not None
        return steps


def _part(tree: Tree, axis: int, start: int, stop: int) -> Tree:
    if axis == 0 and isinstance(tree, Tensor):  # the most frequent, and the slowest for pytree
        return tree[start:stop]
    place = (slice(None),) * axis + (slice(start, stop),)
    return tree_map(lambda leaf: leaf[place], tree)


@runtime_checkable
class Source(Protocol):
    """A stream that is read in windows. An epoch reads it from step 0 on."""

    total: int | None  # steps of an epoch, if known

    def begin(self, epoch: int) -> None:
        """An epoch starts; the next read is from step 0."""

    def read(self, start: int, stop: int) -> Chunk | None:
        """Steps ``[start, stop)``, fewer at the end of the stream, None after it.

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
            chunk = _as_chunk(data)
            return Arrays(chunk, axes_of(chunk.x))
    if isinstance(data, Iterable) and not isinstance(data, (Tensor, dict, str)):
        return Chunks(data, axes_of)
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
        self._of_tensors = _is_of_tensors(chunk)
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


class _Stand(NamedTuple):
    """Where a reader of chunks stood."""

    pulled: int
    end: int
    held: tuple[tuple[int, int, Chunk], ...]
    random: dict[int, dict[str, Any]]


class Chunks:
    """A stream that comes in chunks of any lengths, and goes on where the one before ended."""

    def __init__(self, chunks: Iterable[Any], axes_of: Callable[[Tree], TimeAxes]) -> None:
        self.chunks, self.axes_of = chunks, axes_of
        self.axes = TimeAxes()  # until there is a chunk
        self.total: int | None = None
        self.pulled = 0  # chunks taken in this epoch
        # The random numbers before the epoch (at -1), its first chunk, and each one held: the data
        # may draw its order and its values from them, and a resumed run must see the same.
        self._random: dict[int, dict[str, Any]] = {}
        self._left: Iterator[Any] | None = None
        self._generators: list[Tensor] = []  # their states before the epoch
        self._had_workers = False  # before the epoch
        self._held: deque[tuple[int, int, Chunk]] = deque()  # (first step, after the last, chunk)
        self._end = 0
        # Of an iterator, which gives nothing twice: where reading stood the last times that it was
        # asked, and what was taken since then, each with the random numbers before and after.
        self._stands: deque[_Stand] = deque(maxlen=2)
        self._taken: dict[int, tuple[dict[str, Any], Chunk, dict[str, Any]]] = {}

    def begin(self, epoch: int) -> None:
        self._random = {-1: random_state()}
        self._generators = [own.get_state() for own in self._own_generators()]
        for owner in self._owners():
            if hasattr(owner, "set_epoch"):  # such as DistributedSampler
                owner.set_epoch(epoch)
        self._had_workers = has_workers(self.chunks)
        left = iter(self.chunks)
        if left is self.chunks and self._left is not None:
            raise ValueError(
                "data: an iterator can be read once only, and another epoch was asked for. Give "
                "what makes it anew each time: a list, a DataLoader, or a class with __iter__."
            )
        self._left, self.pulled, self._end = left, 0, 0
        self._held.clear()

    def _owners(self) -> list[Any]:
        """What may have an order of its own: a ``DataLoader`` and its samplers."""
        batches = getattr(self.chunks, "batch_sampler", None)
        samplers = [
            getattr(self.chunks, "sampler", None),
            batches,
            getattr(batches, "sampler", None),
        ]
        return list({id(own): own for own in [self.chunks, *samplers]}.values())

    def _own_generators(self) -> list[torch.Generator]:
        found = [getattr(owner, "generator", None) for owner in self._owners()]
        return [own for own in found if isinstance(own, torch.Generator)]

    def reading(self) -> dict[str, Any]:
        if self._left is self.chunks:
            stand = _Stand(self.pulled, self._end, tuple(self._held), dict(self._random))
            self._stands.append(stand)
            for number in [i for i in self._taken if i < self._stands[0].pulled]:
                del self._taken[number]
        return {
            "pulled": self.pulled,
            "random": dict(self._random),
            "generators": self._generators,
            "had_workers": self._had_workers,
        }

    def read_again(self, reading: dict[str, Any], epoch: int, start: int) -> None:
        """Chunks are taken again, from where their random numbers were."""
        random, pulled = reading["random"], reading["pulled"]
        if self._left is self.chunks:
            self._go_back(pulled)
            return
        with_workers(self.chunks, reading.get("had_workers", False))
        set_random_state(random[-1])
        for own, value in zip(self._own_generators(), reading["generators"], strict=False):
            own.set_state(value)
        self.begin(epoch)
        while self.pulled < pulled:
            if self.pulled in random:
                set_random_state(random[self.pulled])
            if not self._pull():
                raise ValueError(
                    f"data: the checkpoint was made after {pulled} chunks, but there are only "
                    f"{self.pulled}. Resume with the data that the run was started with."
                )
            self._drop(start)

    def _go_back(self, pulled: int) -> None:
        stand = next(stand for stand in self._stands if stand.pulled == pulled)
        self.pulled, self._end = stand.pulled, stand.end
        self._held, self._random = deque(stand.held), dict(stand.random)

    def read(self, start: int, stop: int) -> Chunk | None:
        self._drop(start)
        assert not self._held or self._held[0][0] <= start, "a step that was given away"
        while self._end < stop and self._pull():
            self._drop(start)
        parts = [
            self.axes.cut(chunk, max(0, start - first), stop - first)
            if start > first or stop < end
            else chunk
            for first, end, chunk in self._held
            if first < stop
        ]
        if len(parts) < 2:
            return parts[0] if parts else None
        try:
            return self.axes.join(parts)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"data: chunks {self.pulled - len(self._held) + 1} to {self.pulled} do not fit "
                f"together ({_first_line(error)}). All must have the same structure, rows and "
                "features; only their number of steps may differ."
            ) from error

    def _pull(self) -> bool:
        assert self._left is not None
        if self.pulled in self._taken:
            random, chunk, after = self._taken[self.pulled]
            set_random_state(after)
        else:
            random = random_state()
            try:
                item = next(self._left)
            except StopIteration:
                return False
            with naming(f"data, chunk {self.pulled + 1}"):
                chunk = as_tensors(_as_chunk(item))
                if not self.pulled:
                    self.axes = self.axes_of(chunk.x)
                self.axes.length(chunk)
            if self._stands:
                self._taken[self.pulled] = random, chunk, random_state()
        steps = self.axes.steps(chunk)
        self._random[self.pulled] = random
        self._held.append((self._end, self._end + steps, chunk))
        self._end += steps
        self.pulled += 1
        return True

    def _drop(self, start: int) -> None:
        while self._held and self._held[0][1] <= start:
            number = self.pulled - len(self._held)
            self._held.popleft()
            if number:  # samplers draw the whole order with the first
                del self._random[number]


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Errors within it say what the data is that they are about."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error


def _as_chunk(item: Any) -> Chunk:
    if not isinstance(item, (tuple, list)) or not 2 <= len(item) <= 4:
        found = f"a {type(item).__name__}"
        if isinstance(item, (tuple, list)):
            found += f" of {len(item)}"
        raise TypeError(
            f"expected (x, y), (x, y, reset) or (x, y, reset, mask), found {found}. For data "
            "without a target: (x, None). What is not a tuple is read as chunks, each of them such "
            "a tuple."
        )
    return checked(Chunk(*item))


def checked(chunk: Chunk) -> Chunk:
    """The chunk. Raises TypeError for one of anything but tensors and arrays."""
    for name, tree in zip(chunk._fields, chunk, strict=True):
        if isinstance(tree, Tensor) or (tree is None and name != "x"):
            continue
        is_tree = name in ("x", "y")
        leaves = tree_flatten_with_path(tree)[0] if is_tree else [((), tree)]
        if not leaves:
            raise TypeError(f"{name}: expected at least one tensor or array, found none.")
        for path, leaf in leaves:
            if not hasattr(leaf, "shape"):
                kind = type(leaf).__name__
                here = f"{name}{keystr(path)}"
                raise TypeError(f"{here}: expected a tensor or an array, found {kind}.")
    return chunk


def _is_of_tensors(chunk: Chunk) -> bool:
    return all(leaf is None or isinstance(leaf, Tensor) for leaf in tree_leaves(tuple(chunk)))


def as_tensors(chunk: Chunk) -> Chunk:
    """A chunk with copies of its arrays as tensors: what lies on disk is not written."""
    if _is_of_tensors(chunk):
        return chunk
    import numpy

    def tensor(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, Tensor):
            return leaf
        return torch.from_numpy(numpy.array(leaf))

    return Chunk(*tree_map(tensor, tuple(chunk)))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
