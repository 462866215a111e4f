"""step + loss + the signature of a call -> Plan: everything that is known without the numbers.

A plan is made once per signature (structure, shapes except for K, dtypes, devices, levels of vmap)
and holds for every K. A backend runs it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from torch import Tensor, fx

from .._compat.tracing import UNTRACEABLE, FakeTensorMode
from .._trees import TreeSpec, differentiable
from .adjoint import LoopPair, StepRoles, make_loops
from .flat_loss import FlatLoss
from .graphs import has_same_code, reachable_from
from .loss import SegmentLoss
from .rewrites.hoist_parameters import Preparation, make_preparation, split_invariants
from .rewrites.split_state import Packing
from .signature import Recipe, Signature
from .sliding_window import Sliding
from .traced_step import TracedStep, trace_segment_step
from .tracing.constants import Constants
from .tracing.effects import FROM_LOSS_TO_STEP, FROM_STEP_TO_LOSS, forbid_naming_places
from .written_loss import WrittenLoss


@dataclass
class Plan:
    """The loops of a segment, and how the caller's leaves become their inputs.

    Invariants of the loops: ``[*params, *buffers, *captures, *initial, *prepared]``; sequences:
    ``[*x, *reset, *mask]``; carries: the parts of the state.
    """

    signature: Signature
    captures: list[Tensor]
    # Tensors that the step closes over, and the copies of them that it reads instead.
    copied: list[tuple[Tensor, Tensor]]
    constants: Constants
    step: fx.GraphModule  # as it was traced
    out_spec: TreeSpec
    packings: list[Packing]
    preparation: Preparation | None
    loops: LoopPair
    loss: SegmentLoss | WrittenLoss
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
    def kept_state(self) -> list[int]:
        """The leaves of the state that steps return as they are."""
        loop, kept = self.loops.forward, []
        is_kept = map(operator.is_, loop.next_carries, loop.carries)
        for i, packing in enumerate(self.packings):
            if all(list(islice(is_kept, packing.count))):
                kept.append(i)
        return kept

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
            and has_same_code(self.step.graph, other.step.graph)
            # The backward of an autograd.Function is traced there only.
            and has_same_code(self.loops.reverse.graph, other.loops.reverse.graph)
            and self.loss.computes_as(other.loss)
        )


def make_plan(
    recipe: Recipe, signature: Signature, buffer_names: Sequence[str], steps: int
) -> Plan:
    """make_plan : the caller's functions and options, a call's signature and its K -> Plan

    Calls the step once and the loss a few times, all on fake tensors. The plan holds for every K.
    """
    s = signature
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    constants = Constants(recipe.traced_functions(), given=recipe.step.module)
    traced = trace_segment_step(recipe, s, buffer_names, mode, constants)
    prepare, graph = split_invariants(traced.graph, len(traced.invariants))
    trained = [i for i in range(len(s.params)) if differentiable(traced.examples[i])]
    preparation = None
    if prepare is not None:
        flags = s.flags(traced.invariants)
        preparation = make_preparation(prepare, s.levels, flags, traced.examples, trained, mode)
    outs = [node.meta["val"] for node in graph.graph.output_node().args[0]][: traced.outs]
    loss: SegmentLoss | WrittenLoss
    flat_loss = FlatLoss(recipe, s, traced.out_spec, outs)
    by_step = [*constants.assigned]
    if recipe.traces_loss:
        loss = SegmentLoss(flat_loss, steps, constants)
        by_loss = constants.assigned[len(by_step) :]
        forbid_naming_places("step", recipe.step.root, by_loss, "loss", FROM_LOSS_TO_STEP)
    else:
        loss = WrittenLoss(flat_loss)
        forbid_naming_places("loss", recipe.loss, by_step, "step", FROM_STEP_TO_LOSS)
    try:
        loops = _make_loops(recipe, s, traced, graph, preparation, trained, loss.with_grad, mode)
    except UNTRACEABLE as error:
        raise RuntimeError(
            f"step {recipe.step.name} cannot be compiled: the gradient of one of its operations "
            'depends on the values of a tensor, as that of scatter_reduce(reduce="prod") does. '
            "Write it with other operations; reference_segment runs it unchanged."
        ) from error
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


def _make_loops(
    recipe: Recipe,
    s: Signature,
    traced: TracedStep,
    graph: fx.GraphModule,
    preparation: Preparation | None,
    trained: list[int],
    outs_with_grad: Sequence[bool],
    mode: FakeTensorMode,
) -> LoopPair:
    """The loops of a step from which the preparation was taken out, under the levels of vmap."""
    trained_invariants, batched = list(trained), s.flags(traced.invariants)
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
    batched_sequences = s.flags(traced.sequences)
    batched = [
        [*a, *b, *([True] * n_parts)] for a, b in zip(batched, batched_sequences, strict=True)
    ]
    return make_loops(graph, roles, s.levels, batched, mode, recompute=recipe.recompute)
