"""StepGraph -> the forward loop and its adjoint, the reverse loop, both as graphs of one step.

The gradient of a loop is a loop that runs the other way, with d(state) as its carry and the
gradients of the parameters as sums over its steps (Werbos 1990). One step of it is the
vector-Jacobian product of the forward step, traced once. What it reads of the forward step is
saved or recomputed (``min_cut``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor, fx

from .._compat.tracing import FakeTensorMode
from .._trees import differentiable, in_groups
from .graphs import (
    Node,
    aten,
    inputs_of,
    needed_for,
    reachable_from,
    skip_identities,
    value_of,
    varying_with,
    vjp_by,
)
from .min_cut import values_to_save
from .rewrites.shared_cat import share_joins
from .rewrites.weights_second import put_weights_second_in_gradients
from .signature import Level, vmapped, with_level_axes
from .time_axis.convolution import split_gradients
from .tracing.captures import numbers_as_nodes
from .tracing.trace import trace_function


@dataclass
class Loop:
    """One step of a loop, as a graph whose nodes have a role.

    ``carries[i]`` becomes ``next_carries[i]``; ``stacked`` values are results at every step,
    ``summed`` values as their sum over the steps.
    """

    graph: fx.Graph
    invariants: list[Node]
    sequences: list[Node]
    carries: list[Node]
    next_carries: list[Node]
    stacked: list[Node]
    summed: list[Node]
    reverse: bool


@dataclass
class LoopPair:
    """The two loops of a segment and what passes between them.

    The reverse loop's sequences are: the forward loop's sequences, the saved values, the
    gradients of the outputs. A saved value that is a carry of the forward loop is the state
    before each step.
    """

    forward: Loop
    reverse: Loop
    outs: int
    saved: list[Node]
    trained_invariants: list[int]
    trained_carries: list[int]

    @property
    def evaluate(self) -> Loop:
        """The forward loop without the values that are saved for the reverse loop."""
        return replace(self.forward, stacked=self.forward.stacked[: self.outs])

    def zero_gradients(self, device: torch.device) -> list[Tensor]:
        """The gradient of the state after the last step: zero, since the segment is cut there."""
        values = map(value_of, self.reverse.carries)
        return [torch.zeros(value.shape, dtype=value.dtype, device=device) for value in values]

    @property
    def d_outs(self) -> list[Node]:
        """The gradients of the outputs that the loss has a gradient by."""
        return self.reverse.sequences[len(self.forward.sequences) + len(self.saved) :]

    @property
    def reached_invariants(self) -> set[int]:
        """The trained invariants that the loss depends on: the others' gradients are zeros."""
        cotangents = [*self.d_outs, *self.reverse.carries]
        reached = reachable_from(cotangents, self.reverse.graph.nodes)
        pairs = zip(self.trained_invariants, self.reverse.summed, strict=True)
        return {i for i, gradient in pairs if gradient in reached}


@dataclass(frozen=True)
class StepRoles:
    """What the inputs and outputs of a step graph are, and which take part in the gradient.

    The graph is ``(*invariants, *sequences, *carries) -> [*outs, *next_carries]``, with as many of
    each as the first three fields say; indices count within a group. Carries with real or complex
    values have a gradient wherever the loss depends on them.
    """

    invariants: int
    sequences: int
    carries: int
    trained_invariants: list[int]  # that get a gradient
    trained_sequences: list[int]
    outs_with_grad: list[int]  # that the loss has a gradient by


def make_loops(
    module: fx.GraphModule,
    roles: StepRoles,
    levels: Sequence[Level],
    batched: Sequence[Sequence[bool]],
    mode: FakeTensorMode,
    *,
    recompute: bool,
) -> LoopPair:
    """make_loops : step graph, the roles of its inputs and outputs -> LoopPair

    ``batched`` says for each level of vmap which inputs have its axis (carries all have).
    """
    first_carry = roles.invariants + roles.sequences
    carries = [value_of(node) for node in module.graph.find_nodes(op="placeholder")][first_carry:]
    trained_carries = [i for i, carry in enumerate(carries) if differentiable(carry)]
    graph, nodes = _trace_joint(module, roles, trained_carries, levels, batched, mode)
    reached = _reached_by_loss(graph, nodes)
    if not all(reached):
        # Their gradients are zeros, but zero times infinity would not be.
        trained_carries = list(compress(trained_carries, reached))
        graph, nodes = _trace_joint(module, roles, trained_carries, levels, batched, mode)
    return _split_joint(graph, nodes, roles, trained_carries, recompute=recompute)


def _trace_joint(
    module: fx.GraphModule,
    roles: StepRoles,
    trained_carries: list[int],
    levels: Sequence[Level],
    batched: Sequence[Sequence[bool]],
    mode: FakeTensorMode,
) -> tuple[fx.Graph, _JointNodes]:
    """One step forward, and its vector-Jacobian product."""
    values = [value_of(node) for node in module.graph.find_nodes(op="placeholder")]
    results = [value_of(node) for node in module.graph.output_node().args[0]]
    outs, n_inputs = len(results) - roles.carries, len(values)
    first_carry = roles.invariants + roles.sequences
    trained_inputs = [
        *roles.trained_invariants,
        *(roles.invariants + i for i in roles.trained_sequences),
        *(first_carry + i for i in trained_carries),
    ]
    results_with_grad = [*roles.outs_with_grad, *(outs + i for i in trained_carries)]

    def joint(*args: Tensor) -> list[Tensor]:
        results, pull = vjp_by(module, args[:n_inputs], trained_inputs, results_with_grad)
        return [*results, *pull(args[n_inputs:])]

    with mode:
        cotangents = [torch.empty_like(results[i]) for i in results_with_grad]
        flags = [[*level_flags, *([True] * len(cotangents))] for level_flags in batched]
        examples = with_level_axes([*values, *cotangents], levels, flags)
    over_levels = vmapped(joint, levels, flags)
    traced = trace_function(over_levels, examples, mode, differentiated=module)
    numbers_as_nodes(traced)
    graph = traced.graph
    put_weights_second_in_gradients(graph, roles.invariants)
    _simplify(graph)
    split_gradients(graph)
    skip_identities(graph)  # before it is chosen what to save: a base may be saved, or its view
    return graph, _joint_nodes(graph, roles, outs, len(trained_carries))


