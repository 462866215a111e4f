"""A call like one before is not checked and laid out again.

What a training loop calls thousands of times has the same structure, shapes and dtypes each time;
for a small cell, finding that out anew would take longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
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
            kind = type(tree)
            if kind in _TENSORS:
                own = [tree]
                key.append(Tensor)
            elif tree is None:
                own = []
                key.append(None)
            elif kind is dict:
                own = list(tree.values())
                key.append(tuple(tree))
            elif kind is tuple or kind is list:
                own = list(tree)
                key.append((kind, len(own)))
            else:
                return None
            for leaf in own:
                if type(leaf) not in _TENSORS:
                    return None
                key.append((leaf.shape, leaf.dtype, leaf.device))
            leaves.append(own)
        first = next((leaf for own in leaves for leaf in own), None)
        return None if first is None else cls(leaves, tuple(key), first.device.type)


def like(tree: Tree, leaves: list[Tensor]) -> Tree:
    """Leaves in the structure of a tree that ``Trees`` knows."""
    if type(tree) is dict:
        return dict(zip(tree, leaves, strict=True))
    return leaves[0] if type(tree) in _TENSORS else type(tree)(leaves)


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

    def forget(self) -> None:
        self._known.clear()

    def keep(self, key: Any, known: Known) -> None:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = known
