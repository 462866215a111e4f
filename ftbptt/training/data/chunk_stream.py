"""A stream that comes in chunks of any lengths, cut into windows, and read again as it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from ..._compat.training import has_workers, with_workers
from ..._interrupt import uninterrupted
from ..._messages import first_line
from ..._random_state import random_state, set_random_state
from .chunk import Chunk, TimeAxes, as_chunk, as_tensors, error_prefix
from .randomness import DataRandomness

Tree = Any
_EPOCH_START = -1  # the key of the random numbers before the epoch, among those before chunk i


class _HeldChunk(NamedTuple):
    """Steps ``[start, end)`` of the epoch; ``random`` is the state before the chunk was drawn."""

    start: int
    end: int
    chunk: Chunk
    random: dict[str, Any]


class ChunkStream:
    """A stream of chunks of any lengths, each of which continues the one before.

    Chunks are held while a window can still reach back to them. To be read again, the data is
    iterated over anew with the random numbers it drew the first time: those before the epoch,
    before its first chunk (from which samplers draw the order of all), and before each chunk that
    is held. An iterator cannot be iterated over anew: :class:`_IteratorReplay`.
    """

    def __init__(self, chunks: Iterable[Any], axes_of: Callable[[Tree], TimeAxes]) -> None:
        self.chunks, self.axes_of = chunks, axes_of
        self.axes = TimeAxes()  # known with the first chunk
        self.total: int | None = None
        self.pulled = 0  # chunks taken from the iterator in this epoch
        self._iterator: Iterator[Any] | None = None
        self._taken: list[Any] = []  # the next item, until it is held as a chunk
        self._random_before: dict[str, Any] = {}  # before that was taken
        self._random_after: dict[str, Any] = {}
        self._failure: str | None = None  # of the iterator: the name of its error
        self._epoch = 0
        self._held: deque[_HeldChunk] = deque()
        self._end = 0  # the first step of the next chunk
        self.randomness = DataRandomness(chunks)
        self._random_at_start: dict[int, dict[str, Any]] = {}  # _EPOCH_START, and 0: first chunk
        self._generator_states: list[Tensor] = []  # before the epoch
        self._had_workers = False  # before the epoch
        self._replay = _IteratorReplay()

    def beginning(self) -> dict[str, Any]:
        """What the data is about to draw from, for :meth:`begin_as` on another rank."""
        return self.randomness.snapshot()

    def begin_as(self, other: dict[str, Any]) -> None:
        """Draws what the data of another rank draws, apart from what the process draws."""
        self.randomness.separate(other)

    def begin(self, epoch: int) -> None:
        with self.randomness.drawing():
            if self._random_at_start and self._epoch == epoch and not self.pulled:
                self._return_to_start(  # it was interrupted while it began
                    self._random_at_start, self._generator_states, self._had_workers
                )
            self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self._generator_states = self.randomness.generator_states()
        self._had_workers = has_workers(self.chunks)
        self._random_at_start, self._epoch = {_EPOCH_START: random_state()}, epoch
        self.randomness.set_epoch(epoch)
        iterator = iter(self.chunks)
        if iterator is self.chunks and self.pulled:
            raise ValueError(
                "data: an iterator can be read only once, but another epoch was asked for. Give an "
                "iterable that makes a new one each time: a list, a DataLoader, or a class with "
                "__iter__."
            )
        self._iterator, self.pulled, self._end, self._failure = iterator, 0, 0, None
        self._held.clear()
        self._taken.clear()

    def close(self) -> None:
        """Drops the epoch's iterator, and with it the workers of a ``DataLoader``."""
        if not self._is_iterator:
            self._iterator = None

    @property
    def _is_iterator(self) -> bool:
        """Whether the data is an iterator that was begun, and so cannot begin again."""
        return self._iterator is self.chunks

    # -- reading ----------------------------------------------------------------------------------

    def read(self, start: int, stop: int) -> Chunk | None:
        self._drop_before(start)
        assert not self._held or self._held[0].start <= start, "this step was dropped"
        if self._end < stop:
            with self.randomness.drawing():
                while self._end < stop and self._pull():
                    self._drop_before(start)
        parts = [
            self.axes.cut(held.chunk, max(0, start - held.start), stop - held.start)
            if start > held.start or stop < held.end
            else held.chunk
            for held in self._held
            if held.start < stop
        ]
        if len(parts) < 2:
            return parts[0] if parts else None
        try:
            return self.axes.join(parts)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"data: chunks {self.pulled - len(self._held) + 1} to {self.pulled} do not fit "
                f"together ({first_line(error)}). All must have the same structure, rows and "
                "features; only their number of steps may differ."
            ) from error

    def _pull(self) -> bool:
        """Takes the next chunk; false if there is none."""
        number = self.pulled
        if (recorded := self._replay.recorded.get(number)) is not None:
            random, chunk = recorded.random_before, recorded.chunk
            set_random_state(recorded.random_after)
        else:
            if self._taken:  # by a read that was interrupted
                if self._replay.is_recording:
                    set_random_state(self._random_after)
            elif not self._take():
                return False
            random = self._random_before
            with error_prefix(f"data, chunk {number + 1}"):
                chunk = as_tensors(as_chunk(self._taken[0]))
                if not number:
                    self.axes = self.axes_of(chunk.x)
                self.axes.length(chunk)
        end = self._end + self.axes.steps(chunk)
        with uninterrupted():
            if recorded is None and self._replay.is_recording:
                self._replay.recorded[number] = _Recorded(random, chunk, self._random_after)
            if not number:
                self._random_at_start[0] = random
            self._held.append(_HeldChunk(self._end, end, chunk, random))
            self._end = end
            self.pulled += 1
            if recorded is None:
                self._taken.clear()
        return True

    def _take(self) -> bool:
        """Takes the next item from the iterator; false if there is none."""
        if self._failure is not None:
            self._begin_again(self._failure)
        assert self._iterator is not None
        self._random_before = self._random_after = random_state()
        try:  # in one step: Ctrl-C does not come when the item is neither here nor there
            self._taken.extend(islice(self._iterator, 1))
        except BaseException as error:
            if not self._taken:
                self._failure = type(error).__name__
            raise
        if self._replay.is_recording:
            self._random_after = random_state()
        return bool(self._taken)

    def _begin_again(self, failure: str) -> None:
        """Takes a new iterator: one that failed would leave out chunks, or be at its end."""
        if self._is_iterator:
            raise RuntimeError(
                f"data: the iterator failed at chunk {self.pulled + 1} ({failure}), and may leave "
                "out steps if it is read on. Give an iterable that makes a new one each time: a "
                "list, a DataLoader, or a class with __iter__; or start again with a new iterator "
                "and resume=True."
            )
        random, start = self._random_before, self._held[0].start if self._held else self._end
        self._read_again(self.reading(), self._epoch, start)
        set_random_state(random)

    def _drop_before(self, start: int) -> None:
        """Drops the chunks that end before a step, which no window reads any more."""
        while self._held and self._held[0].end <= start:
            self._held.popleft()

    # -- reading again ----------------------------------------------------------------------------

    def reading(self) -> dict[str, Any]:
        if self._is_iterator:
            self._replay.take_snapshot(_Snapshot(self.pulled, self._end, tuple(self._held)))
        first_held = self.pulled - len(self._held)
        random_of_held = {i: held.random for i, held in enumerate(self._held, first_held)}
        return {
            "pulled": self.pulled,
            "random": self._random_at_start | random_of_held,
            "generators": self._generator_states,
            "had_workers": self._had_workers,
        }

    def read_again(self, reading: dict[str, Any], epoch: int, start: int) -> None:
        if self._is_iterator:
            snapshot = self._replay.snapshot_after(reading["pulled"])
            self.pulled, self._end = snapshot.pulled, snapshot.end
            self._held = deque(snapshot.held)
            return
        with self.randomness.drawing():
            self._read_again(reading, epoch, start)

    def _read_again(self, reading: dict[str, Any], epoch: int, start: int) -> None:
        self._return_to_start(reading["random"], reading["generators"], reading["had_workers"])
        self._begin(epoch)
        self._pull_again(reading["pulled"], reading["random"], start)

    def _return_to_start(
        self, random: dict[int, dict[str, Any]], generators: list[Tensor], had_workers: bool
    ) -> None:
        """Returns to the random numbers before the epoch."""
        with_workers(self.chunks, had_workers)
        set_random_state(random[_EPOCH_START])
        self.randomness.set_generator_states(generators)

    def _pull_again(self, count: int, random: dict[int, dict[str, Any]], start: int) -> None:
        """Takes ``count`` chunks, each with the random numbers from before it, where known."""
        while self.pulled < count:
            if self.pulled in random:
                set_random_state(random[self.pulled])
            if not self._pull():
                raise ValueError(
                    f"data: the checkpoint was made after {count} chunks, but there are only "
                    f"{self.pulled}. Resume with the data that the run was started with."
                )
            self._drop_before(start)


