"""step + loss + the signature of a call -> Plan: everything that is known without the numbers.

A plan is made once per signature (structure, shapes except for K, dtypes, devices, levels of vmap)
and holds for every K. A backend runs it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from .._compat.tracing import FakeTensorMode
from .._trees import TreeSpec, differentiable, tree_unflatten
from ..contract.step import Step
from .adjoint import LoopPair, StepRoles, make_loops
from .graphs import VIEWS, Node, aten, has_same_code, reachable_from
from .loss import LossTracer
from .rewrites.empty import without_empty_values
from .rewrites.hoist_parameters import Preparation, make_preparation, split_invariants
from .rewrites.reset_mask import with_reset_and_mask
from .rewrites.split_matmul import split_products
from .rewrites.split_state import Packing, split_stacked_state
from .signature import Leaf, Recipe, Signature, vmapped, with_level_axes
from .tracing.constants import Constants
from .tracing.trace import StepGraph, lift_captures, trace_function, trace_step
from .windows import Sliding


@dataclass
class Plan:
    """The loops of a segment, and how the caller's leaves become their inputs.

    Invariants of the loops: ``[*params, *buffers, *captures, *initial, *prepared]``; sequences:
    ``[*x, *reset, *mask]``; carries: the parts of the state.
    """

    signature: Signature
    captures: list[Tensor]
    copied: list[tuple[Tensor, Tensor]]  # a tensor that the step closes over, and its copy
    constants: Constants
    step: fx.GraphModule  # as it was traced
    out_spec: TreeSpec
    packings: list[Packing]
    preparation: Preparation | None
    loops: LoopPair
    loss: LossTracer
    recompute: bool
    sliding: Sliding | None

    @property
    def finish(self) -> fx.GraphModule | None:
        """What gives parameters the gradients of what was prepared from them, if anything does."""
        return None if self.preparation is None else self.preparation.finish

    def of_prepared(self, grads: Sequence[Tensor], inputs: int) -> list[Tensor]:
        """Of the gradients of the trained invariants, those of what was prepared from inputs."""
        pairs = zip(grads, self.loops.trained_invariants, strict=True)
        return [grad for grad, i in pairs if i >= inputs]

    @cached_property
    def params_without_gradient(self) -> list[int]:
        """The parameters that could have a gradient, but that the loss does not depend on."""
        reached = self.loops.reached_invariants
        if self.preparation is not None and self.preparation.finish is not None:
            inputs = len(self.preparation.prepare.graph.find_nodes(op="placeholder"))
            reached |= self.preparation.reached_from({i - inputs for i in reached})
        return [i for i in self._trained_params if i not in reached]

    @cached_property
    def is_detached(self) -> bool:
        """Whether the outputs depend on parameters, none of which has a gradient."""
        trained = self._trained_params
        if self.params_without_gradient != trained:
            return False
        graph = self.step.graph
        params = graph.find_nodes(op="placeholder")
        reached = reachable_from([params[i] for i in trained], graph.nodes)
        return not reached.isdisjoint(graph.output_node().args[0][: self.loops.outs])

    @property
    def _trained_params(self) -> list[int]:
        count = len(self.signature.params)
        return [i for i in self.loops.trained_invariants if i < count]

    def computes_as(self, other: Plan) -> bool:
        """Whether the step and the loss are the same operations on the same tensors outside."""
        same_captures = len(self.captures) == len(other.captures) and all(
            map(operator.is_, self.captures, other.captures)
        )
        return (
            same_captures
            and self.out_spec == other.out_spec
            and has_same_code(self.step, other.step)
            and self.loss.computes_as(other.loss)
        )


@dataclass
class _TracedStep:
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


def make_plan(
    recipe: Recipe, signature: Signature, buffer_names: Sequence[str], steps: int
) -> Plan:
    """make_plan : the caller's functions and options, a call's signature and its K -> Plan

    Calls the step once and the loss a few times, all on fake tensors. The plan holds for every K.
    """
    s = signature
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    constants = Constants(recipe.functions())
    traced = _trace(recipe, s, buffer_names, mode, constants)
    prepare, graph = split_invariants(traced.graph, len(traced.invariants))
    trained = [i for i in range(len(s.params)) if differentiable(traced.examples[i])]
    preparation = None
    if prepare is not None:
        flags = _batched(s, traced.invariants)
        preparation = make_preparation(prepare, s.levels, flags, traced.examples, trained, mode)
    outs = [node.meta["val"] for node in graph.graph.output_node().args[0]][: traced.outs]
    loss = LossTracer(recipe, s, traced.out_spec, outs, steps, constants)
    loops = _make_loops(recipe, s, traced, graph, preparation, trained, loss.with_grad, mode)
    return Plan(
        signature=s,
        captures=traced.captures,
        copied=traced.copied,
        constants=constants,
        step=traced.graph,
        out_spec=traced.out_spec,
        packings=traced.packings,
        preparation=preparation,
        loops=loops,
        loss=loss,
        recompute=recipe.recompute,
        sliding=None if recipe.window is None else Sliding(recipe.window, recipe.stride),
    )


def _trace(
    recipe: Recipe,
    s: Signature,
    buffer_names: Sequence[str],
    mode: FakeTensorMode,
    constants: Constants,
) -> _TracedStep:
    """The step on the parts of its state, with what else is done at every step around it."""
    with mode:
        state = [leaf.example() for leaf in s.state]
    base = _trace_callers_step(recipe.step, s, buffer_names, state, mode, constants)
    row_axes = [recipe.step.row_axis(leaf) for leaf in state]
    n_passed = len(s.params) + len(s.buffers)  # captures follow what the step was called with
    n_fixed = n_passed + len(base.captures)
    # Rows that restart one by one need their axis in one piece.
    by_row = any(leaf is not None and leaf.shape for leaf in (s.reset, s.mask))
    unsplit_axes = row_axes if by_row else [-1] * len(row_axes)
    module, packings = split_stacked_state(base.module, n_fixed + len(s.x), unsplit_axes)
    module = split_products(module, sum(packing.count for packing in packings))
    with mode:
        parts = [
            part
            for leaf, packing in zip(state, packings, strict=True)
            for part in packing.unpack(leaf)
        ]

    captures = _on_device(base, s.x[0].device, n_passed)
    invariants = [*s.params, *s.buffers, *_leaves_of(captures, s), *s.initial]
    sequences = [*s.x, *(leaf for leaf in (s.reset, s.mask) if leaf is not None)]
    step: Any = module
    changes_state = s.initial or s.reset is not None or s.mask is not None
    if changes_state or recipe.step.has_gradient_factors:
        step = with_reset_and_mask(recipe, s, module, packings, row_axes, n_fixed)
    with mode:
        examples = [*(leaf.example() for leaf in (*invariants, *sequences)), *parts]
        if s.shared is not None:
            flags = [leaf.shared for leaf in (*invariants, *sequences)] + [True] * len(parts)
            step = vmapped(step, [s.shared], [flags])
            examples = with_level_axes(examples, [s.shared], [flags])
    graph = module
    if step is not module or any(packing.dim is not None for packing in packings):
        graph = trace_function(step, examples, mode, before_autograd=True, constants=constants)
    graph = without_empty_values(graph)
    late_captures = lift_captures(  # those of initial_state
        "initial_state", graph, after=n_fixed, remedy="Take it from params, or detach it."
    )
    captures += [_materialized(capture) for capture in late_captures]
    late_leaves = _leaves_of(late_captures, s)
    invariants[n_fixed:n_fixed] = late_leaves
    with mode:
        examples[n_fixed:n_fixed] = [leaf.example() for leaf in late_leaves]
    originals = [*base.captures, *late_captures]
    return _TracedStep(
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


def _trace_callers_step(
    step: Step,
    s: Signature,
    buffer_names: Sequence[str],
    state: list[Tensor],
    mode: FakeTensorMode,
    constants: Constants,
) -> StepGraph:
    """The caller's step, as it is called: on the full state."""
    with mode:
        params, buffers, inputs = (
            [leaf.example() for leaf in group] for group in (s.params, s.buffers, s.x)
        )
    return trace_step(
        step,
        mode,
        tree_unflatten(params, s.specs.params),
        dict(zip(buffer_names, buffers, strict=True)),
        tree_unflatten(inputs, s.specs.x),
        tree_unflatten(state, s.specs.state),
        s.autocast,
        constants,
    )


