"""What it takes to make the next update of a run, or to make it once more."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._trees import Tree
from .checkpoints.file import as_plain, from_plain
from .data.cursor import Cursor, Place
from .segments import Segments


class ResumePoint(NamedTuple):
    """Where a run stands between two updates.

    ``place``
        the next window, and the carried state at its first step
    ``state_after``
        the state after the last step of the window before. It differs from the carried one if
        windows overlap.
    ``had_windows``
        whether the epoch has had a window, on any rank
    ``reading``
        the state of the :class:`Cursor`
    ``generator``
        the state of the segment's generator, if it has one
    """

    place: Place
    state_after: Tree
    had_windows: bool
    reading: dict[str, Any]
    generator: torch.Tensor | None

    @classmethod
    def of(
        cls, place: Place, state_after: Tree, had_windows: bool, cursor: Cursor, segments: Segments
    ) -> ResumePoint:
        generator = segments.generator
        drawn = None if generator is None else generator.get_state()
        return cls(place, state_after, had_windows, cursor.state_dict(), drawn)

    def restore(self, cursor: Cursor, segments: Segments) -> None:
        """Rewinds the data and the random numbers to this point."""
        cursor.load_state_dict(self.reading, self.place)
        if segments.generator is not None and self.generator is not None:
            segments.generator.set_state(self.generator)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, lists and dicts."""
        place = self.place
        return {
            "place": [place.epoch, place.index, place.position, place.end],
            "state": as_plain(place.state),
            "state_after": as_plain(self.state_after),
            "had_windows": self.had_windows,
            "cursor": self.reading,
            "generator": self.generator,
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Any], like: Tree, start: Tree, device: torch.device
    ) -> ResumePoint:
        """The inverse of :meth:`state_dict`; ``like`` and ``start`` as for :func:`from_plain`."""
        carried = from_plain(state["state"], like, device, start)
        state_after = from_plain(state["state_after"], like, device, start)
        epoch, index, position, end = state["place"]
        place = Place(epoch, index, position, carried, end)
        return cls(place, state_after, state["had_windows"], state["cursor"], state["generator"])
