"""Consecutive steps of data, and where time lies in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._trees import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

Tree = Any


class Chunk(NamedTuple):
    """Consecutive steps: the arguments of ``train_segment`` behind the state.

    ``x`` and ``y`` are trees of tensors or arrays, ``[K, ...]``; ``reset`` and ``mask`` are bool,
    ``[K]`` or ``[K, B]``.
    """

    x: Tree
    y: Tree = None
    reset: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class TimeAxes:
    """The axis of time in the leaves of ``x`` and of ``y``; ``reset`` and ``mask`` are as ``x``."""

    x: int = 0
    y: int = 0

    def cut(self, chunk: Chunk, start: int, stop: int) -> Chunk:
        """Steps ``[start, stop)`` of a chunk."""
        x, y, reset, mask = chunk
        x = _part(x, self.x, start, stop)
        if y is not None:
            y = _part(y, self.y, start, stop)
        if reset is not None:
            reset = _part(reset, self._of_flags(reset), start, stop)
        if mask is not None:
            mask = _part(mask, self._of_flags(mask), start, stop)
        return Chunk(x, y, reset, mask)

    def split(self, chunk: Chunk, size: int) -> list[Chunk]:
        """The chunk in pieces of ``size`` steps, the last one shorter."""
        count = -(-self.steps(chunk) // size)

        def pieces(tree: Tree, axis: int) -> Sequence[Tree]:
            if tree is None:
                return [None] * count
            if isinstance(tree, Tensor):
                return tree.split(size, axis)
            leaves, spec = tree_flatten(tree)
            split = zip(*(leaf.split(size, axis) for leaf in leaves), strict=True)
            return [tree_unflatten(own, spec) for own in split]

        x, y, *flags = chunk
        of_flags = [pieces(own, self._of_flags(own)) for own in flags]
        parts = zip(pieces(x, self.x), pieces(y, self.y), *of_flags, strict=True)
        return [Chunk(*own) for own in parts]

    def _of_flags(self, flags: Tensor | None) -> int:
        return self.x if flags is not None and flags.ndim > 1 else 0

    def steps(self, chunk: Chunk) -> int:
        """The steps of a chunk whose parts are known to have the same."""
        steps: int = tree_leaves(chunk.x)[0].shape[self.x]
        return steps

    def join(self, chunks: Sequence[Chunk]) -> Chunk:
        """Chunks one after the other; one without reset or mask restarts and leaves out nothing."""
        first = chunks[0]
        if any((chunk.y is None) != (first.y is None) for chunk in chunks):
            raise ValueError("some have y, others have none")

        def joined(trees: Sequence[Tree], axis: int) -> Tree:
            return tree_map(lambda *leaves: torch.cat(leaves, axis), *trees)

        def rows(name: str, default: bool) -> Tensor | None:
            given = [getattr(chunk, name) for chunk in chunks]
            like = next((flags for flags in given if flags is not None), None)
            if like is None:
                return None
            axis = self.x if like.dim() > 1 else 0
            for i, flags in enumerate(given):
                if flags is None:
                    shape = list(like.shape)
                    shape[axis] = self.length(chunks[i])
                    given[i] = like.new_full(shape, default)
            return torch.cat(given, axis)

        y = None if first.y is None else joined([c.y for c in chunks], self.y)
        x = joined([c.x for c in chunks], self.x)
        return Chunk(x, y, rows("reset", False), rows("mask", True))

    def length(self, chunk: Chunk) -> int:
        """The steps of a chunk, the same in every leaf.

        Raises ValueError where they differ.
        """
        steps: int | None = None
        first = "x"
        rows = [("reset", chunk.reset), ("mask", chunk.mask)]
        flags = [(n, f, self.x if f.ndim > 1 else 0) for n, f in rows if f is not None]
        for name, tree, axis in [("x", chunk.x, self.x), ("y", chunk.y, self.y), *flags]:
            for path, leaf in tree_flatten_with_path(tree)[0]:
                if leaf is None:  # no y
                    continue
                here = f"{name}{keystr(path)}"
                if not -len(leaf.shape) <= axis < len(leaf.shape):
                    found = list(leaf.shape)
                    raise ValueError(f"{here}: expected time on axis {axis}, found shape {found}.")
                if steps is None:
                    steps, first = leaf.shape[axis], here
                elif leaf.shape[axis] != steps:
                    raise ValueError(
                        f"{here}: has {leaf.shape[axis]} steps on axis {axis}, but {first} has "
                        f"{steps}. All parts of the data must have the same length; nothing is cut "
                        "silently."
                    )
        assert steps is not None
        return steps


def _part(tree: Tree, axis: int, start: int, stop: int) -> Tree:
    if axis == 0 and isinstance(tree, Tensor):  # the most frequent, and the slowest for pytree
        return tree[start:stop]
    place = (slice(None),) * axis + (slice(start, stop),)
    return tree_map(lambda leaf: leaf[place], tree)


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Errors within it say what the data is that they are about."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error


def as_chunk(item: Any) -> Chunk:
    if not isinstance(item, (tuple, list)) or not 2 <= len(item) <= 4:
        found = f"a {type(item).__name__}"
        if isinstance(item, (tuple, list)):
            found += f" of {len(item)}"
        raise TypeError(
            f"expected (x, y), (x, y, reset) or (x, y, reset, mask), found {found}. For data "
            "without a target: (x, None). What is not a tuple is read as chunks, each of them such "
            "a tuple."
        )
    return checked(Chunk(*item))


def checked(chunk: Chunk) -> Chunk:
    """The chunk. Raises TypeError for one of anything but tensors and arrays."""
    for name, tree in zip(chunk._fields, chunk, strict=True):
        if isinstance(tree, Tensor) or (tree is None and name != "x"):
            continue
        is_tree = name in ("x", "y")
        leaves = tree_flatten_with_path(tree)[0] if is_tree else [((), tree)]
        if not leaves:
            raise TypeError(f"{name}: expected at least one tensor or array, found none.")
        for path, leaf in leaves:
            if not hasattr(leaf, "shape"):
                kind = type(leaf).__name__
                here = f"{name}{keystr(path)}"
                raise TypeError(f"{here}: expected a tensor or an array, found {kind}.")
    return chunk


def is_of_tensors(chunk: Chunk) -> bool:
    return all(leaf is None or isinstance(leaf, Tensor) for leaf in tree_leaves(tuple(chunk)))


def as_tensors(chunk: Chunk) -> Chunk:
    """A chunk with copies of its arrays as tensors: what lies on disk is not written."""
    if is_of_tensors(chunk):
        return chunk
    import numpy

    def tensor(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, Tensor):
            return leaf
        return torch.from_numpy(numpy.array(leaf))

    return Chunk(*tree_map(tensor, tuple(chunk)))
