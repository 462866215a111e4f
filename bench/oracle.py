"""Checks every peer's loss and gradients against the plain loop in float64.

This package's error may be at most ``TIMES`` the eager loop's in the case's dtype, plus
``ROUNDINGS``; otherwise it is not timed. Another library with a larger error that still computes
the same function (error below ``SAME``, or ``SAME_TIMES`` the eager loop's where the problem
amplifies rounding, as layer norm does) is timed, and its row is marked: leaving it out would hide a
faster peer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ftbptt import reference_segment

from .cases import Case, build, loss

TIMES = 3.0  # the error allowed, relative to the eager loop's in the case's dtype
ROUNDINGS = 8  # plus so many
SAME, SAME_TIMES = 1e-5, 10.0

Errors = dict[str, float]


def exact(case: Case) -> dict[str, Any]:
    """The loss (under the key "loss") and each gradient, from the reference loop in float64."""
    parts = []
    for model, state, x, y in build(case, torch.float64).parts():
        result = reference_segment(model, loss, dict(model.named_parameters()), state, x, y)
        parts.append(
            {"loss": result.loss.numpy(), **{n: g.numpy() for n, g in result.grads.items()}}
        )
    if not case.apart:
        return parts[0]
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def errors(result: tuple[Any, dict[str, Any]], expected: dict[str, Any]) -> Errors:
    """The relative error of the loss and of each gradient, in the norm over all its elements."""
    value, grads = result
    if set(grads) != set(expected) - {"loss"}:
        return dict.fromkeys(expected, float("inf"))
    relative = {}
    for name, exact_leaf in expected.items():
        leaf = np.asarray(value if name == "loss" else grads[name], dtype=np.float64)
        if leaf.shape != exact_leaf.shape:
            relative[name] = float("inf")
            continue
        size = float(np.linalg.norm(exact_leaf))
        error = float(np.linalg.norm(leaf - exact_leaf)) / (size or 1.0)
        relative[name] = error if np.isfinite(error) else float("inf")
    return relative


def check(
    case: Case,
    results: dict[str, Any],
    base: str,
    strict: Collection[str],
    rows: dict[str, dict[str, Any]],
) -> None:
    """Writes each peer's worst error into its row; a wrong peer gets the status "wrong".

    ``base``: the peer whose error sets the tolerance. ``strict``: peers that must keep within it.
    """
    expected = exact(case)
    errors_of = {
        name: errors(result, expected) for name, result in results.items() if result is not None
    }
    baseline = errors_of.get(base, {})
    eps = torch.finfo(case.dtype).eps
    if not baseline or max(baseline.values()) > 2.5 * eps**0.5:  # the baseline itself must be sound
        baseline = dict.fromkeys(expected, 0.0)
    allowed = {name: TIMES * error + ROUNDINGS * eps for name, error in baseline.items()}
    for peer, peer_errors in errors_of.items():
        worst = max((error / allowed[name], name) for name, error in peer_errors.items())[1]
        row = rows[peer]
        row.update(error=peer_errors[worst], error_allowed=allowed[worst], error_at=worst)
        if peer_errors[worst] <= allowed[worst]:
            continue
        row["why"] = f"{worst} errs {peer_errors[worst]:.1e} where {allowed[worst]:.1e} is allowed"
        same = all(peer_errors[n] <= max(SAME, SAME_TIMES * baseline[n]) for n in peer_errors)
        if peer in strict or not same:
            row["status"] = "wrong"
