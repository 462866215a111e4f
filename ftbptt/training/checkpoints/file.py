"""Checkpoint files, written atomically."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..._trees import (
    Tree,
    in_order_of,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from ..._warnings import warn

_MARK = b"ftbptt-sha256:"  # follows torch's own file, and is followed by that file's hash


class CheckpointError(ValueError):
    """A file is damaged, or is not a checkpoint.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "run.pt").write_text("something else")
    ...     load_checkpoint(f"{folder}/run.pt")
    Traceback (most recent call last):
    ftbptt.training.checkpoints.file.CheckpointError: checkpoint ...run.pt: cut off, or not ...
    """


def followed(path: str | Path) -> Path:
    """Where the file is: a link stays one, and the other files are where it leads."""
    path = Path(path)
    return path.resolve() if path.is_symlink() else path


def previous(path: str | Path) -> Path:
    """Where :func:`save_checkpoint` moves the checkpoint that was at ``path``."""
    path = followed(path)
    return path.with_name(f"{path.name}.previous")


def _unfinished(path: Path) -> Path:
    """The temporary file. It has one fixed name, so killed runs leave at most one behind."""
    return path.with_name(f"{path.name}.tmp")


def save_checkpoint(path: str | Path, content: Any) -> None:
    """save_checkpoint : path, tree of tensors, numbers, strings, dicts, lists and tuples -> None

    Writes a temporary file beside ``path`` and renames it. The checkpoint that was there is kept
    beside it, under its name with ``.previous`` added. So there is a complete checkpoint at any
    moment, even if the process is killed or the power fails. ``torch.load`` can read the file too.

    Raises TypeError for content that ``weights_only=True`` could not load. Raises OSError, with the
    old checkpoint in place, if the disk is full, or ``path`` is a folder or a device.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (1, 2):
    ...         save_checkpoint(f"{folder}/run.pt", {"step": step})
    ...     sorted(file.name for file in Path(folder).iterdir())
    ['run.pt', 'run.pt.previous']
    """
    path = followed(path)
    if path.is_dir():  # os.replace would move a folder away as well
        raise IsADirectoryError(f"checkpoint: {path} is a folder. Give the name of a file.")
    if is_special(path):
        raise OSError(f"checkpoint: {path} is no regular file. Give the name of a file.")
    data = as_bytes(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unfinished(path)
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.write(_MARK + hashlib.sha256(data).digest())
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.replace(path, previous(path))
        os.replace(unfinished, path)
    except BaseException:
        if path.exists():  # else the new one is the last, and whole
            unfinished.unlink(missing_ok=True)
        raise


def is_special(path: Path) -> bool:
    """Whether there is something else than a file or a folder, such as a device."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check_writable(folder: Path) -> None:
    """Makes the folder, if need be. Raises OSError if no file can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except OSError as error:
        raise OSError(
            f"checkpoint: no file can be written in {folder} ({error}). Give a path where one can."
        ) from error


def as_bytes(content: Any) -> bytes:
    """The content as ``torch.save`` writes it. Raises TypeError as :func:`save_checkpoint` does."""
    content = tree_map(_plain_number, content)
    if not _is_loadable(tree_map(_without_data, content)):
        leaves = tree_flatten_with_path(content)[0]
        unloadable = [pair for pair in leaves if not _is_loadable(_without_data(pair[1]))]
        where = "one of its containers"
        if unloadable:
            path, leaf = unloadable[0]
            at = keystr(path) or "its content"
            where = f"{at}, a {type(leaf).__module__}.{type(leaf).__name__},"
        raise TypeError(
            f"checkpoint: {where} could not be read again with weights_only=True. Keep tensors, "
            "Python's own numbers and strings, dicts, lists and tuples."
        )
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _plain_number(leaf: Any) -> Any:
    """NumPy's scalars as Python's: a schedule that NumPy computes leaves some in the optimizer."""
    numpy = sys.modules.get("numpy")
    return leaf.item() if numpy is not None and isinstance(leaf, numpy.generic) else leaf


def _without_data(leaf: Any) -> Any:
    """None for a plain tensor: it is loadable, so the trial need not copy the bulk of the data."""
    return None if type(leaf) in (Tensor, Parameter) else leaf


def _is_loadable(content: Any) -> bool:
    """Whether ``content`` can be saved, and loaded with ``weights_only=True``."""
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="cpu")
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True


def has_checkpoint(path: str | Path) -> bool:
    """Whether there is a checkpoint, damaged or not."""
    return Path(path).exists() or previous(path).exists()


def load_checkpoint(path: str | Path) -> Any:
    """load_checkpoint : path -> the content that was saved there, tensors on the CPU

    If the last checkpoint is damaged, warns and loads the one before it.

    Raises FileNotFoundError if there is none, :class:`CheckpointError` if all are damaged.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(f"{folder}/run.pt", {"step": 3})
    ...     load_checkpoint(f"{folder}/run.pt")
    {'step': 3}
    """
    path = followed(path)
    problems = []
    # The temporary file is the last, and whole, if the run was killed between the two renames.
    others = (previous(path), _unfinished(path))
    for candidate in (path, *(others if path.exists() else others[::-1])):
        try:
            content = _read(candidate)
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems:
            warn(f"{problems[0]} Using {candidate}.", UserWarning)
        return content
    if problems:
        raise CheckpointError(
            " ".join(problems) + " Give another path; or, to start over, delete the files."
        )
    raise FileNotFoundError(f"no checkpoint at {path}.")


def _read(path: Path) -> Any:
    data = path.read_bytes()
    trailer_size = len(_MARK) + hashlib.sha256().digest_size
    body, trailer = data[:-trailer_size], data[-trailer_size:]
    if not trailer.startswith(_MARK):
        raise CheckpointError(
            f"checkpoint {path}: cut off, or not written by train_stream ({len(data)} bytes)."
        )
    if hashlib.sha256(body).digest() != trailer[len(_MARK) :]:
        raise CheckpointError(f"checkpoint {path}: damaged, its content is not what was written.")
    return torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")


def as_plain(tree: Tree) -> Any:
    """The tree as dicts, lists and tuples; any other container becomes a list of its leaves."""
    if isinstance(tree, Tensor):  # torch.save would write all of the storage that it is a view of
        return tree if tree.untyped_storage().nbytes() <= tree.nbytes else tree.clone()
    if tree is None:
        return tree
    if type(tree) is dict:
        return {key: as_plain(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(as_plain, tree))
    return [as_plain(leaf) for leaf in tree_leaves(tree)]


def from_plain(plain: Any, like: Tree, device: torch.device, start: Tree = None) -> Tree:
    """The inverse of :func:`as_plain` for a state.

    The structure is that of ``like``, whose shapes the state must have. If ``like`` is None, it is
    that of ``start``, whose shapes may differ. Raises ValueError for other shapes than ``like``'s.
    """
    if plain is None:
        return None
    structure = start if like is None else like
    if structure is None:
        return tree_map(lambda leaf: leaf.to(device), plain)
    leaves = tree_leaves(in_order_of(structure, plain))
    if like is not None:
        expected = [list(leaf.shape) for leaf in tree_leaves(like)]
        found = [list(leaf.shape) for leaf in leaves]
        if expected != found:
            raise ValueError(
                f"state: its tensors are {expected}, but in the checkpoint {found}. Resume with "
                "the state and the rows that the run was started with."
            )
    return tree_unflatten([leaf.to(device) for leaf in leaves], tree_flatten(structure)[1])
