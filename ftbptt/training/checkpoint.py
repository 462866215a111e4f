"""Files that are either whole or not there, and the random numbers of a run."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._trees import (
    in_order_of,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

Tree = Any
_MARK = b"ftbptt-sha256:"  # after torch's own file, with the hash of all before it


class CheckpointError(ValueError):
    """A file that is damaged, or that is not a checkpoint."""


def previous(path: str | Path) -> Path:
    """Where the checkpoint before the last one is kept."""
    path = Path(path)
    return path.with_name(f"{path.name}.previous")


def _unfinished(path: Path) -> Path:
    """Where it is written. One name, so that killed runs do not leave a file each."""
    return path.with_name(f"{path.name}.tmp")


def save_checkpoint(path: str | Path, content: Any) -> None:
    """save_checkpoint : path, tree of tensors, numbers, strings, dicts, lists and tuples -> None

    Writes a temporary file beside ``path`` and renames it, so that at any moment, also if the
    process is killed or the power fails, there is a whole checkpoint at ``path`` or at
    ``previous(path)``, where the one before is kept. ``torch.load`` reads the file as well.

    Raises TypeError for what could not be read again with ``weights_only=True``, and OSError, with
    the old checkpoint in place, if the disk is full or ``path`` is a folder.
    """
    path = Path(path)
    if path.is_dir():  # which could be renamed as well
        raise IsADirectoryError(f"checkpoint: {path} is a folder. Give the name of a file.")
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
        unfinished.unlink(missing_ok=True)
        raise


def as_bytes(content: Any) -> bytes:
    """As torch saves it, NumPy's numbers as Python's. Raises as :func:`save_checkpoint`."""
    content = tree_map(_plain_number, content)
    if not _can_be_read(tree_map(_without_data, content)):
        leaves = tree_flatten_with_path(content)[0]
        wrong = [(at, leaf) for at, leaf in leaves if not _can_be_read(_without_data(leaf))]
        where = "one of its containers"
        if wrong:
            at, leaf = wrong[0]
            where = f"{keystr(at)}, a {type(leaf).__module__}.{type(leaf).__name__},"
        raise TypeError(
            f"checkpoint: {where} could not be read again with weights_only=True. Keep tensors, "
            "Python's own numbers and strings, dicts, lists and tuples."
        )
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _plain_number(leaf: Any) -> Any:
    """A schedule that is computed with NumPy leaves its numbers in the optimizer."""
    numpy = sys.modules.get("numpy")
    return leaf.item() if numpy is not None and isinstance(leaf, numpy.generic) else leaf


def _without_data(leaf: Any) -> Any:
    """A plain tensor can be read again, so the largest part need not be tried."""
    return None if type(leaf) in (Tensor, Parameter) else leaf


def _can_be_read(content: Any) -> bool:
    """Whether it can be saved, and read with ``weights_only=True``."""
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="cpu")
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True


def has_checkpoint(path: str | Path) -> bool:
    """Whether there is one, whole or not."""
    return Path(path).exists() or previous(path).exists()


def load_checkpoint(path: str | Path) -> Any:
    """load_checkpoint : path -> what was saved there

    The last one if it is whole; else, with a warning, the one before it. Tensors are on the CPU.

    Raises FileNotFoundError if there is none, :class:`CheckpointError` if there is no whole one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(f"{folder}/run.pt", {"step": 3})
    ...     load_checkpoint(f"{folder}/run.pt")
    {'step': 3}
    """
    path = Path(path)
    reasons = []
    for place in _places(path):
        try:
            content = _read(place)
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        if reasons:
            warnings.warn(f"{reasons[0]} Using {place}.", stacklevel=2)
        return content
    if reasons:
        raise CheckpointError(" ".join(reasons) + " To start anew, delete what is there.")
    raise FileNotFoundError(f"no checkpoint at {path}.")


def _places(path: Path) -> tuple[Path, ...]:
    """Where there may be one; the last is whole where a run was killed as it renamed it."""
    return path, previous(path), _unfinished(path)


def _read(path: Path) -> Any:
    data = path.read_bytes()
    tail = len(_MARK) + hashlib.sha256().digest_size
    body, mark = data[:-tail], data[-tail:]
    if not mark.startswith(_MARK):
        raise CheckpointError(
            f"checkpoint {path}: cut off, or not a checkpoint ({len(data)} bytes)."
        )
    if hashlib.sha256(body).digest() != mark[len(_MARK) :]:
        raise CheckpointError(f"checkpoint {path}: damaged, its content is not what was written.")
    return torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")


def as_plain(tree: Tree) -> Any:
    """The tree in dicts, lists and tuples; of other containers only the leaves, in a list."""
    if isinstance(tree, Tensor):  # with a tensor, all that it is a view of would be saved
        return tree if tree.untyped_storage().nbytes() <= tree.nbytes else tree.clone()
    if tree is None:
        return tree
    if type(tree) is dict:
        return {key: as_plain(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(as_plain, tree))
    return [as_plain(leaf) for leaf in tree_leaves(tree)]


def from_plain(plain: Any, like: Tree, device: torch.device, start: Tree = None) -> Tree:
    """What :func:`as_plain` made a state of, in the structure of ``like`` if that is not None.

    Else in that of ``start``, which may have other shapes. Raises ValueError where it is not like
    ``like``.
    """
    if plain is None:
        return None
    structure = start if like is None else like
    leaves, spec = tree_flatten(plain if structure is None else in_order_of(structure, plain))
    moved = [leaf.to(device) for leaf in leaves]
    if like is None:
        return tree_unflatten(moved, spec if start is None else tree_flatten(start)[1])
    own, spec = tree_flatten(like)
    shapes, found = ([list(leaf.shape) for leaf in tensors] for tensors in (own, moved))
    if shapes != found:
        raise ValueError(
            f"state: its tensors are {shapes}, but in the checkpoint {found}. Resume with the "
            "state and the rows that the run was started with."
        )
    return tree_unflatten(moved, spec)


def random_state() -> dict[str, Any]:
    """The state of every generator that a step or a data set may draw from."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, numbers, gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:  # else nobody has drawn from it
        import numpy

        name, keys, at, has_gauss, value = numpy.random.get_state(legacy=True)
        state["numpy"] = [
            name,
            torch.from_numpy(numpy.asarray(keys, "int64")),
            at,
            has_gauss,
            value,
        ]
    return state


def same_random_state(a: Any, b: Any) -> bool:
    """Whether two of them, or two parts of them, are the same: nothing was drawn in between."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_random_state(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_random_state, a, b))
    return bool(a == b)


def set_random_state(state: dict[str, Any]) -> None:
    """Goes on from what :func:`random_state` gave."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        saved: list[Tensor] = state["cuda"]
        torch.cuda.set_rng_state_all(saved[: torch.cuda.device_count()])
    if "numpy" in state:
        import numpy

        name, keys, at, has_gauss, value = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), at, has_gauss, value))