class _Snapshot(NamedTuple):
    """The position of a reader after ``pulled`` chunks, the last of which ended at step ``end``."""

    pulled: int
    end: int
    held: tuple[_HeldChunk, ...]


class _Recorded(NamedTuple):
    """A chunk that an iterator yielded, and the random numbers before and after that."""

    random_before: dict[str, Any]
    chunk: Chunk
    random_after: dict[str, Any]


class _IteratorReplay:
    """What an iterator yielded since a snapshot, so that a run can go back to that.

    A run goes back at most to the start of the update that it is working on. Only one more snapshot
    can have been taken since then: where windows are read ahead, for a GPU, that of the next
    update. So two are kept, and the chunks yielded since the older one.
    """

    def __init__(self) -> None:
        self.recorded: dict[int, _Recorded] = {}  # by the chunk's number in the epoch
        self._snapshots: deque[_Snapshot] = deque(maxlen=2)

    @property
    def is_recording(self) -> bool:
        return bool(self._snapshots)

    def take_snapshot(self, snapshot: _Snapshot) -> None:
        self._snapshots.append(snapshot)
        for number in [i for i in self.recorded if i < self._snapshots[0].pulled]:
            del self.recorded[number]

    def snapshot_after(self, pulled: int) -> _Snapshot:
        """The snapshot that was taken after so many chunks."""
        return next(snapshot for snapshot in self._snapshots if snapshot.pulled == pulled)
