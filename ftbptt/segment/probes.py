"""The zeros that are added to tapped tensors: inputs of a step whose gradient is the tensor's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._compat.tracing import FakeTensorMode
from .._trees import tree_flatten, tree_unflatten
from ..compiler.signature import without_autocast
from ..compiler.tracing.constants import Constants
from ..compiler.tracing.trace import TRACING, trace_step
from ..contract.step import Step
from ..contract.taps import Tap
from .call import Call, without_inference_mode


def find_taps(
    step: Step, call: Call, tensors: Sequence[Tensor], constants: Constants
) -> dict[str, Tensor]:
    """What the step of such a call taps, as fake tensors of one step.

    Traces the step, and raises what that does; ``constants`` gets what it reads.
    """
    call, tensors = with_probes(call, tensors, {})
    s, mode = call.signature(tensors), FakeTensorMode(allow_non_fake_inputs=True)
    with TRACING, without_autocast(s.autocast), without_inference_mode():
        traced = trace_step(step, s, call.buffer_names, mode, constants)
    outs = traced.module.graph.output_node().args[0][: traced.outs]
    _, tapped = tree_unflatten([node.meta["val"] for node in outs], traced.out_spec)
    return tapped


def with_probes(
    call: Call, tensors: Sequence[Tensor], tapped: dict[str, Tensor]
) -> tuple[Call, list[Tensor]]:
    """A call of a step that taps, with the probes after its inputs: ``x`` is ``(x, probes)``."""
    counts = call.counts
    first = sum(counts[: counts._fields.index("y")])  # the place after the leaves of x
    steps, device = tensors[first - 1].shape[0], tensors[first - 1].device
    sizes = [] if call.mean_axis is None else [call.mean_axis.size]  # each sequence has its own
    zeros = [
        torch.zeros((), dtype=t.dtype, device=device).expand(steps, *sizes, *t.shape)
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
        mean_axis_flags=(
            *call.mean_axis_flags[:first],
            *[bool(sizes)] * n,
            *call.mean_axis_flags[first:],
        ),
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
