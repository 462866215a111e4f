"""A stream that comes in chunks of any lengths, cut anew, and read again as it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import has_workers, with_workers
from .._messages import first_line
from .checkpoint import random_state, set_random_state
from .chunk import Chunk, TimeAxes, as_chunk, as_tensors, naming

Tree = Any


class _Stand(NamedTuple):
    """Where a reader of chunks stood."""

    pulled: int
    end: int
    held: tuple[tuple[int, int, Chunk], ...]
    random: dict[int, dict[str, Any]]


class ChunkStream:
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
        self._apart: dict[str, Any] | None = None  # random numbers of the data's own, if it has any
        self._held: deque[tuple[int, int, Chunk]] = deque()  # (first step, after the last, chunk)
        self._end = 0
        # Of an iterator, which gives nothing twice: where reading stood the last times that it was
        # asked, and what was taken since then, each with the random numbers before and after.
        self._stands: deque[_Stand] = deque(maxlen=2)
        self._taken: dict[int, tuple[dict[str, Any], Chunk, dict[str, Any]]] = {}

    def beginning(self) -> dict[str, Any]:
        """What the data draws from."""
        return {
            "random": {name: own for name, own in random_state().items() if name != "cuda"},
            "generators": [own.get_state() for own in self._own_generators()],
        }

    def begin_as(self, other: dict[str, Any]) -> None:
        """Draws what the data of another rank draws, apart from what the process draws.

        For ranks that take their rows of the same chunks: those must come in one order.
        """
        self._apart = other["random"]
        for own, value in zip(self._own_generators(), other["generators"], strict=False):
            own.set_state(value)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Within it, what is drawn is the data's."""
        if self._apart is None:
            yield
            return
        outside = random_state()
        set_random_state(self._apart)
        try:
            yield
        finally:
            self._apart = random_state()
            set_random_state(outside)

    def begin(self, epoch: int) -> None:
        with self._drawing():
            self._begin(epoch)

    def _begin(self, epoch: int) -> None:
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

    def close(self) -> None:
        """Lets go of the epoch's reader."""
        if self._left is not self.chunks:
            self._left = None

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
        with self._drawing():
            with_workers(self.chunks, reading.get("had_workers", False))
            set_random_state(random[-1])
            for own, value in zip(self._own_generators(), reading["generators"], strict=False):
                own.set_state(value)
            self._begin(epoch)
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
        if self._end < stop:
            with self._drawing():
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
                f"together ({first_line(error)}). All must have the same structure, rows and "
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
                chunk = as_tensors(as_chunk(item))
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
