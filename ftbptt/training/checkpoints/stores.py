"""Where a run keeps its checkpoints: a file of one process, or a folder of many ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ...distributed.ranks import Ranks
from .file import (
    check_writable,
    followed,
    has_checkpoint,
    is_special,
    load_checkpoint,
    previous,
    save_checkpoint,
)
from .shared import Parts, SharedCheckpoints

Content = dict[str, Any]

# Keys of a run's state: those that are the same on all ranks, and trees that are split by row.
# The rest is each rank's own.
_COMMON = (
    "format", "windows", "index", "seconds", "epochs_ended", "had_windows", "learner", "buffers",
    "stop", "stopped",
)  # fmt: skip
_BY_ROW = ("state", "state_after")


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


def store_at(
    path: Path, ranks: Ranks | None, row_axis: Callable[[Tensor], int], resume: bool | None
) -> Store:
    """The store of a run: a file, or with ranks a folder.

    Raises ValueError if ``path`` is the other one, or not the same on all ranks, FileExistsError if
    there are checkpoints and ``resume`` is None, and OSError if nothing can be written there.
    """
    path = path.absolute()  # the caller may change the folder
    if is_special(path):
        raise ValueError(f"checkpoint: {path} is no regular file. Give the name of a file.")
    if ranks is None:
        if path.is_dir():
            raise ValueError(
                f"checkpoint: {path} is a folder. Give the name of a file; a folder that a run "
                "with a mesh has written is read with a mesh, which may be of one process."
            )
        exists = has_checkpoint(path)
    else:
        ranks.all_do(partial(_check_no_file, path))
        exists = _has_content_on_any(ranks, path)
    if exists and resume is None:
        raise FileExistsError(
            f"checkpoint: {path if path.exists() else previous(path)} already exists. Pass "
            "resume=True to continue from it, or resume=False to overwrite it."
        )
    replaces = exists and not resume
    if ranks is None:
        check_writable(followed(path).parent)
        return FileStore(path, exists, replaces)
    ranks.all_do(partial(check_writable, path))
    _check_shared(ranks, path)
    return SharedStore(path, ranks, row_axis, exists, replaces)


class FileStore:
    """A file, and beside it the checkpoint before."""

    def __init__(self, path: Path, existed: bool, replaces: bool) -> None:
        self.path, self.replaces = path, replaces
        self._existed = existed

    def begin(self) -> None:
        if not self._existed and has_checkpoint(self.path):
            raise FileExistsError(
                f"checkpoint: {self.path} was written by another run since train_stream was "
                "called. Give each run a file of its own."
            )

    def offer(self, index: int | None, content: Callable[[], Content], *, last: bool) -> bool:
        if index is not None:
            save_checkpoint(self.path, content())
            self._existed = True  # a run that is restored may be saved before it begins
        return index is not None

    def load(self) -> Content | None:
        return load_checkpoint(self.path) if has_checkpoint(self.path) else None


class SharedStore:
    """A folder to which each rank writes its part."""

    def __init__(
        self, folder: Path, ranks: Ranks, row_axis: Callable[[Tensor], int], existed: bool,
        replaces: bool,
    ) -> None:  # fmt: skip
        self.ranks, self.replaces = ranks, replaces
        self.checkpoints = SharedCheckpoints(folder, ranks, row_axis)
        self._folder, self._existed = folder, existed

    def begin(self) -> None:
        if not self._existed and _has_content_on_any(self.ranks, self._folder):
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
            self._existed = True
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


def _check_no_file(path: Path) -> None:
    if path.is_file():
        raise ValueError(f"checkpoint: {path} is a file. With a mesh, give the name of a folder.")


def _has_content_on_any(ranks: Ranks, folder: Path) -> bool:
    """Whether any rank sees anything in the folder. A collective."""
    return any(ranks.gather(ranks.all_do(lambda: folder.is_dir() and any(folder.iterdir()))))


def _check_shared(ranks: Ranks, folder: Path) -> None:
    """Raises ValueError, on all ranks, if one does not see what the first writes. A collective.

    Each would keep its part for itself, and none could go on from it.
    """
    with ExitStack() as stack:

        def write() -> str | None:
            if ranks.rank:
                return None
            return Path(stack.enter_context(tempfile.NamedTemporaryFile(dir=folder)).name).name

        name = ranks.gather(ranks.all_do(write))[0]
        seen = ranks.gather((str(folder), (folder / name).exists()))
    for rank, (found, sees) in enumerate(seen):
        if not sees:
            raise ValueError(
                f"checkpoint: rank {rank} does not see in {found} what rank 0 writes in "
                f"{seen[0][0]}. Give all ranks the same folder, on a disk that they share. (A name "
                "that is made of the time, as it is on each rank, differs.)"
            )