def _make_loops(
    recipe: Recipe,
    s: Signature,
    traced: _TracedStep,
    graph: fx.GraphModule,
    preparation: Preparation | None,
    trained: list[int],
    outs_with_grad: Sequence[bool],
    mode: FakeTensorMode,
) -> LoopPair:
    """The loops of a step from which the preparation was taken out, under the levels of vmap."""
    trained_invariants, batched = list(trained), _batched(s, traced.invariants)
    if preparation is not None:
        first_prepared = len(traced.invariants)
        trained_invariants += [first_prepared + i for i in preparation.with_grad]
        batched = [[*a, *b] for a, b in zip(batched, preparation.batched, strict=True)]
    n_parts = sum(packing.count for packing in traced.packings)
    n_sequences = len(traced.sequences)
    roles = StepRoles(
        invariants=len(graph.graph.find_nodes(op="placeholder")) - n_sequences - n_parts,
        sequences=n_sequences,
        carries=n_parts,
        trained_invariants=trained_invariants,
        trained_sequences=list(range(len(s.x) - recipe.probes, len(s.x))),
        outs_with_grad=[i for i, flag in enumerate(outs_with_grad) if flag],
    )
    batched_sequences = _batched(s, traced.sequences)
    batched = [
        [*a, *b, *([True] * n_parts)] for a, b in zip(batched, batched_sequences, strict=True)
    ]
    return make_loops(graph, roles, s.levels, batched, mode, recompute=recipe.recompute)


def _batched(s: Signature, leaves: Sequence[Leaf]) -> list[list[bool]]:
    """For each level of vmap, whether each leaf has its axis."""
    return [[leaf.batched[i] for leaf in leaves] for i in range(len(s.levels))]


def _leaves_of(captures: Sequence[Tensor], s: Signature) -> list[Leaf]:
    """The leaves of captured tensors, which have no axis of a vmap."""
    unbatched = (False,) * len(s.levels)
    return [Leaf(tuple(t.shape), t.dtype, t.device, unbatched) for t in captures]


def _materialized(tensor: Tensor) -> Tensor:
    """The tensor with pending conjugations and negations computed."""
    return tensor.resolve_conj().resolve_neg()


def _on_device(base: StepGraph, device: torch.device, first_capture: int) -> list[Tensor]:
    """The step's captures; those that it only moves to ``device`` at every step are moved now.

    A copy from pageable memory waits for the GPU, which is not allowed in a CUDA graph. And so are
    single numbers, which torch takes from the CPU beside tensors of any device: a kernel does not.
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
        _materialized(capture.to(device) if not capture.dim() or only_moved(node) else capture)
        for capture, node in zip(base.captures, nodes, strict=False)
    ]
