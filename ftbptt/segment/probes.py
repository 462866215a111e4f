"""The zeros that are added to tapped tensors: inputs of a step whose gradient is the tensor's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._compat.tracing import FakeTensorMode, unseen_by_tools, unvalidated_distributions
from .._trees import tree_flatten, tree_unflatten
from ..compiler.tracing.effects import without_step_effects
from ..compiler.tracing.errors import explain_trace_errors
from ..compiler.tracing.function_overrides import FunctionOverrides
from ..compiler.tracing.trace import TRACING
from ..contract.step import Step
from ..contract.taps import Tap
from .call import Call


def find_taps(step: Step, call: Call, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """What the step of such a call taps, as fake tensors of one step. Runs one on fake tensors."""
    shapes = call.groups(list(zip(call.shapes, tensors, strict=True)))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        params, buffers, state, x = (
            [torch.empty(shape, dtype=t.dtype, device=t.device) for shape, t in shapes[name]]
            for name in ("params", "buffers", "state", "x")
        )

    def run() -> dict[str, Tensor]:
        validated = unvalidated_distributions()
        with (
            unseen_by_tools(),
            mode,
            validated,
            FunctionOverrides("step"),
            explain_trace_errors("step", step),
        ):
            (_, tapped), _ = step.apply(
                tree_unflatten(params, call.specs.params),
                dict(zip(call.buffer_names, buffers, strict=True)),
                (tree_unflatten(x, call.specs.x), {}),
                tree_unflatten(state, call.specs.state),
            )
        return tapped

    with TRACING:
        return without_step_effects(step, run)


def with_probes(
    call: Call, tensors: Sequence[Tensor], tapped: dict[str, Tensor]
) -> tuple[Call, list[Tensor]]:
    """A call of a step that taps, with the probes after its inputs: ``x`` is ``(x, probes)``."""
    counts = call.counts
    first = sum(counts[: counts._fields.index("y")])  # the place after the leaves of x
    steps, device = tensors[first - 1].shape[0], tensors[first - 1].device
    shared = [] if call.shared is None else [call.shared.size]  # each sequence has its own
    zeros = [
        torch.zeros((), dtype=t.dtype, device=device).expand(steps, *shared, *t.shape)
        for t in tapped.values()
    ]
    x_tree = tree_unflatten([0] * counts.x, call.specs.x)
    spec = tree_flatten((x_tree, dict.fromkeys(tapped, 0)))[1]
    n = len(zeros)
    call = replace(
        call,
        specs=call.specs._replace(x=spec),
        counts=counts._replace(x=counts.x + n),
        shapes=(*call.shapes[:first], *(t.shape for t in tapped.values()), *call.shapes[first:]),
        shared_flags=(*call.shared_flags[:first], *[bool(shared)] * n, *call.shared_flags[first:]),
        probes=n,
    )
    return call, [*tensors[:first], *zeros, *tensors[first:]]


def taps_of(values: dict[str, Tensor], grads: Sequence[Tensor], mapped: bool) -> dict[str, Tap]:
    """What was tapped, by name; ``grads`` is empty where no gradient was asked for.

    ``mapped``: by vmap, which returns nothing but tensors.
    """
    none: Any = () if mapped else None
    all_grads = grads or [none] * len(values)
    return {
        name: Tap(value, grad)
        for (name, value), grad in zip(values.items(), all_grads, strict=True)
    }
