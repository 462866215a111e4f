"""step + loss + the signature of a call -> Plan: all that is known before any number is.

A plan is made once per signature (structure, shapes but for K, dtypes, devices, levels of vmap)
and holds for every K. It is what ``explain`` prints and what a backend runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._compat import FakeTensorMode
from .._trees import TreeSpec, tree_unflatten
from .adjoint import Loop, LoopPair, make_loops
from .distribute import DistributedLoop, distribute
from .empty import without_empty_values
from .graphs import VIEWS, Node, aten
from .loss import LossTracer
from .prepare import Preparation, make_preparation, split_invariants
from .restart import with_reset_and_mask
from .signature import Leaf, Recipe, Signature, differentiable, vmapped, with_level_axes
from .split import split_products
from .stacked import Packing, split_stacked_state
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


def make_plan(
    recipe: Recipe, signature: Signature, buffer_names: Sequence[str], steps: int
) -> Plan:
    """make_plan : what was asked for, what it is called with, and the K of that call -> Plan

    Calls the caller's step once, the loss a few times, all on fake tensors. The plan holds for
    every K.
    """
    s, step = signature, recipe.step
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        params, buffers, state, inputs = (
            [leaf.example() for leaf in group] for group in (s.params, s.buffers, s.state, s.x)
        )
    base = trace_step(
        step,
        mode,
        tree_unflatten(params, s.specs[0]),
        dict(zip(buffer_names, buffers, strict=True)),
        tree_unflatten(inputs, s.specs[2]),
        tree_unflatten(state, s.specs[1]),
        s.autocast,
    )
    row_axes = [step.row_axis(leaf) for leaf in state]
    n_fixed = len(params) + len(buffers) + len(base.captures)
    by_row = any(leaf is not None and leaf.shape for leaf in (s.reset, s.mask))
    never = row_axes if by_row else [-1] * len(row_axes)
    module, packings = split_stacked_state(base.module, n_fixed + len(inputs), never)
    module = split_products(module, sum(packing.count for packing in packings))

    unbatched = (False,) * len(s.levels)
    captures = _on_device(base, s.x[0].device, len(params) + len(buffers))

    def leaf_of(capture: Tensor) -> Leaf:
        return Leaf(tuple(capture.shape), capture.dtype, capture.device, unbatched)

    given = [*s.params, *s.buffers, *map(leaf_of, captures), *s.initial]
    sequences = [*s.x, *(leaf for leaf in (s.reset, s.mask) if leaf is not None)]
    stepped: Any = module
    if s.initial or s.reset is not None or s.mask is not None:
        stepped = with_reset_and_mask(recipe, s, module, packings, row_axes, n_fixed)
    with mode:
        parts = [p for leaf, how in zip(state, packings, strict=True) for p in how.unpack(leaf)]
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
    closed_over = [*base.captures, *more]
    given[n_fixed:n_fixed] = map(leaf_of, more)
    with mode:
        examples[n_fixed:n_fixed] = [leaf_of(capture).example() for capture in more]
    prepare, graph = split_invariants(graph, len(given))

    levels = range(len(s.levels))
    batched = [[leaf.batched[i] for leaf in given] for i in levels]
    trained = [i for i in range(len(params)) if differentiable(params[i])]
    trained_invariants = list(trained)
    preparation = None
    if prepare is not None:
        preparation = make_preparation(
            prepare, s.levels, batched, examples[: len(given)], trained, mode
        )
        trained_invariants += [len(given) + i for i in preparation.graded]
        batched = [[*a, *b] for a, b in zip(batched, preparation.batched, strict=True)]
    outs = [node.meta["val"] for node in graph.graph.output_node().args[0]][: base.outs]
    loss = LossTracer(recipe, s, base.out_spec, outs, steps)
    n_invariants = len(graph.graph.find_nodes(op="placeholder")) - len(sequences) - len(parts)
    loops = make_loops(
        graph,
        (n_invariants, len(sequences), len(parts)),
        loss.graded,
        trained_invariants,
        range(len(s.x) - recipe.probes, len(s.x)),
        s.levels,
        [
            [*batched[i], *(leaf.batched[i] for leaf in sequences), *([True] * len(parts))]
            for i in levels
        ],
        mode,
        recompute=recipe.recompute,
    )
    full = loops.forward
    evaluate = Loop(
        full.graph, full.invariants, full.sequences, full.carries, full.next_carries,
        full.stacked[: base.outs], [], reverse=False,
    )  # fmt: skip
    return Plan(
        signature=s,
        captures=captures,
        copied=[(a, b) for a, b in zip(closed_over, captures, strict=True) if a is not b],
        out_spec=base.out_spec,
        packings=packings,
        preparation=preparation,
        loops=loops,
        forward=distribute(full),
        evaluate=distribute(evaluate),
        reverse=distribute(loops.reverse),
        loss=loss,
        recompute=recipe.recompute,
        sliding=None if recipe.window is None else Sliding(recipe.window, recipe.stride),
    )


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
