"""Checkpoints that ranks write together, through ``torch.distributed.checkpoint``.

A folder for each: what is the same on all ranks is written by the first, what is a rank's own by
that rank, and the rows of the state by the rank that has them, under the numbers of those rows. So
any number of ranks can read it, each its own rows.
"""

from __future__ import annotations

import io
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .._compat import timeout_of
from .._trees import keystr, tree_flatten_with_path, tree_map
from ..distributed.ranks import Ranks
from ..distributed.shares import share_of
from .checkpoint import CheckpointError, as_bytes

_KEPT = 2  # whole ones; while a third is written there is always one to go back to
_NAME = "update-{:09d}"
_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


class Parts(NamedTuple):
    """What a checkpoint holds: trees of tensors, numbers, strings, dicts, lists and tuples.

    ``common`` is that of the first rank, ``own`` a rank's own; ``rows`` is a tree of tensors whose
    rows the ranks have shared out, in the order of the ranks.
    """

    common: Any
    own: Any
    rows: Any


class SharedCheckpoints:
    """The checkpoints of a run in ``folder``, which all ranks can read and write."""

    def __init__(self, folder: Path, ranks: Ranks, row_axis: Callable[[Tensor], int]) -> None:
        self.folder, self.ranks, self.row_axis = folder, ranks, row_axis
        self._writing: Future[Any] | None = None
        self._own: list[str] = []  # the names of those of this run

    def save(self, index: int, parts: Parts) -> None:
        """Begins to write a checkpoint; to be called by all ranks.

        The contents are copied first, so they may change then. Raises OSError and
        :class:`RankFailed` if the one before could not be written, and TypeError, on all ranks,
        for what one of them could not read again.
        """
        from torch.distributed.checkpoint import FileSystemWriter, async_save

        ranks = self.ranks
        ranks.all_do(self.wait)
        path = self.folder / ranks.gather(self._free_name(index) if ranks.rank == 0 else None)[0]
        numbers, leaves = self._numbered(parts.rows)
        content, unreadable = {}, None
        try:
            content = _taken_apart(f"rank{ranks.rank}of{ranks.size}", [parts.own, numbers])
            if ranks.rank == 0:
                content |= _taken_apart("run", parts.common)
        except TypeError as error:
            unreadable = str(error)
        told = ranks.gather((len(leaves[0]) if leaves else 0, self._make_room(path), unreadable))
        if (problem := told[0][1]) is not None:
            raise OSError(problem)
        if wrong := [said for *_, said in told if said is not None]:
            raise TypeError(wrong[0])
        first = sum(count for count, *_ in told[: ranks.rank])
        for i, leaf in enumerate(leaves):
            content[f"rows{first}-{first + len(leaf)}/{i}"] = leaf
        self._own.append(path.name)
        self._writing = async_save(
            content, storage_writer=FileSystemWriter(path), process_group=_group_beside(ranks)
        )  # type: ignore[assignment]

    def _free_name(self, index: int) -> str:
        """A name for update ``index``; a whole checkpoint is not written over."""
        name, again = _NAME.format(index), 0
        while (self.folder / name / ".metadata").exists():
            again += 1
            name = f"{_NAME.format(index)}.{again}"
        return name

    def _make_room(self, path: Path) -> str | None:
        """What the first rank does before anybody writes; what went wrong with it."""
        if self.ranks.rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(path, ignore_errors=True)
            except OSError as error:
                return f"checkpoint: {error}"
        return None

    def _numbered(self, tree: Any) -> tuple[Any, list[Tensor]]:
        """The tree with ``number@row axis`` for its tensors, and those, rows in front."""
        tensors: list[Tensor] = []

        def number(leaf: Any) -> str | None:
            if leaf is None:
                return None
            axis = self.row_axis(leaf)
            tensors.append(leaf.detach().movedim(axis, 0))
            return f"{len(tensors) - 1}@{axis}"

        return tree_map(number, tree), tensors

    def wait(self) -> None:
        """Until what is being written is whole. Then all but the last ones are deleted."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        except KeyboardInterrupt:  # it is still being written
            raise
        except RuntimeError as error:
            self._writing = None
            raise self.ranks.lost(error) from error
        except BaseException as error:  # which torch's CheckpointException is
            self._writing = None
            raise OSError(f"checkpoint: {self.folder}: {_reason(error)}") from error
        self._writing = None
        if self.ranks.rank == 0:
            for path in self.folder.glob("update-*"):
                if path.name not in self._own[-_KEPT:]:
                    shutil.rmtree(path, ignore_errors=True)

    def whole(self) -> list[str]:
        """The names of those that were written to their end, the last first."""
        marks = list(self.folder.glob("update-*/.metadata"))
        marks.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        return [path.parent.name for path in marks]

    def load(self) -> Parts | None:
        """The last one that all ranks can read, with this rank's rows; None if there is none.

        Raises :class:`CheckpointError` if there are some, but none of them whole.
        """
        reasons: list[str] = []
        for name in self.ranks.gather(self.whole())[0]:
            found, reason = None, None
            try:
                found = self._read(self.folder / name)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                reason = f"checkpoint {self.folder / name}: damaged ({_reason(error)})."
            wrong = [said for said in self.ranks.gather(reason) if said is not None]
            if not wrong:
                if reasons:
                    warnings.warn(f"{reasons[0]} Using {self.folder / name}.", stacklevel=2)
                self._own = [name]
                return found
            reasons.append(wrong[0])
        if reasons:
            raise CheckpointError(" ".join(reasons) + " To start anew, delete what is there.")
        return None

    def _read(self, path: Path) -> Parts:
        """This rank's part of a checkpoint, whatever the number of ranks that has written it."""
        from torch.distributed.checkpoint import FileSystemReader, load

        ranks, reader = self.ranks, FileSystemReader(path)
        there = reader.read_metadata().state_dict_metadata
        size = max(int(found[1]) for key in there if (found := re.match(r"rank\d+of(\d+)$", key)))
        own = f"rank{ranks.rank % size}of{size}"
        blocks = sorted(
            (int(found[3]), int(found[1]), int(found[2]), key)
            for key in there
            if (found := re.match(r"rows(\d+)-(\d+)/(\d+)$", key))
        )
        mine = range(0)
        if blocks:
            mine = share_of(max(stop for _, _, stop, _ in blocks), ranks.rank, ranks.size)
        blocks = [own for own in blocks if own[1] < mine.stop and own[2] > mine.start]
        wanted = [key for key in there if re.match(rf"(run|{own})(?!\d)", key)]
        content = {
            key: torch.empty(there[key].size, dtype=there[key].properties.dtype)  # type: ignore[union-attr]
            for key in [*wanted, *(key for *_, key in blocks)]
        }
        with warnings.catch_warnings():  # that it reads alone is what is wanted
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(content, storage_reader=reader, no_dist=True)
        leaves = []
        for _, group in groupby(blocks, lambda block: block[0]):
            leaf = torch.cat(
                [content[key][max(0, mine.start - start) : mine.stop - start]
                 for _, start, _, key in group]
            )  # fmt: skip
            leaves.append(leaf)

        def tensor(number: str | None) -> Tensor | None:
            if number is None:
                return None
            i, axis = map(int, number.split("@"))
            return leaves[i].movedim(0, axis).contiguous()

        contents, numbers = _put_together(own, content)
        rows = tree_map(tensor, numbers)
        return Parts(_put_together("run", content), contents, rows)