def _reached_by_loss(graph: fx.Graph, nodes: _JointNodes) -> list[bool]:
    """For each carry with a gradient whether the loss depends on it, at this step or later.

    Not for what a step only keeps, such as statistics, or a state of which a readout is detached.
    """
    pairs = list(zip(nodes.d_next_carries, nodes.d_carries, strict=True))
    sources: list[Node] = []
    following = nodes.d_outs
    while len(following) > len(sources):
        sources = following
        reached = reachable_from(sources, graph.nodes)
        following = [*nodes.d_outs, *(d_next for d_next, d_carry in pairs if d_carry in reached)]
    return [d_next in sources for d_next in nodes.d_next_carries]


def _simplify(graph: fx.Graph) -> None:
    """Drops aliases, and pairs of transposes that autograd leaves."""
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.permute.default and node.args[0].target is aten.permute.default:
            first, second = node.args[0].args[1], node.args[1]
            if [first[d] for d in second] == list(range(len(first))):
                node.replace_all_uses_with(node.args[0].args[0])
    graph.eliminate_dead_code()


class _JointNodes(NamedTuple):
    """The inputs and outputs of a joint graph, by role.

    It is ``(*invariants, *sequences, *carries, *d_outs, *d_next_carries) -> [*outs,
    *next_carries, *d_invariants, *d_sequences, *d_carries]``; the gradients are of what is trained.
    """

    invariants: list[Node]
    sequences: list[Node]
    carries: list[Node]
    d_outs: list[Node]
    d_next_carries: list[Node]
    outs: list[Node]
    next_carries: list[Node]
    d_invariants: list[Node]
    d_sequences: list[Node]
    d_carries: list[Node]

    @property
    def gradients(self) -> list[Node]:
        return [*self.d_invariants, *self.d_sequences, *self.d_carries]


def _joint_nodes(
    graph: fx.Graph, roles: StepRoles, outs: int, n_trained_carries: int
) -> _JointNodes:
    n_d_outs = len(roles.outs_with_grad)
    n_d_invariants, n_d_sequences = len(roles.trained_invariants), len(roles.trained_sequences)
    inputs = (roles.invariants, roles.sequences, roles.carries, n_d_outs, n_trained_carries)
    results = (outs, roles.carries, n_d_invariants, n_d_sequences, n_trained_carries)
    return _JointNodes(
        *in_groups(graph.find_nodes(op="placeholder"), inputs),
        *in_groups(graph.output_node().args[0], results),
    )


def _split_joint(
    graph: fx.Graph,
    nodes: _JointNodes,
    roles: StepRoles,
    trained_carries: list[int],
    *,
    recompute: bool,
) -> LoopPair:
    """The two loops of a joint graph, which both refer to; decides what is saved in between."""
    share_joins(graph, nodes.d_carries)
    saved = _saved_values(graph, nodes, recompute=recompute)
    forward = Loop(
        graph,
        nodes.invariants,
        nodes.sequences,
        nodes.carries,
        nodes.next_carries,
        stacked=[*nodes.outs, *saved],
        summed=[],
        reverse=False,
    )
    reverse = Loop(
        graph,
        nodes.invariants,
        [*nodes.sequences, *saved, *nodes.d_outs],
        nodes.d_next_carries,
        nodes.d_carries,
        stacked=nodes.d_sequences,
        summed=nodes.d_invariants,
        reverse=True,
    )
    return LoopPair(
        forward, reverse, len(nodes.outs), saved, roles.trained_invariants, trained_carries
    )


def _saved_values(graph: fx.Graph, nodes: _JointNodes, *, recompute: bool) -> list[Node]:
    """The values of the forward step that are saved for the reverse loop, in graph order."""
    cotangents = [*nodes.d_outs, *nodes.d_next_carries]
    in_reverse = reachable_from(cotangents, graph.nodes) - {graph.output_node()}
    varying = varying_with([*nodes.sequences, *nodes.carries], graph)
    known = {n for n in graph.nodes if n not in varying} | set(nodes.sequences)
    read = {
        arg
        for node in needed_for(nodes.gradients) & in_reverse
        for arg in inputs_of(node)
        if arg not in in_reverse
    }
    read |= {n for n in nodes.gradients if n not in in_reverse}
    # The state after a step is the one before the next: if the latter is saved, it costs nothing.
    pairs = zip(nodes.carries, nodes.next_carries, strict=True)
    free = {after for carry, after in pairs if carry in read and not recompute}
    carries = set(nodes.carries)
    saved = values_to_save(read, known, carries, free - carries, recompute=recompute)
    order = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(saved, key=order.__getitem__)
