"""A stream that comes in chunks of any lengths, cut into windows, and read again as it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from ..._compat.running import version_of, versions_of
from ..._compat.training import has_workers, with_workers
from ..._interrupt import uninterrupted
from ..._messages import first_line
from ..._random_state import random_state, set_random_state
from ..._trees import Tree, tree_leaves
from .chunk import Chunk, TimeAxes, as_chunk, as_tensors, error_prefix
from .randomness import DataRandomness
from .shuffling import warn_of_shuffling

# The keys of the random numbers before the epoch, and before its first chunk.
_EPOCH_START, _FIRST_CHUNK = -1, 0


class _HeldChunk(NamedTuple):
    """Steps ``[start, end)`` of the epoch."""

    start: int
    end: int
    chunk: Chunk


class ChunkStream:
    """A stream of chunks of any lengths, each of which continues the one before.

    Chunks are held while a window can still reach back to them. To be read again, the data is
    iterated over anew with the random numbers it drew the first time: those before the epoch, those
    before its first chunk, and from then on those of a state of its own, whose seed is drawn after
    that chunk (:class:`DataRandomness`). An iterator cannot be iterated over anew:
    :class:`_IteratorReplay`.
    """

    def __init__(
        self, chunks: Iterable[Any], axes_of: Callable[[Tree], TimeAxes], *, carries: bool = True
    ) -> None:
        self.chunks, self.axes_of = chunks, axes_of
        self._warns_of_shuffling = carries  # the state, from one chunk into the next
        self.axes = TimeAxes()  # known with the first chunk
        self.total: int | None = None
        # Whether a run may go back to a reading: what an iterator gave since the last is then kept.
        self.goes_back = True
        self.pulled = 0  # chunks taken from the iterator in this epoch
        self._iterator: Iterator[Any] | None = None
        self._taken: list[Any] = []  # the next item, until it is held as a chunk
        self._failure: str | None = None  # of the iterator: the name of its error
        self._epoch = 0
        self._held: deque[_HeldChunk] = deque()
        # The tensors of those held as the next item was taken, and how often each was written then.
        self._held_before: list[tuple[list[Tensor], list[int]]] = []
        self._end = 0  # the first step of the next chunk
        self.randomness = DataRandomness(chunks)
        # What there was before the epoch, as in a reading; the random numbers also before the first
        # chunk, once it is taken.
        self._start: dict[str, Any] = {"random": {}, "generators": [], "had_workers": False}
        self._replay = _IteratorReplay()

    def beginning(self) -> dict[str, Any]:
        """What the data is about to draw from, for :meth:`begin_as` on another rank."""
        return self.randomness.snapshot()

    def begin_as(self, other: dict[str, Any]) -> None:
        """Draws what the data of another rank draws, apart from what the process draws."""
        self.randomness.separate(other)

    def begin(self, epoch: int) -> None:
        self.randomness.rejoin()
        with self.randomness.drawing():
            if self._start["random"] and self._epoch == epoch and not self.pulled:
                self._return_to(self._start)  # it was interrupted while it began
            self._begin(epoch, {_EPOCH_START: random_state()})

    def _begin(self, epoch: int, random: dict[int, dict[str, Any]]) -> None:
        start = {
            "random": random,
            "generators": self.randomness.generator_states(),
            "had_workers": has_workers(self.chunks),
        }
        self._start, self._epoch = start, epoch
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
        self._held_before.clear()

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
            if self._failure is not None and not self._is_iterator:
                self._begin_again()
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
        recorded = self._replay.recorded.get(number)
        if recorded is None and not self._taken:
            if not self._take():
                return False
        elif not number:  # it was taken before, by a read that was interrupted or is repeated
            self.randomness.branch_again()
        if (chunk := recorded) is None:
            with error_prefix(f"data, chunk {number + 1}"):
                chunk = as_tensors(as_chunk(self._taken[0]))
                if not number:
                    self.axes = self.axes_of(chunk.x)
                self.axes.length(chunk)
                self._check_not_written_over(chunk)
        end = self._end + self.axes.steps(chunk)
        with uninterrupted():
            if self._replay.is_recording:
                self._replay.recorded[number] = chunk
            self._held.append(_HeldChunk(self._end, end, chunk))
            self._end = end
            self.pulled += 1
            if recorded is None:
                self._taken.clear()
                self._held_before.clear()
        if self._warns_of_shuffling and number and chunk.reset is None:
            self._warns_of_shuffling = False
            warn_of_shuffling(self.chunks)
        return True

    def _take(self) -> bool:
        """Takes the next item from the iterator; false if there is none."""
        if self._failure is not None:  # other data than an iterator was begun again
            raise RuntimeError(
                f"data: the iterator failed at chunk {self.pulled + 1} ({self._failure}), and may "
                "leave out steps if it is read on. Give an iterable that makes a new one each "
                "time: a list, a DataLoader, or a class with __iter__; or start again with a new "
                "iterator and resume=True."
            )
        assert self._iterator is not None
        if not self.pulled:
            random = self._start["random"]
            if _FIRST_CHUNK in random:  # it is read again, or failed
                set_random_state(random[_FIRST_CHUNK])
            else:
                random[_FIRST_CHUNK] = random_state()
        held = [_leaves(held.chunk) for held in self._held]
        self._held_before = [(leaves, versions_of(leaves)) for leaves in held]
        try:  # in one step: Ctrl-C does not come when the item is neither here nor there
            self._taken.extend(islice(self._iterator, 1))
        except BaseException as error:
            if not self._taken:
                self._failure = type(error).__name__
            raise
        finally:
            if self._taken and not self.pulled:
                with uninterrupted():
                    self.randomness.branch()
        return bool(self._taken)

    def _check_not_written_over(self, chunk: Chunk) -> None:
        """Raises ValueError if the chunk is in the memory of one that windows still read."""
        for held, versions in self._held_before:
            for leaf, version, new in zip(held, versions, _leaves(chunk), strict=False):
                if leaf.data_ptr() == new.data_ptr() and version_of(leaf) != version:
                    raise ValueError(
                        "is in the memory of a chunk before it, and was written over that, of "
                        "which steps are still to be read. Give new tensors each time, such as "
                        "buffer.clone()."
                    )

    def _begin_again(self) -> None:
        """Takes a new iterator: one that failed would leave out chunks, or be at its end."""
        reading, process_state = self.reading(), random_state()
        position = self.pulled, self._end, self._held.copy()
        try:
            self.read_again(reading, self._epoch, self._held[0].start if self._held else self._end)
        except BaseException as error:  # it fails once more: the next read begins again as this one
            self.pulled, self._end, self._held = position
            self._start["random"], self._failure = reading["random"], type(error).__name__
            raise
        finally:
            set_random_state(process_state)

    def _drop_before(self, start: int) -> None:
        """Drops the chunks that end before a step, which no window reads any more."""
        while self._held and self._held[0].end <= start:
            self._held.popleft()

    # -- reading again ----------------------------------------------------------------------------

    def reading(self) -> dict[str, Any]:
        if self._is_iterator and self.goes_back:
            self._replay.take_snapshot(_Snapshot(self.pulled, self._end, tuple(self._held)))
        return {"pulled": self.pulled, **self._start, "random": dict(self._start["random"])}

    def read_again(self, reading: dict[str, Any], epoch: int, start: int) -> None:
        if self._is_iterator and self._replay.is_recording:
            snapshot = self._replay.snapshot_after(reading["pulled"])
            self.pulled, self._end = snapshot.pulled, snapshot.end
            self._held = deque(snapshot.held)
            return
        if self._is_iterator:  # this was interrupted before: it goes on where that left it
            with self.randomness.drawing():
                self._pull_again(reading["pulled"], start)
            return
        self.randomness.rejoin()
        with self.randomness.drawing():
            self._return_to(reading)
            self._begin(epoch, dict(reading["random"]))
            self._pull_again(reading["pulled"], start)

    def _return_to(self, start: dict[str, Any]) -> None:
        """Returns to the random numbers before the epoch."""
        with_workers(self.chunks, start["had_workers"])
        set_random_state(start["random"][_EPOCH_START])
        self.randomness.set_generator_states(start["generators"])

    def _pull_again(self, count: int, start: int) -> None:
        while self.pulled < count:
            if not self._pull():
                raise ValueError(
                    f"data: the checkpoint was made after {count} chunks, but there are only "
                    f"{self.pulled}. Resume with the data that the run was started with."
                )
            self._drop_before(start)


def _leaves(chunk: Chunk) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tuple(chunk)) if leaf is not None]


class _Snapshot(NamedTuple):
    """The position of a reader after ``pulled`` chunks, the last of which ended at step ``end``."""

    pulled: int
    end: int
    held: tuple[_HeldChunk, ...]


class _IteratorReplay:
    """What an iterator yielded since a snapshot, so that a run can go back to that.

    A run goes back at most to the start of the update that it is working on. Only one more snapshot
    can have been taken since then: where windows are read ahead, for a GPU, that of the next
    update. So two are kept, and the chunks yielded since the older one.
    """

    def __init__(self) -> None:
        self.recorded: dict[int, Chunk] = {}  # by the chunk's number in the epoch
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
