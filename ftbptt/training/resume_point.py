"""Where a run stands between two updates: what it takes to make the next one, also once more."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .checkpoint import as_plain, from_plain
from .cursor import Cursor, Place
from .segments import Segments

Tree = Any


class ResumePoint(NamedTuple):
    """``place`` in the data with its state, and the state ``behind`` the last window's last step.

    ``had_windows``: the epoch had some, on any rank. ``reading`` is what the :class:`Cursor` knows,
    ``generator`` the state of the segment's own.
    """

    place: Place
    behind: Tree
    had_windows: bool
    reading: dict[str, Any]
    generator: torch.Tensor | None

    @classmethod
    def of(
        cls, place: Place, behind: Tree, had_windows: bool, cursor: Cursor, segments: Segments
    ) -> ResumePoint:
        own = segments.generator
        drawn = None if own is None else own.get_state()
        return cls(place, behind, had_windows, cursor.state_dict(), drawn)

    def go_back(self, cursor: Cursor, segments: Segments) -> None:
        """Reads and draws from here on what comes next."""
        cursor.load_state_dict(self.reading, self.place)
        if segments.generator is not None and self.generator is not None:
            segments.generator.set_state(self.generator)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, lists and dicts."""
        place = self.place
        return {
            "place": [place.epoch, place.index, place.position, place.end],
            "state": as_plain(place.state),
            "behind": as_plain(self.behind),
            "had_windows": self.had_windows,
            "cursor": self.reading,
            "generator": self.generator,
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Any], like: Tree, start: Tree, device: torch.device
    ) -> ResumePoint:
        """What :meth:`state_dict` gave; ``like`` and ``start`` are as for :func:`from_plain`."""
        carried, behind = (
            from_plain(state[name], like, device, start) for name in ("state", "behind")
        )
        epoch, index, position, end = state["place"]
        place = Place(epoch, index, position, carried, end)
        had_windows = state.get("had_windows", index > 0)
        return cls(place, behind, had_windows, state["cursor"], state.get("generator"))
