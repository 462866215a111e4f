"""A call like one before is not checked and laid out again.

What a training loop calls thousands of times has the same structure, shapes and dtypes each time;
for a small cell, finding that out anew would take longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ._call import Call
from ._execute import Executable

Tree = Any
_TENSORS = (Tensor, nn.Parameter)
_MOST = 256  # one for each K; a loop over ever new lengths should not fill the memory


@dataclass(frozen=True)
class Trees:
    """Arguments as flat tensors, and what they look like, as a key.

    Only tensors, and dicts, tuples and lists of tensors, or None: most calls have no more.
    """

    leaves: list[list[Tensor]]
    key: tuple[Any, ...]
    device_type: str

    @classmethod
    def of(cls, trees: Sequence[Tree]) -> Trees | None:
        leaves: list[list[Tensor]] = []
        key: list[Any] = []
        for tree in trees:
            own: list[Tensor] = []
            if not flatten(tree, own, key):
                return None
            leaves.append(own)
        first = next((leaf for own in leaves for leaf in own), None)
        return None if first is None else cls(leaves, tuple(key), first.device.type)


def flatten(tree: Tree, leaves: list[Tensor], key: list[Any]) -> bool:
    """Appends the tensors of a tree, and what it looks like; whether that is all it has."""
    kind = type(tree)
    if kind in _TENSORS:
        leaves.append(tree)
        key.append((tree.shape, tree.dtype, tree.device))
        return True
    if tree is None:
        key.append(None)
        return True
    if kind is dict:
        key.append(tuple(tree))
        parts = tree.values()
    elif kind is tuple or kind is list:
        key.append((kind, len(tree)))
        parts = tree
    else:
        return False
    for part in parts:
        if type(part) in _TENSORS:  # most are: as above, without a call
            leaves.append(part)
            key.append((part.shape, part.dtype, part.device))
        elif not flatten(part, leaves, key):
            return False
    return True


def like(tree: Tree, leaves: list[Tensor]) -> Tree:
    """Leaves in the structure of a tree that ``Trees`` knows."""
    return _like(tree, iter(leaves))


def _like(tree: Tree, leaves: Iterator[Tensor]) -> Tree:
    kind = type(tree)
    if kind in _TENSORS:
        return next(leaves)
    if tree is None:
        return None
    if kind is dict:
        return {name: _like(part, leaves) for name, part in tree.items()}
    return kind([_like(part, leaves) for part in tree])


@dataclass(frozen=True)
class Known:
    """What a call of this kind runs."""

    call: Call
    executable: Executable
    initial: list[Tensor]


class Recall:
    """The calls that were checked, by what they look like."""

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}

    def find(self, key: Any) -> Known | None:
        return self._known.get(key)

    def keep(self, key: Any, known: Known) -> None:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = known
