"""Where a run keeps its checkpoints: a file of one process, or a folder of many ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ...distributed.ranks import Ranks
from .file import has_checkpoint, load_checkpoint, save_checkpoint
from .shared import Parts, SharedCheckpoints

Content = dict[str, Any]

# Keys of a run's state: those that are the same on all ranks, and trees that are split by row.
# The rest is each rank's own.
_COMMON = (
    "format", "windows", "index", "seconds", "epochs_ended", "had_windows", "learner", "buffers",
    "stop", "stopped",
)  # fmt: skip
_BY_ROW = ("state", "state_after")


def has_content(folder: Path) -> bool:
    """Whether a folder holds anything."""
    return folder.is_dir() and any(folder.iterdir())


class Store(Protocol):
    """Where a run keeps its checkpoints. With many ranks each method is a collective.

    ``replaces``: there is a checkpoint of another run, which this run is to overwrite.
    """

    replaces: bool

    def begin(self) -> None:
        """Raises FileExistsError for a checkpoint that was written since the store was made."""

    def offer(self, index: int | None, content: Callable[[], Content], *, last: bool) -> bool:
        """Saves the run after ``index`` updates; returns whether it did.

        ``index`` is None if there is nothing worth saving. ``last``: the run ends or is left, so
        the call waits until the checkpoint is written.
        """

    def load(self) -> Content | None:
        """The last checkpoint; None if there is none."""


class FileStore:
    """A file, and beside it the checkpoint before."""

    def __init__(self, path: Path, replaces: bool) -> None:
        self.path, self.replaces = path, replaces
        self._existed = has_checkpoint(path)

    def begin(self) -> None:
        if not self._existed and has_checkpoint(self.path):
            raise FileExistsError(
                f"checkpoint: {self.path} was written by another run since train_stream was "
                "called. Give each run a file of its own."
            )

    def offer(self, index: int | None, content: Callable[[], Content], *, last: bool) -> bool:
        if index is not None:
            save_checkpoint(self.path, content())
        return index is not None

    def load(self) -> Content | None:
        return load_checkpoint(self.path) if has_checkpoint(self.path) else None


class SharedStore:
    """A folder to which each rank writes its part."""

    def __init__(
        self, folder: Path, ranks: Ranks, row_axis: Callable[[Tensor], int], replaces: bool
    ) -> None:
        self.ranks, self.replaces = ranks, replaces
        self.checkpoints = SharedCheckpoints(folder, ranks, row_axis)
        self._folder = folder
        self._existed = self._exists()

    def _exists(self) -> bool:
        return any(self.ranks.gather(has_content(self._folder)))

    def begin(self) -> None:
        if not self._existed and self._exists():
            raise FileExistsError(
                f"checkpoint: {self._folder} was written by another run since train_stream was "
                "called. Give each run a folder of its own."
            )

    def offer(self, index: int | None, content: Callable[[], Content], *, last: bool) -> bool:
        if not self.ranks.alive:
            return False
        # After an error, the ranks may have reached different updates.
        agreed = set(self.ranks.gather(index)) == {index}
        if index is not None and agreed:
            by_rank = self.ranks.all_do(content)
            # A rank whose rows ended early stays at its last place, while the others go on.
            furthest = max(self.ranks.gather(by_rank["place"]))
            common = {name: by_rank.pop(name) for name in _COMMON}
            common |= {"ranks": self.ranks.size, "furthest": furthest}
            rows = {name: by_rank.pop(name) for name in _BY_ROW}
            self.checkpoints.save(index, Parts(common, by_rank, rows))
        if last:
            self.ranks.all_do(self.checkpoints.wait)
        return agreed and index is not None

    def load(self) -> Content | None:
        parts = self.checkpoints.load()
        if parts is None:
            return None
        common, by_rank, rows = parts
        if common["ranks"] != self.ranks.size:  # the rows are shared out anew
            by_rank["place"] = common["furthest"]
        return {**common, **by_rank, **rows}