def _group_beside(ranks: Ranks) -> ProcessGroup:
    """A group of the same ranks that checkpoints are written by, while the run goes on.

    One for all runs, since a group has threads and sockets; made by all ranks at once.
    """
    if ranks.group not in _groups:
        _groups[ranks.group] = dist.new_group(
            dist.get_process_group_ranks(ranks.group), backend="gloo",
            timeout=timeout_of(ranks.group), use_local_synchronization=True,
        )  # fmt: skip
    return _groups[ranks.group]


def _taken_apart(name: str, tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by their paths, and the rest of it as bytes."""
    leaves = tree_flatten_with_path(tree)[0]
    tensors = {
        f"{name}{keystr(path)}": leaf.detach() for path, leaf in leaves if isinstance(leaf, Tensor)
    }
    numbers = iter(range(len(tensors)))
    rest = tree_map(
        lambda leaf: torch.tensor(next(numbers)) if isinstance(leaf, Tensor) else leaf, tree
    )
    data = torch.frombuffer(bytearray(as_bytes([list(tensors), rest])), dtype=torch.uint8)
    return {name: data, **tensors}


def _put_together(name: str, content: dict[str, Tensor]) -> Any:
    """What :func:`_taken_apart` was given."""
    data = io.BytesIO(content[name].numpy().tobytes())
    names, rest = torch.load(data, weights_only=True)
    return tree_map(
        lambda leaf: content[names[int(leaf)]] if isinstance(leaf, Tensor) else leaf, rest
    )


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__
