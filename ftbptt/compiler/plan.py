"""step + loss + the signature of a call -> Plan: all that is known before any number is.

A plan is made once per signature (structure, shapes but for K, dtypes, devices, levels of vmap)
and holds for every K. It is what ``explain`` prints and what a backend runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._compat import FakeTensorMode
from .._step import Step
from .._trees import TreeSpec, tree_unflatten
from .adjoint import Loop, LoopPair, make_loops
from .distribute import DistributedLoop, distribute
from .empty import without_empty_values
from .graphs import VIEWS, Node, aten
from .hoist_parameters import Preparation, make_preparation, split_invariants
from .loss import LossTracer
from .reset_mask import with_reset_and_mask
from .signature import Leaf, Recipe, Signature, differentiable, vmapped, with_level_axes
from .split_matmul import split_products
from .split_state import Packing, split_stacked_state
from .trace import StepGraph, lift_captures, trace_function, trace_step
from .windows import Sliding


@dataclass
class Plan:
    """The blocks of a segment's loops, and how the caller's leaves become their inputs.

    Invariants of the loops: ``[*params, *buffers, *captures, *initial, *prepared]``; sequences:
    ``[*x, *reset, *mask]``; carries: the parts of the state.
    """

    signature: Signature
    captures: list[Tensor]
    copied: list[tuple[Tensor, Tensor]]  # what the step closes over, and the capture in its place
    out_spec: TreeSpec
    packings: list[Packing]
    preparation: Preparation | None
    loops: LoopPair
    forward: DistributedLoop
    evaluate: DistributedLoop
    reverse: DistributedLoop
    loss: LossTracer
    recompute: bool
    sliding: Sliding | None


@dataclass
class _Traced:
    """One step as ``graph``: ``(*given, *sequences, *parts of the state) -> [*outs, *parts]``.

    With resets and masks, and the axis that all rows share; without the levels of vmap.
    """

    graph: fx.GraphModule
    given: list[Leaf]  # parameters, buffers, captures, initial state
    sequences: list[Leaf]
    examples: list[Tensor]  # like the given
    captures: list[Tensor]
    copied: list[tuple[Tensor, Tensor]]
    packings: list[Packing]
    out_spec: TreeSpec
    outs: int


def make_plan(
    recipe: Recipe, signature: Signature, buffer_names: Sequence[str], steps: int
) -> Plan:
    """make_plan : what was asked for, what it is called with, and the K of that call -> Plan

    Calls the caller's step once, the loss a few times, all on fake tensors. The plan holds for
    every K.
    """
    s = signature
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    traced = _trace(recipe, s, buffer_names, mode)
    prepare, graph = split_invariants(traced.graph, len(traced.given))
    trained = [i for i in range(len(s.params)) if differentiable(traced.examples[i])]
    preparation = None
    if prepare is not None:
        flags = _batched(s, traced.given)
        preparation = make_preparation(prepare, s.levels, flags, traced.examples, trained, mode)
    outs = [node.meta["val"] for node in graph.graph.output_node().args[0]][: traced.outs]
    loss = LossTracer(recipe, s, traced.out_spec, outs, steps)
    loops = _loops(recipe, s, traced, graph, preparation, trained, loss.graded, mode)
    full = loops.forward
    evaluate = Loop(
        full.graph, full.invariants, full.sequences, full.carries, full.next_carries,
        full.stacked[: traced.outs], [], reverse=False,
    )  # fmt: skip
    return Plan(
        signature=s,
        captures=traced.captures,
        copied=traced.copied,
        out_spec=traced.out_spec,
        packings=traced.packings,
        preparation=preparation,
        loops=loops,
        forward=distribute(full),
        evaluate=distribute(evaluate),
        reverse=distribute(loops.reverse),
        loss=loss,
        recompute=recipe.recompute,
        sliding=None if recipe.window is None else Sliding(recipe.window, recipe.stride),
    )


def _trace(
    recipe: Recipe, s: Signature, buffer_names: Sequence[str], mode: FakeTensorMode
) -> _Traced:
    """The caller's step, the state in its parts, and around it what else is done at every step."""
    with mode:
        state = [leaf.example() for leaf in s.state]
    base = _trace_alone(recipe.step, s, buffer_names, state, mode)
    row_axes = [recipe.step.row_axis(leaf) for leaf in state]
    n_own = len(s.params) + len(s.buffers)
    n_fixed = n_own + len(base.captures)
    by_row = any(leaf is not None and leaf.shape for leaf in (s.reset, s.mask))
    never = row_axes if by_row else [-1] * len(row_axes)
    module, packings = split_stacked_state(base.module, n_fixed + len(s.x), never)
    module = split_products(module, sum(packing.count for packing in packings))
    with mode:
        parts = [p for leaf, how in zip(state, packings, strict=True) for p in how.unpack(leaf)]

    captures = _on_device(base, s.x[0].device, n_own)
    given = [*s.params, *s.buffers, *_leaves_of(captures, s), *s.initial]
    sequences = [*s.x, *(leaf for leaf in (s.reset, s.mask) if leaf is not None)]
    stepped: Any = module
    changes_state = s.initial or s.reset is not None or s.mask is not None
    if changes_state or recipe.step.has_gradient_factors:
        stepped = with_reset_and_mask(recipe, s, module, packings, row_axes, n_fixed)
    with mode:
        examples = [*(leaf.example() for leaf in (*given, *sequences)), *parts]
        if s.shared is not None:
            flags = [leaf.shared for leaf in (*given, *sequences)] + [True] * len(parts)
            stepped = vmapped(stepped, [s.shared], [flags])
            examples = with_level_axes(examples, [s.shared], [flags])
    graph = module
    if stepped is not module or any(packing.dim is not None for packing in packings):
        graph = trace_function(stepped, examples, mode, before_autograd=True)
    graph = without_empty_values(graph)
    more = lift_captures(
        "initial_state", graph, after=n_fixed, remedy="Take it from params, or detach it."
    )
    captures += [_in_memory(capture) for capture in more]
    given[n_fixed:n_fixed] = _leaves_of(more, s)
    with mode:
        examples[n_fixed:n_fixed] = [leaf.example() for leaf in _leaves_of(more, s)]
    closed_over = [*base.captures, *more]
    return _Traced(
        graph=graph,
        given=given,
        sequences=sequences,
        examples=examples[: len(given)],
        captures=captures,
        copied=[(a, b) for a, b in zip(closed_over, captures, strict=True) if a is not b],
        packings=packings,
        out_spec=base.out_spec,
        outs=base.outs,
    )


