"""Consecutive steps of data, and where the time axis is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..._messages import describe_type
from ..._trees import (
    Tree,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from ...contract.layout import Layout


class Chunk(NamedTuple):
    """K consecutive steps: the arguments of ``train_segment`` after ``params`` and ``state``.

    - ``x`` and ``y``: trees of tensors or arrays ``[K, ...]``; ``y`` is None without a target.
    - ``reset`` and ``mask``: bool, ``[K]`` or ``[K, B]``. Where ``reset`` is true, the state
      restarts before the step; where ``mask`` is false, the step is padding.

    >>> chunk = Chunk(torch.zeros(20, 4, 3), torch.zeros(20, 4), reset=torch.arange(20) == 7)
    >>> chunk.x.shape, chunk.mask
    (torch.Size([20, 4, 3]), None)
    """

    x: Tree
    y: Tree = None
    reset: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class TimeAxes:
    """The time axis in the leaves of ``x`` and of ``y``.

    ``flags``: that of ``reset`` and ``mask``, by how many axes they have (0 to 3).
    """

    x: int = 0
    y: int = 0
    flags: tuple[int, ...] = (0, 0, 0, 0)

    @classmethod
    def of(cls, layout: Layout) -> TimeAxes:
        of_flags = [layout.flag_axes(axes)[0] for axes in range(4)]
        return cls(layout.x_time, layout.y_time, tuple(of_flags))

    def _flag_axis(self, flags: Tensor | None) -> int:
        return 0 if flags is None else self.flags[min(flags.ndim, 3)]

    def cut(self, chunk: Chunk, start: int, stop: int) -> Chunk:
        """Steps ``[start, stop)`` of a chunk."""
        x, y, reset, mask = chunk
        x = _slice(x, self.x, start, stop)
        if y is not None:
            y = _slice(y, self.y, start, stop)
        if reset is not None:
            reset = _slice(reset, self._flag_axis(reset), start, stop)
        if mask is not None:
            mask = _slice(mask, self._flag_axis(mask), start, stop)
        return Chunk(x, y, reset, mask)

    def split(self, chunk: Chunk, size: int) -> list[Chunk]:
        """The chunk in pieces of ``size`` steps; the last one may be shorter."""
        count = -(-self.steps(chunk) // size)

        def split_tree(tree: Tree, axis: int) -> Sequence[Tree]:
            if tree is None:
                return [None] * count
            if isinstance(tree, Tensor):
                return tree.split(size, axis)
            leaves, spec = tree_flatten(tree)
            leaves_of_pieces = zip(*(leaf.split(size, axis) for leaf in leaves), strict=True)
            return [tree_unflatten(piece, spec) for piece in leaves_of_pieces]

        pieces = zip(
            split_tree(chunk.x, self.x),
            split_tree(chunk.y, self.y),
            split_tree(chunk.reset, self._flag_axis(chunk.reset)),
            split_tree(chunk.mask, self._flag_axis(chunk.mask)),
            strict=True,
        )
        return [Chunk(*piece) for piece in pieces]

    def join(self, chunks: Sequence[Chunk]) -> Chunk:
        """Chunks one after the other. A chunk without flags has no resets and no padding."""
        first = chunks[0]
        if any((chunk.y is None) != (first.y is None) for chunk in chunks):
            raise ValueError("some have y, others have none")

        def join_trees(trees: Sequence[Tree], axis: int) -> Tree:
            return tree_map(lambda *leaves: torch.cat(leaves, axis), *trees)

        def join_flags(parts: list[Tensor | None], default: bool) -> Tensor | None:
            example = next((flags for flags in parts if flags is not None), None)
            if example is None:
                return None
            axis = self._flag_axis(example)
            filled = []
            for flags, chunk in zip(parts, chunks, strict=True):
                if flags is None:
                    shape = list(example.shape)
                    shape[axis] = self.length(chunk)
                    flags = example.new_full(shape, default)
                filled.append(flags)
            return torch.cat(filled, axis)

        return Chunk(
            join_trees([chunk.x for chunk in chunks], self.x),
            None if first.y is None else join_trees([chunk.y for chunk in chunks], self.y),
            join_flags([chunk.reset for chunk in chunks], False),
            join_flags([chunk.mask for chunk in chunks], True),
        )

    def steps(self, chunk: Chunk) -> int:
        """The number of steps, read from one leaf: for chunks that :meth:`length` has checked."""
        steps: int = tree_leaves(chunk.x)[0].shape[self.x]
        return steps

    def length(self, chunk: Chunk) -> int:
        """The number of steps. Raises ValueError if leaves differ in it."""
        parts = [("x", chunk.x, self.x), ("y", chunk.y, self.y)]
        for name, flags in (("reset", chunk.reset), ("mask", chunk.mask)):
            parts.append((name, flags, self._flag_axis(flags)))
        steps: int | None = None
        first_path = ""
        for name, tree, axis in parts:
            remedy = " Expand what a row has at all steps over them." if name == "y" else ""
            for path, leaf in tree_flatten_with_path(tree)[0]:
                if leaf is None:  # a part that the chunk does not have
                    continue
                leaf_path = f"{name}{keystr(path)}"
                if not -len(leaf.shape) <= axis < len(leaf.shape):
                    raise ValueError(
                        f"{leaf_path}: expected time on axis {axis}, found shape "
                        f"{list(leaf.shape)}.{remedy}"
                    )
                if steps is None:
                    steps, first_path = leaf.shape[axis], leaf_path
                elif leaf.shape[axis] != steps:
                    if isinstance(chunk.x, list) and len(chunk.x) == leaf.shape[axis]:
                        remedy = f" If each tensor in x is a step, use torch.stack(x, {self.x})."
                    raise ValueError(
                        f"{leaf_path}: has {leaf.shape[axis]} steps on axis {axis}, but "
                        f"{first_path} has {steps}. All parts of the data must have the same "
                        f"length; nothing is cut silently.{remedy}"
                    )
        assert steps is not None
        return steps


def _slice(tree: Tree, axis: int, start: int, stop: int) -> Tree:
    if axis == 0:  # without a tuple, which tables do not take
        if isinstance(tree, Tensor):  # the common case, for which pytree is slow
            return tree[start:stop]
        return tree_map(lambda leaf: leaf[start:stop], tree)
    index = (slice(None),) * axis + (slice(start, stop),)
    return tree_map(lambda leaf: leaf[index], tree)


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Puts ``prefix`` in front of the message of a TypeError or ValueError raised within."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{prefix}: {error}") from error


def as_chunk(item: Any) -> Chunk:
    """A tuple of the caller as a chunk. Raises TypeError for anything else."""
    if not isinstance(item, (tuple, list)) or not 2 <= len(item) <= 4:
        raise TypeError(
            f"expected (x, y) or (x, y, reset, mask), found {describe_type(item)}. "
            "For data without a target: (x, None). Anything but a tuple is read as an iterable "
            "of chunks, each of them such a tuple."
        )
    if len(item) == 3 and not isinstance(item, Chunk):
        raise TypeError(
            "expected (x, y), found three parts: the third may be meant as reset or as mask. Give "
            "Chunk(x, y, reset=...) or Chunk(x, y, mask=...)."
        )
    return check_leaves(Chunk(*item))


def check_leaves(chunk: Chunk) -> Chunk:
    """The same chunk, its leaves by :func:`as_array`, which raises for what cannot be one."""
    checked: dict[str, Tree] = {}
    for name, tree in zip(chunk._fields, chunk, strict=True):
        if isinstance(tree, Tensor) or (tree is None and name != "x"):
            continue
        if isinstance(tree, PackedSequence):
            raise TypeError(
                f"{name}: is a PackedSequence, whose rows drop out as it goes on, but a state is "
                "carried for all rows. Give PackedSequences(sequences, rows=...), or pad "
                "(torch.nn.utils.rnn.pad_packed_sequence) and give a mask."
            )
        is_tree = name in ("x", "y")
        if not is_tree:
            checked[name] = as_array(name, tree)
            continue
        leaves, spec = tree_flatten_with_path(tree)
        if not leaves:
            raise TypeError(f"{name}: expected at least one tensor or array, found none.")
        arrays = [as_array(f"{name}{keystr(path)}", leaf) for path, leaf in leaves]
        checked[name] = tree_unflatten(arrays, spec)
    return chunk._replace(**checked)


def as_array(path: str, leaf: Any) -> Any:
    """The same leaf; a table of pandas, whose indices may be labels, as an array.

    Raises TypeError for what is neither a tensor nor an array, and ValueError for an array with
    masked values, of which a tensor would have whatever stands there.
    """
    if not hasattr(leaf, "shape"):
        raise TypeError(f"{path}: expected a tensor or an array, found {type(leaf).__name__}.")
    if hasattr(leaf, "filled") and leaf.mask.any():
        raise ValueError(
            f"{path}: is a masked array, with {int(leaf.mask.sum())} values masked, but a tensor "
            "has no such mask. Fill it (value.filled(0)), and leave out gaps of a target in the "
            "loss; mask= is for padding, where the state stays as it was."
        )
    return leaf.to_numpy() if hasattr(leaf, "iloc") else leaf


def map_leaves(change: Callable[[Any], Any], tree: Tree) -> Tree:
    """The tree with ``change(leaf)`` for each leaf. None stays: a part that a chunk lacks."""
    return tree_map(lambda leaf: None if leaf is None else change(leaf), tree)


def has_only_tensors(chunk: Chunk) -> bool:
    return all(leaf is None or isinstance(leaf, Tensor) for leaf in tree_leaves(tuple(chunk)))


def as_tensors(chunk: Chunk) -> Chunk:
    """The chunk with its leaves by :func:`as_tensor`."""
    return chunk if has_only_tensors(chunk) else map_leaves(as_tensor, chunk)


def as_tensor(leaf: Any) -> Tensor:
    """The tensor, or a copy of the array as one, so that writing to it changes no file."""
    if isinstance(leaf, Tensor):
        return leaf
    import numpy

    array = numpy.array(as_array("data", leaf))  # a slice may be masked where the whole is not
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError as error:
        raise TypeError(
            f"data: has an array of {array.dtype}, of which torch makes no tensor. Convert it."
        ) from error
