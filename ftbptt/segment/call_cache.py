"""A cache of checked calls: one with the same structure, shapes and dtypes is not checked again.

A training loop makes thousands of such calls, and checking and laying out the arguments of a small
cell takes longer than its arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .._trees import Tree
from .call import Call
from .execute import Executable

_TENSORS = (Tensor, nn.Parameter)
_MOST = 256  # calls, one for each K; many different lengths should not fill the memory


@dataclass(frozen=True)
class FlatArguments:
    """Arguments as flat tensors, and a key of their structure, shapes, dtypes, devices, layouts.

    Only of tensors, None, and dicts, tuples and lists of these, which is all that most calls have.
    """

    leaves: list[list[Tensor]]
    key: tuple[Any, ...]
    device_type: str

    @classmethod
    def of(cls, trees: Sequence[Tree]) -> FlatArguments | None:
        leaves: list[list[Tensor]] = []
        key: list[Any] = []
        for tree in trees:
            tree_leaves: list[Tensor] = []
            try:
                if not flatten(tree, tree_leaves, key):
                    return None
            except RuntimeError:  # a nested tensor has no shape; it is refused later
                return None
            leaves.append(tree_leaves)
        first = next((leaf for tree_leaves in leaves for leaf in tree_leaves), None)
        return None if first is None else cls(leaves, tuple(key), first.device.type)


def flatten(tree: Tree, leaves: list[Tensor], key: list[Any]) -> bool:
    """Appends the tensors of a tree, and its form; false if it contains anything else."""
    kind = type(tree)
    if kind in _TENSORS:
        leaves.append(tree)
        key.append((tree.shape, tree.dtype, tree.device, tree.layout))
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
        if type(part) in _TENSORS:  # the frequent case, without a call
            leaves.append(part)
            key.append((part.shape, part.dtype, part.device, part.layout))
        elif not flatten(part, leaves, key):
            return False
    return True


def like(tree: Tree, leaves: list[Tensor]) -> Tree:
    """The leaves in the structure of a tree that :func:`flatten` accepts."""
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
class CheckedCall:
    """What a checked call runs."""

    call: Call
    executable: Executable


class CallCache:
    """The calls that were checked, by the key of their arguments."""

    def __init__(self) -> None:
        self._calls: dict[Any, CheckedCall] = {}

    def find(self, key: Any) -> CheckedCall | None:
        return self._calls.get(key)

    def keep(self, key: Any, checked: CheckedCall) -> None:
        if len(self._calls) >= _MOST:
            self._calls.clear()
        self._calls[key] = checked
