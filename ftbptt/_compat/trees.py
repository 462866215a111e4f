"""Pytrees of any nesting, with key paths for error messages.

torch has no public pytree module; this one has kept its signatures since 2.3 and is what
torch.func uses. The package takes them from ``_trees``.
"""

from __future__ import annotations

from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
