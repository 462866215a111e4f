"""Checkpoints that ranks write together, through ``torch.distributed.checkpoint``.

Each checkpoint is a folder. The first rank writes what all ranks have in common, each rank writes
its own part, and the rows of the state that it has, keyed by their numbers. So any number of ranks
can read the checkpoint, each its rows. The keys::

    run                        common part: bytes, with the tensors in run<path>
    rank<r>of<size>            a rank's own part, likewise
    rows<start>-<stop>/<i>     rows [start, stop) of the i-th leaf of the state, rows on axis 0
"""

from __future__ import annotations

import io
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..._compat.running import timeout_of
from ..._trees import keystr, tree_flatten_with_path, tree_map
from ..._warnings import warn
from ...distributed.ranks import Ranks
from ...distributed.shares import share_of
from .file import CheckpointError, as_bytes

_KEPT = 2  # complete checkpoints; so there is one to fall back to while the next is written
# update-<index>, or update-<index>.<n> in the n-th pass: one more where an index comes again.
_NAME = re.compile(r"update-(\d{9,})(?:\.(\d+))?")
_writing_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


class Parts(NamedTuple):
    """The content of a checkpoint: trees of tensors, numbers, strings, dicts, lists and tuples.

    ``common`` is the same on all ranks, ``by_rank`` is this rank's, and ``rows`` are tensors whose
    rows are shared out over the ranks, in their order.
    """

    common: Any
    by_rank: Any
    rows: Any


class _Ready(NamedTuple):
    """What each rank tells the others before they write: its rows, and what went wrong."""

    rows: int
    disk_error: str | None
    unloadable: str | None


class SharedCheckpoints:
    """The checkpoints of a run in ``folder``, which all ranks can read and write."""

    def __init__(self, folder: Path, ranks: Ranks, row_axis: Callable[[Tensor], int]) -> None:
        self.folder, self.ranks, self.row_axis = folder, ranks, row_axis
        self._writing: tuple[str, Future[Any]] | None = None  # the checkpoint's name
        self._names: list[str] = []  # of complete checkpoints, as far as is known, the oldest first

    def save(self, index: int, parts: Parts) -> None:
        """Starts to write a checkpoint. A collective.

        The content is copied first, so it may change once this returns. Raises OSError or
        :class:`RankFailed` if the previous checkpoint could not be written, and TypeError, on all
        ranks, for content of any rank that ``weights_only=True`` could not load.
        """
        from torch.distributed.checkpoint import FileSystemWriter, async_save

        ranks = self.ranks
        ranks.all_do(self.wait)
        path = self.folder / ranks.gather(self._next_name(index) if ranks.rank == 0 else None)[0]
        references, leaves = self._take_out(parts.rows)
        content, unloadable = {}, None
        try:
            content = _flatten(_rank_key(ranks.rank, ranks.size), [parts.by_rank, references])
            if ranks.rank == 0:
                content |= _flatten("run", parts.common)
        except TypeError as error:
            unloadable = str(error)
        rows = len(leaves[0]) if leaves else 0
        ready: list[_Ready] = ranks.gather(_Ready(rows, self._make_room(path), unloadable))
        if (disk_error := ready[0].disk_error) is not None:
            raise OSError(disk_error)
        if problems := [rank.unloadable for rank in ready if rank.unloadable is not None]:
            raise TypeError(problems[0])
        first = sum(rank.rows for rank in ready[: ranks.rank])
        for i, leaf in enumerate(leaves):
            content[f"rows{first}-{first + len(leaf)}/{i}"] = leaf
        future: Any = async_save(
            content, storage_writer=FileSystemWriter(path), process_group=_writing_group(ranks)
        )
        self._writing = path.name, future

    def _next_name(self, index: int) -> str:
        """A name for update ``index`` that comes after those of all complete checkpoints."""
        n, last = max((_order(name) for name in self.complete()), default=(0, -1))
        n += index <= last
        return f"update-{index:09d}.{n}" if n else f"update-{index:09d}"

    def _make_room(self, path: Path) -> str | None:
        """Makes the folder, on the first rank, before any rank writes; returns an error message."""
        if self.ranks.rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._names = self._names or self.complete()[::-1]
                self._delete_old()  # now: a run that is killed early gets no further
                shutil.rmtree(path, ignore_errors=True)
            except OSError as error:
                return f"checkpoint: {error}"
        return None

    def _take_out(self, tree: Any) -> tuple[Any, list[Tensor]]:
        """Takes the tensors out of a tree, and moves their rows to axis 0.

        In the tree there is ``index@axis`` instead: which of the tensors, and where its rows were.
        """
        tensors: list[Tensor] = []

        def take(leaf: Any) -> str | None:
            if leaf is None:
                return None
            axis = self.row_axis(leaf)
            tensors.append(leaf.detach().movedim(axis, 0))
            return f"{len(tensors) - 1}@{axis}"

        return tree_map(take, tree), tensors

    def wait(self) -> None:
        """Waits until the checkpoint is written, then deletes all but the last ones."""
        if self._writing is None:
            return
        name, future = self._writing
        try:
            future.result()
        except KeyboardInterrupt:  # the write goes on
            raise
        except RuntimeError as error:
            self._writing = None
            raise self.ranks.lost(error) from error
        except BaseException as error:  # torch's CheckpointException is no Exception
            self._writing = None
            raise OSError(f"checkpoint: {self.folder}: {_reason(error)}") from error
        self._writing = None
        self._names.append(name)
        if self.ranks.rank == 0:
            self._delete_old()

    def _delete_old(self) -> None:
        """Deletes all but the last complete checkpoints."""
        for path in self._folders():
            if path.name not in self._names[-_KEPT:]:
                shutil.rmtree(path, ignore_errors=True)

    def complete(self) -> list[str]:
        """The names of the checkpoints that were written to the end, the newest first.

        By their names: a folder that was copied has other times.
        """
        names = [path.name for path in self._folders() if (path / ".metadata").exists()]
        return sorted(names, key=_order, reverse=True)

    def _folders(self) -> list[Path]:
        """Those of checkpoints, complete or not; others belong to the caller."""
        return [path for path in self.folder.glob("update-*") if _NAME.fullmatch(path.name)]

    def load(self) -> Parts | None:
        """The newest checkpoint that all ranks can read, with this rank's rows. A collective.

        None if there is none. Raises :class:`CheckpointError` if there are some, all damaged.
        """
        problems: list[str] = []
        names = self.ranks.gather(self.complete())[0]
        for i, name in enumerate(names):
            parts, problem = None, None
            try:
                parts = self._read(self.folder / name)
            except BaseException as error:  # torch's CheckpointException is no Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                problem = f"checkpoint {self.folder / name}: damaged ({_reason(error)})."
            rank_problems = [text for text in self.ranks.gather(problem) if text is not None]
            if not rank_problems:
                if problems:
                    warn(f"{problems[0]} Using {self.folder / name}.", UserWarning)
                self._names = names[i:][::-1]
                return parts
            problems.append(rank_problems[0])
        if problems:
            raise CheckpointError(" ".join(problems) + " To start over, delete the folder.")
        return None

    def _read(self, path: Path) -> Parts:
        """This rank's part of a checkpoint that any number of ranks wrote."""
        from torch.distributed.checkpoint import FileSystemReader, load

        ranks, reader = self.ranks, FileSystemReader(path)
        metadata = reader.read_metadata().state_dict_metadata
        # If fewer ranks wrote it, some of them read the same rank's part.
        size = max(int(key[2]) for key in _matches(r"rank(\d+)of(\d+)$", metadata))
        rank_key = _rank_key(ranks.rank % size, size)
        all_blocks = sorted(
            _Block(int(key[3]), int(key[1]), int(key[2]), key.string)
            for key in _matches(r"rows(\d+)-(\d+)/(\d+)$", metadata)
        )
        rows = range(0)
        if all_blocks:
            rows = share_of(max(block.stop for block in all_blocks), ranks.rank, ranks.size)
        blocks = [
            block for block in all_blocks if block.start < rows.stop and block.stop > rows.start
        ]
        keys = [key.string for key in _matches(rf"(run|{rank_key})(?!\d)", metadata)]
        content = {}
        for key in [*keys, *(block.key for block in blocks)]:
            saved: Any = metadata[key]
            content[key] = torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
        with warnings.catch_warnings():  # each rank reads by itself, on purpose
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(content, storage_reader=reader, no_dist=True)
        leaves = [
            torch.cat(
                [
                    content[block.key][max(0, rows.start - block.start) : rows.stop - block.start]
                    for block in leaf_blocks
                ]
            )
            for _, leaf_blocks in groupby(blocks, lambda block: block.leaf)
        ]

        def put_back(reference: str | None) -> Tensor | None:
            if reference is None:
                return None
            i, axis = map(int, reference.split("@"))
            return leaves[i].movedim(0, axis).contiguous()

        by_rank, references = _unflatten(rank_key, content)
        return Parts(_unflatten("run", content), by_rank, tree_map(put_back, references))


