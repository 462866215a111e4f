"""Compares two runs of the same chunk: loss, state and gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..._trees import Tree, differentiable, tree_flatten

# The error allowed, relative to a tensor's norm.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
_TF32_TOLERANCE = 2e-2
# A gradient that is zero up to rounding is compared relative to this share of the largest one.
_SMALL_GRADIENT = 1e-2
_ZERO = 1e-30  # smaller errors always pass


class Outcome(NamedTuple):
    """The results of a chunk: its loss, the state after it, a state saved on the way, gradients."""

    loss: Tensor
    state: Tree
    saved: Tree
    grads: dict[str, Tensor | None]


def is_conclusive(expected: Outcome) -> bool:
    """Whether a comparison means anything: loss and gradients are finite, and not all zero."""
    norm = sum(_norm(grad) for grad in expected.grads.values() if grad is not None)
    return math.isfinite(norm) and norm > 0 and math.isfinite(float(expected.loss))


def difference(result: Outcome, expected: Outcome, autocast: torch.dtype | None) -> str | None:
    """The first quantity that differs, and by how much; None if all agree.

    A missing gradient counts as zero.
    """
    return (
        _tree_difference("the state", result.state, expected.state, autocast)
        or _tree_difference("the saved state", result.saved, expected.saved, autocast)
        or _leaf_difference(
            "the loss", result.loss, expected.loss, abs(float(expected.loss)), autocast
        )
        or _gradient_difference(result.grads, expected.grads, autocast)
    )


def not_stepwise(difference: str) -> str:
    """Why a model whose chunks differ from their steps one by one is not compiled."""
    return (
        f"a chunk gives other results than its steps one by one ({difference}), as in a model that "
        "looks at several steps at once (convolution, attention or a norm over time)"
    )


def _tree_difference(
    name: str, result: Tree, expected: Tree, autocast: torch.dtype | None
) -> str | None:
    if result is None and expected is None:
        return None
    leaves, spec = tree_flatten(result)
    expected_leaves, expected_spec = tree_flatten(expected)
    if spec != expected_spec:
        return f"{name} has another structure"
    for leaf, like in zip(leaves, expected_leaves, strict=True):
        if leaf.shape != like.shape or leaf.dtype != like.dtype:
            return (
                f"{name} is {leaf.dtype} {list(leaf.shape)} instead of {like.dtype} "
                f"{list(like.shape)}"
            )
        if message := _leaf_difference(name, leaf, like, _norm(like), autocast):
            return message
    return None


def _gradient_difference(
    result: dict[str, Tensor | None],
    expected: dict[str, Tensor | None],
    autocast: torch.dtype | None,
) -> str | None:
    norms = {name: 0.0 if grad is None else _norm(grad) for name, grad in expected.items()}
    smallest_scale = _SMALL_GRADIENT * max(norms.values(), default=0.0)
    for name, grad in result.items():  # has no frozen parameters, unlike ``expected``
        like = expected[name]
        if grad is None and like is None:
            continue
        grad = torch.zeros_like(like) if grad is None else grad  # type: ignore[arg-type]
        like = torch.zeros_like(grad) if like is None else like
        label = f"the gradient of {name}"
        if grad.shape != like.shape:
            return f"{label} has shape {list(grad.shape)} instead of {list(like.shape)}"
        if message := _leaf_difference(
            label, grad, like, max(norms[name], smallest_scale), autocast
        ):
            return message
    return None


def _leaf_difference(
    name: str, leaf: Tensor, like: Tensor, scale: float, autocast: torch.dtype | None
) -> str | None:
    """``scale``: what the tolerance is relative to."""
    if not differentiable(like):
        return None if torch.equal(leaf, like) else f"{name} differs"
    error = _norm(leaf - like)
    if error <= _tolerance(like, autocast) * scale or error < _ZERO:
        return None
    norm = _norm(like)
    by = f"{100 * error / norm:.3g} %" if norm else f"{error:.3g} from zero"
    return f"{name} differs by {by}"


def _tolerance(like: Tensor, autocast: torch.dtype | None) -> float:
    dtype = torch.zeros((), dtype=like.dtype).abs().dtype  # of a complex dtype: of its parts
    tolerance = _TOLERANCE.get(dtype, 1e-3)
    if like.device.type == "cuda" and dtype == torch.float32:
        tolerance = _TF32_TOLERANCE  # torch's recurrent layers use it there by default
    return tolerance if autocast is None else max(tolerance, _TOLERANCE.get(autocast, 0.1))


def _norm(tensor: Tensor) -> float:
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor.detach().to(dtype)))
