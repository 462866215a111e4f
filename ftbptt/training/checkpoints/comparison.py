"""Whether what a checkpoint holds belongs to the run that it is read into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..._trees import Tree, keystr, tree_flatten_with_path, tree_leaves


def names_of(tree: Tree) -> list[str]:
    """The paths of the leaves."""
    return [keystr(path) for path, _ in tree_flatten_with_path(tree)[0]]


def check_names(name: str, names: Sequence[str], saved: Sequence[str]) -> None:
    """Raises ValueError for leaves of other names, or in another order."""
    if list(names) != list(saved):
        raise ValueError(
            f"{name}: found {', '.join(names)}, but in the checkpoint "
            f"{', '.join(saved)}: it belongs to a different model, or to one that "
            "was built in another order."
        )


def check_like(name: str, owner: str, tree: Tree, saved: list[Any]) -> None:
    """Raises ValueError if the saved leaves differ from those of ``tree`` in shape or dtype."""
    leaves = tree_leaves(tree)
    if len(leaves) != len(saved):
        raise ValueError(
            f"{name}: has {len(leaves)} leaves, but the checkpoint has {len(saved)}: it belongs "
            f"to a different {owner}."
        )
    for path, leaf, value in zip(names_of(tree), leaves, saved, strict=True):
        if not (isinstance(leaf, Tensor) and isinstance(value, Tensor)):
            continue
        if leaf.shape != value.shape or leaf.dtype != value.dtype:
            raise ValueError(
                f"{name}{path}: is {leaf.dtype} {list(leaf.shape)}, but in the checkpoint "
                f"{value.dtype} {list(value.shape)}: it belongs to a different {owner}."
            )
