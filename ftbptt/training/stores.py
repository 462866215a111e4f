"""Where a run keeps its checkpoints: a file of one process, or a folder of many ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..distributed.ranks import Ranks
from .checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from .shared_checkpoint import Parts, SharedCheckpoints

Content = dict[str, Any]
_OF_ALL = (
    "format", "windows", "index", "seconds", "told_epochs", "had_windows", "learner", "stop",
    "stopped",
)  # fmt: skip
_BY_ROW = ("state", "behind")


class Store(Protocol):
    """Where a run is kept. With many ranks each call is to be made by all of them.

    ``replaces``: another run is kept there, which this one takes the place of.
    """

    replaces: bool

    def offer(self, index: int | None, content: Callable[[], Content], *, last: bool) -> bool:
        """Keeps the run as it is after ``index`` updates; whether it was kept.

        None: it is not worth keeping. ``last``: nothing comes after it, so it is waited for.
        """

    def load(self) -> Content | None:
        """What was kept last; None if there is nothing."""


class FileStore:
    """A file, and the one before it."""

    def __init__(self, path: Path, replaces: bool) -> None:
        self.path, self.replaces = path, replaces

    def offer(self, index: int | None, content: Callable[[], Content], *, last: bool) -> bool:
        if index is not None:
            save_checkpoint(self.path, content())
        return index is not None

    def load(self) -> Content | None:
        return load_checkpoint(self.path) if has_checkpoint(self.path) else None


class SharedStore:
    """A folder to which all ranks write what is theirs."""

    def __init__(
        self, folder: Path, ranks: Ranks, row_axis: Callable[[Tensor], int], replaces: bool
    ) -> None:
        self.ranks, self.replaces = ranks, replaces
        self.checkpoints = SharedCheckpoints(folder, ranks, row_axis)

    def offer(self, index: int | None, content: Callable[[], Content], *, last: bool) -> bool:
        if not self.ranks.alive:
            return False
        # After an error, not all may have come to the same update.
        same = set(self.ranks.gather(index)) == {index}
        if index is not None and same:
            own = self.ranks.all_do(content)
            # A rank whose rows end first stays where it was, while the others go on.
            furthest = max(self.ranks.gather(own["place"]))
            common = {name: own.pop(name) for name in _OF_ALL}
            common |= {"ranks": self.ranks.size, "furthest": furthest}
            rows = {name: own.pop(name) for name in _BY_ROW}
            self.checkpoints.save(index, Parts(common, own, rows))
        if last:
            self.ranks.all_do(self.checkpoints.wait)
        return same and index is not None

    def load(self) -> Content | None:
        parts = self.checkpoints.load()
        if parts is None:
            return None
        common, own, rows = parts
        if common.get("ranks", self.ranks.size) != self.ranks.size:  # the rows are shared out anew
            own["place"] = common["furthest"]
        return {**common, **own, **rows}
