"""The caller's step -> a graph of what one step of a segment does, with the types of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._compat.tracing import FakeTensorMode
from .._trees import TreeSpec
from .graphs import VIEWS, Node, aten
from .rewrites.columns import carry_rows
from .rewrites.empty import without_empty_values
from .rewrites.reset_mask import with_reset_and_mask
from .rewrites.shared_matrix import multiply_matrix_of_each_row
from .rewrites.split_products import split_products
from .rewrites.split_state import Packing, split_stacked_state
from .rewrites.weights_second import put_weights_second
from .signature import Leaf, Recipe, Signature, vmapped, with_level_axes
from .tracing.captures import lift_captures, materialized
from .tracing.constants import Constants
from .tracing.effects import without_effects
from .tracing.errors import explain_trace_errors
from .tracing.trace import StepGraph, trace_function, trace_step


@dataclass
class TracedStep:
    """One step, ``graph(*invariants, *sequences, *parts of the state) -> [*outs, *parts]``.

    With resets and masks, and the batch axis of ``in_dims``; without the levels of vmap.
    """

    graph: fx.GraphModule
    invariants: list[Leaf]  # parameters, buffers, captures, initial state
    sequences: list[Leaf]
    examples: list[Tensor]  # of the invariants
    captures: list[Tensor]
    copied: list[tuple[Tensor, Tensor]]
    packings: list[Packing]
    out_spec: TreeSpec
    outs: int


def trace_segment_step(
    recipe: Recipe,
    s: Signature,
    buffer_names: Sequence[str],
    mode: FakeTensorMode,
    constants: Constants,
) -> TracedStep:
    """The step on the parts of its state, with what else is done at every step around it."""
    with mode:
        state = [leaf.example() for leaf in s.state]
    base = trace_step(recipe.step, s, buffer_names, mode, constants)
    n_passed = len(s.params) + len(s.buffers)  # captures follow what the step was called with
    n_fixed = n_passed + len(base.captures)
    row_axes = [recipe.step.row_axis(leaf) for leaf in state]
    module, packings = _on_parts(base.module, s, row_axes, n_fixed)
    with mode:
        parts = [
            part
            for leaf, packing in zip(state, packings, strict=True)
            for part in packing.unpack(leaf)
        ]
    captures = _on_device(base, s.x[0].device, n_passed)
    invariants = [*s.params, *s.buffers, *_leaves_of(captures, s), *s.initial]
    sequences = [*s.x, *(leaf for leaf in (s.reset, s.mask) if leaf is not None)]
    with mode:
        examples = [*(leaf.example() for leaf in (*invariants, *sequences)), *parts]

    step: Any = module
    changes_state = s.initial or s.reset is not None or s.mask is not None
    if changes_state or recipe.step.has_gradient_factors:
        step = with_reset_and_mask(recipe, s, module, packings, row_axes, n_fixed)
    if s.mean_axis is not None:
        flags = [leaf.has_mean_axis for leaf in (*invariants, *sequences)] + [True] * len(parts)
        step = vmapped(step, [s.mean_axis], [flags])
        with mode:
            examples = with_level_axes(examples, [s.mean_axis], [flags])
    graph = module
    if step is not module or any(packing.dim is not None for packing in packings):
        graph = _trace_with_start(step, recipe.initial_state, examples, mode, constants)
    graph = without_empty_values(graph)

    late_captures = lift_captures(  # those of initial_state
        "initial_state", graph, after=n_fixed, remedy="Take it from params, or detach it."
    )
    captures += [materialized(capture, capture.device) for capture in late_captures]
    late_leaves = _leaves_of(late_captures, s)
    invariants[n_fixed:n_fixed] = late_leaves
    with mode:
        examples[n_fixed:n_fixed] = [leaf.example() for leaf in late_leaves]
    originals = [*base.captures, *late_captures]
    return TracedStep(
        graph=graph,
        invariants=invariants,
        sequences=sequences,
        examples=examples[: len(invariants)],
        captures=captures,
        copied=[(a, b) for a, b in zip(originals, captures, strict=True) if a is not b],
        packings=packings,
        out_spec=base.out_spec,
        outs=base.outs,
    )


def _trace_with_start(
    step: Any, start: Any, examples: Sequence[Tensor], mode: FakeTensorMode, constants: Constants
) -> fx.GraphModule:
    """The graph of a step that restarts from ``start``, the caller's initial state."""

    def traced() -> fx.GraphModule:
        with explain_trace_errors("initial_state", start) if callable(start) else nullcontext():
            return trace_function(step, examples, mode, before_autograd=True, constants=constants)

    if not callable(start):
        return traced()
    return without_effects(
        "initial_state", start, traced, "compute such a value before, and close over it.", constants
    )


def _on_parts(
    module: fx.GraphModule, s: Signature, row_axes: Sequence[int], n_fixed: int
) -> tuple[fx.GraphModule, list[Packing]]:
    """The step on the parts that it uses of each state one by one, such as layers."""
    # Rows that restart one by one need their axis in one piece.
    by_row = any(leaf is not None and leaf.shape for leaf in (s.reset, s.mask))
    unsplit_axes = row_axes if by_row else [-1] * len(row_axes)
    first_state = n_fixed + len(s.x)
    module, packings = split_stacked_state(module, first_state, unsplit_axes)
    multiply_matrix_of_each_row(module.graph, n_fixed, first_state)
    columns = put_weights_second(module.graph, n_fixed)
    packings = carry_rows(module.graph, first_state, packings, columns)
    return split_products(module, sum(packing.count for packing in packings)), packings


def _leaves_of(captures: Sequence[Tensor], s: Signature) -> list[Leaf]:
    """The leaves of captured tensors, which have no axis of a vmap."""
    unbatched = (False,) * len(s.levels)
    return [Leaf(tuple(t.shape), t.dtype, t.device, unbatched) for t in captures]


def _on_device(base: StepGraph, device: torch.device, first_capture: int) -> list[Tensor]:
    """The step's captures; those that it only moves to ``device`` at every step are moved now.

    A copy from pageable memory waits for the GPU, which is not allowed in a CUDA graph.
    """
    nodes = base.module.graph.find_nodes(op="placeholder")[first_capture:]

    def only_moved(node: Node) -> bool:
        return all(
            user.kwargs.get("device") == device
            if user.target is aten._to_copy.default
            else user.target in VIEWS and only_moved(user)
            for user in node.users
        )

    return [
        materialized(capture.to(device) if only_moved(node) else capture, device)
        for capture, node in zip(base.captures, nodes, strict=False)
    ]
