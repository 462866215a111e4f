"""Is it right? Every peer's loss and gradients against the plain loop in float64.

This package must err no more than ``TIMES`` what the eager loop errs in float32, plus ``FLOOR``, or
it gets no speed. Another library that errs more, yet plainly computes the same thing (``SAME``, or
``SAME_TIMES`` the eager loop's error where the problem itself magnifies roundings, as layer norm
does), keeps its speed, and its row is marked: to leave it out would hide a faster peer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ftbptt import reference_segment

from .cases import Case, build, loss

TIMES = 3.0  # a peer may err this much more than the eager loop in float32
FLOOR = 1e-6  # and this much besides: about eight roundings
SAME, SAME_TIMES = 1e-5, 10.0

Errors = dict[str, float]


def exact(case: Case) -> dict[str, Any]:
    """The loss (under the key "loss") and each gradient, from the reference loop in float64."""
    found = []
    for model, state, x, y in build(case, torch.float64).parts():
        result = reference_segment(model, loss, dict(model.named_parameters()), state, x, y)
        found.append(
            {"loss": result.loss.numpy(), **{n: g.numpy() for n, g in result.grads.items()}}
        )
    if not case.apart:
        return found[0]
    return {name: np.stack([part[name] for part in found]) for name in found[0]}


def errors(result: tuple[Any, dict[str, Any]], right: dict[str, Any]) -> Errors:
    """The relative error of the loss and of each gradient, in the norm over all its elements."""
    value, grads = result
    if set(grads) != set(right) - {"loss"}:
        return dict.fromkeys(right, float("inf"))
    found = {}
    for name, wanted in right.items():
        got = np.asarray(value if name == "loss" else grads[name], dtype=np.float64)
        if got.shape != wanted.shape:
            found[name] = float("inf")
            continue
        size = float(np.linalg.norm(wanted))
        error = float(np.linalg.norm(got - wanted)) / (size or 1.0)
        found[name] = error if np.isfinite(error) else float("inf")
    return found


def check(
    case: Case,
    results: dict[str, Any],
    base: str,
    strict: Collection[str],
    rows: dict[str, dict[str, Any]],
) -> None:
    """Writes each peer's worst error into its row; a wrong peer gets the status "wrong".

    ``base`` is the peer whose own error is the measure, ``strict`` are those that must keep to it.
    """
    right = exact(case)
    own = {name: errors(result, right) for name, result in results.items() if result is not None}
    measure = own.get(base, {})
    if not measure or max(measure.values()) > 1e-3:  # the measure itself must be sound
        measure = dict.fromkeys(right, 0.0)
    allowed = {name: TIMES * error + FLOOR for name, error in measure.items()}
    for peer, found in own.items():
        worst = max((error / allowed[name], name) for name, error in found.items())[1]
        row = rows[peer]
        row.update(error=found[worst], error_allowed=allowed[worst], error_at=worst)
        if found[worst] <= allowed[worst]:
            continue
        row["why"] = f"{worst} errs {found[worst]:.1e} where {allowed[worst]:.1e} is allowed"
        same = all(found[n] <= max(SAME, SAME_TIMES * measure[n]) for n in found)
        if peer in strict or not same:
            row["status"] = "wrong"
