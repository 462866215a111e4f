"""Pytrees: nested dicts, tuples and lists of tensors, as ``torch.func`` reads them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from ._compat.trees import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)
from ._compat.trees import tree_leaves as leaves_of_any

__all__ = [
    "Tree",
    "TreeSpec",
    "differentiable",
    "in_groups",
    "in_order_of",
    "keystr",
    "leaf_names",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

Tree = Any
T = TypeVar("T")


def differentiable(leaf: Tensor) -> bool:
    """Whether its dtype can have a gradient."""
    return leaf.is_floating_point() or leaf.is_complex()


def leaf_names(name: str, spec: TreeSpec) -> list[str]:
    """Of each leaf of an argument called ``name``, as in ``state['rest'][0]``."""
    paths, _ = tree_flatten_with_path(tree_unflatten([0] * spec.num_leaves, spec))
    return [f"{name}{keystr(path)}" for path, _ in paths]


def in_groups(items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """A flat list as consecutive groups of these sizes, which are all of it."""
    groups, start = [], 0
    for size in sizes:
        groups.append([*items[start : start + size]])
        start += size
    assert start == len(items)
    return groups


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a tree; quick for a tensor, and for a dict, tuple or list of tensors."""
    if isinstance(tree, Tensor):
        return [tree]
    kind = type(tree)
    if kind is dict:
        leaves = list(tree.values())
    elif kind is tuple or kind is list:
        leaves = list(tree)
    else:
        return leaves_of_any(tree)
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves
    return leaves_of_any(tree)


def in_order_of(like: Any, tree: Any) -> Any:
    """The tree, its dicts in the order of those of ``like`` where both have the same keys.

    For torch, dicts of another order are other trees.
    """
    kind = type(tree)
    if kind is not type(like):
        return tree
    if kind in (dict, OrderedDict) and tree.keys() == like.keys():
        return kind((key, in_order_of(like[key], tree[key])) for key in like)
    if isinstance(tree, (tuple, list)) and len(tree) == len(like):
        parts = [in_order_of(*pair) for pair in zip(like, tree, strict=True)]
        return kind(*parts) if hasattr(tree, "_fields") else kind(parts)
    return tree
