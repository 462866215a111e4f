"""Whether a chunk run in another way gave the same: loss, state and gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._trees import tree_flatten

Tree = Any

# Relative to a tensor's norm. A gradient that is zero but for rounding is held to what is small
# beside the largest one.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
_TF32 = 2e-2
_SMALL = 1e-2


class Outcome(NamedTuple):
    """What a chunk gives: a loss, the state after it, one from within, and gradients by name."""

    loss: Tensor
    state: Tree
    kept: Tree
    grads: dict[str, Tensor | None]


def can_be_judged(expected: Outcome) -> bool:
    """Whether there is something to compare: a gradient that is neither zero nor infinite."""
    norm = sum(_norm(grad) for grad in expected.grads.values() if grad is not None)
    return math.isfinite(norm) and norm > 0 and math.isfinite(float(expected.loss))


def disagreement(found: Outcome, expected: Outcome, autocast: torch.dtype | None) -> str | None:
    """What differs between a chunk step by step and as one, in words; None if all agrees.

    No gradient counts as zero.
    """
    words = _first_difference(found, expected, autocast)
    if words is None:
        return None
    return (
        f"a chunk gives other numbers than its steps one by one ({words}), as it does where a "
        "model looks at several steps at once (convolution, attention or a norm over time)"
    )


def _first_difference(
    found: Outcome, expected: Outcome, autocast: torch.dtype | None
) -> str | None:
    for name, a, b in (
        ("state", found.state, expected.state),
        ("state within", found.kept, expected.kept),
    ):
        if a is None and b is None:
            continue
        leaves, spec = tree_flatten(a)
        others, other_spec = tree_flatten(b)
        if spec != other_spec:
            return f"the {name}, which has another structure"
        for own, other in zip(leaves, others, strict=True):
            if own.shape != other.shape or own.dtype != other.dtype:
                return f"the {name}, of {other.dtype} {list(other.shape)}"
            if not _close(own, other, _norm(other), autocast):
                return f"the {name}"
    if not _close(found.loss, expected.loss, abs(float(expected.loss)), autocast):
        return f"the loss, {float(found.loss)} and {float(expected.loss)}"
    norms = {name: 0.0 if g is None else _norm(g) for name, g in expected.grads.items()}
    least = _SMALL * max(norms.values(), default=0.0)
    for name, own in found.grads.items():
        wanted = expected.grads[name]
        if own is None and wanted is None:
            continue
        like = own if own is not None else wanted
        assert like is not None
        own = torch.zeros_like(like) if own is None else own
        wanted = torch.zeros_like(like) if wanted is None else wanted
        if own.shape != wanted.shape or not _close(own, wanted, max(norms[name], least), autocast):
            return f"the gradient of {name}"
    return None


def _close(a: Tensor, b: Tensor, scale: float, autocast: torch.dtype | None) -> bool:
    if not (b.is_floating_point() or b.is_complex()):
        return torch.equal(a, b)
    error = _norm(a - b)
    return error <= _tolerance(b, autocast) * scale or error < 1e-30


def _tolerance(like: Tensor, autocast: torch.dtype | None) -> float:
    dtype = torch.zeros((), dtype=like.dtype).abs().dtype  # of complex numbers: of their parts
    found = _TOLERANCE.get(dtype, 1e-3)
    if like.device.type == "cuda" and dtype == torch.float32:
        found = _TF32  # torch's recurrent layers use it there by default
    return found if autocast is None else max(found, _TOLERANCE.get(autocast, 0.1))


def _norm(tensor: Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor.detach().to(wide)))
