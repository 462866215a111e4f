"""Several sequences of one cell, and the loop over them that is the oracle of a batched call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ftbptt import SegmentOutput, reference_segment

from .cells import problem
from .cells.problems import EQUAL_SIZES, B, Problem

N = B if EQUAL_SIZES else 4  # sequences, or models
Tree = Any


def stacked(trees: list[Tree], dim: int = 0) -> Tree:
    """Trees of one structure -> one tree whose leaves have a new axis ``dim``."""
    flat = [tree_flatten(tree) for tree in trees]
    leaves = [torch.stack(own, dim) for own in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten([leaf.detach() for leaf in leaves], flat[0][1])


def sequences(name: str, steps: int, count: int = N) -> list[tuple[Tree, Tree, Tree, Tree]]:
    """Params, state, x and y of problems of one cell, each with a seed of its own."""
    return [problem(name, seed=seed).data(steps) for seed in range(count)]


def looped(given: Problem, calls: list[tuple[Tree, ...]], **rows: list[Tensor]) -> SegmentOutput:
    """The oracle: the eager loop for each sequence, stacked in front."""
    results = [
        reference_segment(
            given.step, given.loss, *call, time_dim=given.time_dim or None,
            **{key: values[i] for key, values in rows.items()},
        )
        for i, call in enumerate(calls)
    ]  # fmt: skip
    return stacked(results)