def _trace_alone(
    step: Step, s: Signature, buffer_names: Sequence[str], state: list[Tensor], mode: FakeTensorMode
) -> StepGraph:
    """The caller's step as it is written."""
    with mode:
        params, buffers, inputs = (
            [leaf.example() for leaf in group] for group in (s.params, s.buffers, s.x)
        )
    return trace_step(
        step,
        mode,
        tree_unflatten(params, s.specs[0]),
        dict(zip(buffer_names, buffers, strict=True)),
        tree_unflatten(inputs, s.specs[2]),
        tree_unflatten(state, s.specs[1]),
        s.autocast,
    )


def _loops(
    recipe: Recipe,
    s: Signature,
    traced: _Traced,
    graph: fx.GraphModule,
    preparation: Preparation | None,
    trained: list[int],
    graded: Sequence[bool],
    mode: FakeTensorMode,
) -> LoopPair:
    """The loops of a step of which the preparation has been taken out, under the levels of vmap."""
    trained_invariants, batched = list(trained), _batched(s, traced.given)
    if preparation is not None:
        trained_invariants += [len(traced.given) + i for i in preparation.graded]
        batched = [[*a, *b] for a, b in zip(batched, preparation.batched, strict=True)]
    n_parts, n_sequences = sum(how.count for how in traced.packings), len(traced.sequences)
    n_invariants = len(graph.graph.find_nodes(op="placeholder")) - n_sequences - n_parts
    of_sequences = _batched(s, traced.sequences)
    return make_loops(
        graph,
        (n_invariants, n_sequences, n_parts),
        graded,
        trained_invariants,
        range(len(s.x) - recipe.probes, len(s.x)),
        s.levels,
        [[*a, *b, *([True] * n_parts)] for a, b in zip(batched, of_sequences, strict=True)],
        mode,
        recompute=recipe.recompute,
    )


def _batched(s: Signature, leaves: Sequence[Leaf]) -> list[list[bool]]:
    """For each level of vmap, which of the leaves have its axis."""
    return [[leaf.batched[i] for leaf in leaves] for i in range(len(s.levels))]


def _leaves_of(captures: Sequence[Tensor], s: Signature) -> list[Leaf]:
    """What a step closes over has the axis of no level."""
    unbatched = (False,) * len(s.levels)
    return [Leaf(tuple(t.shape), t.dtype, t.device, unbatched) for t in captures]


def _in_memory(tensor: Tensor) -> Tensor:
    """The tensor, without what torch has put off."""
    return tensor.resolve_conj().resolve_neg()


def _on_device(base: StepGraph, device: torch.device, first: int) -> list[Tensor]:
    """What the step closes over, on the device that it moves it to in every step anyway.

    A copy from pageable memory waits for a GPU, which nothing in a CUDA graph may.
    """
    nodes = base.module.graph.find_nodes(op="placeholder")[first:]

    def only_moved(node: Node) -> bool:
        return all(
            user.kwargs.get("device") == device
            if user.target is aten._to_copy.default
            else user.target in VIEWS and only_moved(user)
            for user in node.users
        )

    return [
        _in_memory(capture.to(device) if only_moved(node) else capture)
        for capture, node in zip(base.captures, nodes, strict=False)
    ]