def _order(name: str) -> tuple[int, int]:
    """Sorts the names of checkpoints in the order in which they were written."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[2] or 0), int(match[1])


class _Block(NamedTuple):
    """Rows ``[start, stop)`` of a leaf, as one rank wrote them under ``key``."""

    leaf: int
    start: int
    stop: int
    key: str


def _rank_key(rank: int, size: int) -> str:
    return f"rank{rank}of{size}"


def _matches(pattern: str, keys: Iterable[str]) -> list[re.Match[str]]:
    return [match for key in keys if (match := re.match(pattern, key))]


def _writing_group(ranks: Ranks) -> ProcessGroup:
    """A second group of the same ranks, to write checkpoints in while the run goes on.

    It is shared by all runs, since a group holds threads and sockets. The first call for a group
    is a collective.
    """
    if ranks.group not in _writing_groups:
        _writing_groups[ranks.group] = dist.new_group(
            dist.get_process_group_ranks(ranks.group), backend="gloo",
            timeout=timeout_of(ranks.group), use_local_synchronization=True,
        )  # fmt: skip
    return _writing_groups[ranks.group]


def _flatten(name: str, tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by their paths, and the tree without them as bytes."""
    leaves = tree_flatten_with_path(tree)[0]
    tensors = {
        f"{name}{keystr(path)}": leaf.detach() for path, leaf in leaves if isinstance(leaf, Tensor)
    }
    numbers = iter(range(len(tensors)))

    def numbered(leaf: Any) -> Any:
        """The number of a tensor in its place."""
        return torch.tensor(next(numbers), device="cpu") if isinstance(leaf, Tensor) else leaf

    skeleton = tree_map(numbered, tree)
    data = torch.frombuffer(bytearray(as_bytes([list(tensors), skeleton])), dtype=torch.uint8)
    return {name: data, **tensors}


def _unflatten(name: str, content: dict[str, Tensor]) -> Any:
    """The inverse of :func:`_flatten`."""
    data = io.BytesIO(content[name].numpy().tobytes())
    paths, skeleton = torch.load(data, weights_only=True, map_location="cpu")
    return tree_map(
        lambda leaf: content[paths[int(leaf)]] if isinstance(leaf, Tensor) else leaf, skeleton
    )


def _reason(error: BaseException) -> str:
    """The class of an error, and the last line of its message, which has the cause."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__
