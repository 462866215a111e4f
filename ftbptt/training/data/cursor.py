"""The way through a stream, window by window: what to read next, and where the state belongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._random_state import random_state, set_random_state
from ..._trees import Tree
from .chunk import Chunk, TimeAxes
from .chunk_stream import ChunkStream
from .prefetch import Mover
from .source import Rereadable, Source, check_axes
from .windows import Truncation, Window


@dataclass(slots=True)
class Place:
    """Where a run is: before window ``index`` of an epoch, with the state before step ``position``.

    ``end`` is the number of steps of the epoch that earlier windows have reached.
    """

    epoch: int
    index: int
    position: int
    state: Tree
    end: int = 0


class Span(NamedTuple):
    """A window and its data, from step ``first`` on, before which the carried state belongs.

    ``moved`` is what :meth:`Mover.wait` needs.
    """

    window: Window
    first: int
    chunk: Chunk
    moved: Any = None


class Cursor:
    """Reads the windows of an epoch, each from the step that the carried state belongs to.

    For a GPU, the next window is read, prepared and sent while the device works on the current one.
    """

    def __init__(
        self,
        source: Source,
        truncation: Truncation,
        axes_of: Callable[[Tree], TimeAxes],
        transforms: Sequence[Callable[[Chunk], Chunk]],
        mover: Mover,
    ) -> None:
        self.source, self.truncation, self.axes_of = source, truncation, axes_of
        self.axes: TimeAxes | None = None  # known with the first data
        self.transforms, self.mover = transforms, mover
        # The window that was read ahead, or the error of that, raised when the window is taken.
        self._ahead: Span | Exception | None = None
        self._is_at_end = False  # of the epoch: what the last windows would read may be dropped
        # The reader's position before that, if it is the first window of an update: a run that is
        # saved after the current update reads the window again from there.
        self._reading_before_ahead: dict[str, Any] | None = None

    def begin(self, epoch: int) -> None:
        self.source.begin(epoch)
        self._ahead = self._reading_before_ahead = None
        self._is_at_end = False

    def goes_back(self, wanted: bool) -> None:
        """Says whether :meth:`load_state_dict` may be given a state of this same reader."""
        if isinstance(self.source, ChunkStream):
            self.source.goes_back = wanted

    def close(self) -> None:
        """Ends the reading, so that the workers of a ``DataLoader`` stop."""
        if isinstance(self.source, ChunkStream):
            self.source.close()

    def take(self, place: Place) -> Span | None:
        """The next window that has a loss; None at the end of the epoch."""
        span, self._ahead, self._reading_before_ahead = self._ahead, None, None
        if isinstance(span, Exception):
            raise span
        if span is None and not self._is_at_end:
            span = self._read(place)
            self._is_at_end = span is None
        if span is not None:
            self.mover.wait(span.chunk, span.moved)
        return span

    def prefetch(self, place: Place, of_next_update: bool) -> None:
        """Reads the window after the current one, if windows are sent to a GPU."""
        if self.mover.aside:
            self._reading_before_ahead = self._reading() if of_next_update else None
            self._read_ahead(place)

    def _read_ahead(self, place: Place) -> None:
        try:
            self._ahead = self._read(place)
            self._is_at_end = self._ahead is None
        except Exception as error:  # kept: the current window still has to run
            self._ahead = error

    def _read(self, place: Place) -> Span | None:
        index, total = place.index, self.source.total
        while True:
            window = self.truncation.window(index)
            first = self._first_step(window, place)
            chunk = self.source.read(first, window.end)
            if chunk is None:
                return None
            if self.axes is None:
                self.axes = self.axes_of(chunk.x)
                check_axes(self.source, self.axes)
            steps = self.axes.steps(chunk)
            if steps < window.end - first:
                if total is not None and first + steps < total:
                    raise ValueError(
                        f"data: read({first}, {window.end}) returned {steps} steps, but total says "
                        f"that there are {total}. Return all of them; fewer are the end."
                    )
                shortened = self.truncation.cut(window, first + steps)
                if shortened is None:
                    return None
                window = shortened
            if self.truncation.learns(window):
                break
            index += 1
        for transform in self.transforms:
            chunk = transform(chunk)
        return Span(window, first, *self.mover.start(chunk))

    def _first_step(self, window: Window, place: Place) -> int:
        """The first step to read for a window."""
        return window.warm if self.truncation.fresh else place.position

    # -- stopping and resuming --------------------------------------------------------------------

    def _reading(self) -> dict[str, Any]:
        source = self.source.reading() if isinstance(self.source, Rereadable) else None
        return {"random": random_state(), "source": source}

    def state_dict(self) -> dict[str, Any]:
        """The reader's position and the random numbers; a window read ahead is to be read again."""
        is_ahead = self._reading_before_ahead is not None
        return {
            "reading": self._reading_before_ahead if is_ahead else self._reading(),
            "random": random_state(),
            "ahead": is_ahead,
        }

    def load_state_dict(self, state: dict[str, Any], place: Place) -> None:
        reading, total = state["reading"], self.source.total
        # What was read ahead since is read again, in its turn.
        self._ahead = self._reading_before_ahead = None
        self._is_at_end = False
        if total is not None and place.end > total:
            raise ValueError(
                f"data: the checkpoint was made after {place.end} steps of an epoch, but there are "
                f"only {total}. Resume with the data that the run was started with."
            )
        if isinstance(self.source, Rereadable) and reading["source"] is not None:
            first = self._first_step(self.truncation.window(place.index), place)
            self.source.read_again(reading["source"], place.epoch, first)
        else:
            self.source.begin(place.epoch)
        if state["ahead"]:
            set_random_state(reading["random"])
            self._reading_before_ahead = reading
            self._read_ahead(place)
        set_random_state(state["random"])
