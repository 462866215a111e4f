"""The step with restarts and padding: ``reset`` and ``mask`` as part of the graph of one step.

Both become a ``where`` on each part of the state, which the loop fuses with its other elementwise
work: rows restart independently, and a reset adds no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..._checks import check_tensors
from ..._trees import differentiable, in_order_of, tree_flatten, tree_unflatten
from ...contract.layout import where_rows
from ..signature import Recipe, Signature, with_autocast
from ..straight_through import with_gradient_of
from .split_state import Packing


def _broadcasts(shape: Sequence[int], other: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return all(size in (1, wanted) for size, wanted in pairs)


def _with_factor(part: Tensor, factor: Tensor) -> Tensor:
    """The same value; the gradient that goes back from it is multiplied."""
    if not differentiable(part):
        return part
    return with_gradient_of(part, part, factor.reshape(()).to(part.dtype))


def _always(axis: int) -> Callable[[Tensor], int]:
    return lambda leaf: axis


def with_reset_and_mask(
    recipe: Recipe,
    s: Signature,
    module: fx.GraphModule,
    packings: list[Packing],
    row_axes: list[int],
    n_fixed: int,
) -> Callable[..., list[Tensor]]:
    """with_reset_and_mask : step graph -> function

    ``(*fixed, *initial, *x_t, *reset, *mask, *parts) -> [*out_t, *parts]``; ``fixed`` are the
    parameters, buffers and captures.
    """
    n_params, n_initial, n_x = len(s.params), len(s.initial), len(s.x)
    part_axes = [
        packing.row_axis(axis)
        for packing, axis in zip(packings, row_axes, strict=True)
        for _ in range(packing.count)
    ]

    def choose(flags: Tensor, yes: list[Tensor], no: list[Tensor]) -> list[Tensor]:
        return [
            where_rows(flags, a, b, _always(axis))
            for a, b, axis in zip(yes, no, part_axes, strict=True)
        ]

    def run(*args: Tensor) -> list[Tensor]:
        fixed, rest = args[:n_fixed], list(args[n_fixed:])
        initial, x, rest = rest[:n_initial], rest[n_initial:][:n_x], rest[n_initial + n_x :]
        reset = rest.pop(0) if s.reset is not None else None
        mask = rest.pop(0) if s.mask is not None else None
        parts: list[Tensor] = rest
        if recipe.step.has_gradient_factors:
            factor = x[-1].reshape(())  # it has the axes that where time lies in x may need
            parts = [_with_factor(part, factor) for part in parts]
        if reset is not None:
            start = _initial_parts(recipe, s, packings, fixed[:n_params], initial, parts)
            parts = choose(reset, start, parts)
        result = module(*fixed, *x, *parts)
        outs, after = result[: len(result) - len(parts)], result[len(result) - len(parts) :]
        if mask is not None:
            after = choose(mask, after, parts)
        return [*outs, *after]

    return run


def _initial_parts(
    recipe: Recipe,
    s: Signature,
    packings: Sequence[Packing],
    params: Sequence[Tensor],
    initial: list[Tensor],
    like: Sequence[Tensor],
) -> list[Tensor]:
    """The parts of the state that a reset starts from; zeros ``like`` those of the state."""
    if callable(recipe.initial_state):
        with with_autocast(s.autocast):
            tree = recipe.initial_state(tree_unflatten(list(params), s.specs.params))
        initial = _leaves_like_state(tree, s)
    elif not initial:
        return [torch.zeros_like(part) for part in like]
    parts: list[Tensor] = []
    for leaf, state_leaf, packing in zip(initial, s.state, packings, strict=True):
        if leaf.dim() > len(state_leaf.shape) or not _broadcasts(leaf.shape, state_leaf.shape):
            raise ValueError(
                f"initial_state: returned a leaf of shape {list(leaf.shape)} where the state "
                f"has {list(state_leaf.shape)}. Return that, or one that broadcasts to it."
            )
        # A single number takes the dtype of the state that it is put beside, if it is of its kind.
        if torch.result_type(leaf, state_leaf.example()) != state_leaf.dtype:
            raise TypeError(
                f"initial_state: returned a leaf of {leaf.dtype} where the state has "
                f"{state_leaf.dtype}. Give both in one dtype."
            )
        parts += packing.unpack(leaf.to(state_leaf.dtype).expand(state_leaf.shape))
    return parts


def _leaves_like_state(tree: Any, s: Signature) -> list[Tensor]:
    """The leaves of a computed ``initial_state``, in the order of those of the state."""
    check_tensors("initial_state", tree, "Return tensors, in the structure of the state.")
    like = tree_unflatten([None] * len(s.state), s.specs.state)
    leaves, spec = tree_flatten(in_order_of(like, tree))
    if spec != s.specs.state:
        raise TypeError(
            "initial_state: expected the structure of the state, found a different one.\n"
            f"  state:         {s.specs.state}\n  initial_state: {spec}"
        )
    return leaves
