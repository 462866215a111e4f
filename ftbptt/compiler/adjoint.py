"""StepGraph -> the forward loop and its adjoint, the reverse loop, both as graphs of one step.

The gradient of a loop is a loop that runs the other way, with d(state) as its carry and the
gradients of the parameters as sums over its steps (Werbos 1990). One step of it is the
vector-Jacobian product of the forward step, traced once; what it reads of the forward step is
saved or computed again (``saving``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .._compat import FakeTensorMode
from .convolution import split_gradients
from .graphs import (
    Node,
    aten,
    inputs_of,
    is_random,
    needed_for,
    reachable_from,
    value_of,
    vjp_by,
)
from .min_cut import values_to_save
from .shared_cat import share_joins
from .signature import Level, differentiable, vmapped, with_level_axes
from .trace import trace_function


@dataclass
class Loop:
    """One step of a loop, as a graph whose nodes have a role.

    ``carries[i]`` becomes ``next_carries[i]``; ``stacked`` values are wanted at every step,
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


def make_loops(
    module: fx.GraphModule,
    counts: tuple[int, int, int],
    wanted_outs: Sequence[bool],
    trained_inv: Sequence[int],
    trained_seq: Sequence[int],
    levels: Sequence[Level],
    batched: Sequence[Sequence[bool]],
    mode: FakeTensorMode,
    *,
    recompute: bool,
) -> LoopPair:
    """make_loops : step graph ``(*invariants, *x_t, *state) -> [*out_t, *state]`` -> LoopPair

    ``counts`` are the numbers of invariants, inputs and states; ``wanted_outs`` says which outputs
    have a gradient, ``trained_inv`` and ``trained_seq`` which invariants and inputs get one;
    ``batched`` says per level which arguments have its axis (states all have).
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    n_inv, n_seq, n_carry = counts
    outs = len(module.graph.output_node().args[0]) - n_carry
    values = [value_of(node) for node in placeholders]
    results = [value_of(node) for node in module.graph.output_node().args[0]]
    trained_carry = [i for i in range(n_carry) if differentiable(values[n_inv + n_seq + i])]
    trained_args = [
        *trained_inv,
        *(n_inv + i for i in trained_seq),
        *(n_inv + n_seq + i for i in trained_carry),
    ]
    graded_outs = [i for i in range(outs) if wanted_outs[i]]
    graded = [*graded_outs, *(outs + i for i in trained_carry)]
    n_args = len(values)

    def joint(*args: Tensor) -> list[Tensor]:
        results, pull = vjp_by(module, args[:n_args], trained_args, graded)
        return [*results, *pull(args[n_args:])]

    with mode:
        cotangents = [torch.empty_like(results[i]) for i in graded]
        flags = [[*own, *([True] * len(graded))] for own in batched]
        examples = with_level_axes([*values, *cotangents], levels, flags)
    over_levels = vmapped(joint, levels, flags)
    both = trace_function(over_levels, examples, mode, differentiated=module)
    _simplify(both.graph)
    split_gradients(both.graph)
    return _split_joint(
        both.graph,
        n_inv,
        n_seq,
        n_carry,
        outs,
        graded_outs,
        list(trained_inv),
        len(trained_seq),
        trained_carry,
        recompute,
    )


def _simplify(graph: fx.Graph) -> None:
    """Drops aliases, and pairs of transposes that autograd leaves behind."""
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.permute.default and node.args[0].target is aten.permute.default:
            first, second = node.args[0].args[1], node.args[1]
            if [first[d] for d in second] == list(range(len(first))):
                node.replace_all_uses_with(node.args[0].args[0])
    graph.eliminate_dead_code()


def _split_joint(
    graph: fx.Graph,
    n_inv: int,
    n_seq: int,
    n_carry: int,
    outs: int,
    graded_outs: list[int],
    trained_inv: list[int],
    n_trained_seq: int,
    trained_carry: list[int],
    recompute: bool,
) -> LoopPair:
    placeholders = graph.find_nodes(op="placeholder")
    invariants, rest = placeholders[:n_inv], placeholders[n_inv:]
    sequences, carries, cotangents = (
        rest[:n_seq],
        rest[n_seq : n_seq + n_carry],
        rest[n_seq + n_carry :],
    )
    results = list(graph.output_node().args[0])
    out_nodes, after = results[:outs], results[outs : outs + n_carry]
    gradients = results[outs + n_carry :]
    d_invariants, rest = gradients[: len(trained_inv)], gradients[len(trained_inv) :]
    d_sequences, d_before = rest[:n_trained_seq], rest[n_trained_seq:]
    d_outs, d_after = cotangents[: len(graded_outs)], cotangents[len(graded_outs) :]
    share_joins(graph, d_before)

    in_reverse = reachable_from(cotangents, graph.nodes) - {graph.output_node()}
    at_a_step = reachable_from(
        [
            *sequences,
            *carries,
            *(n for n in graph.nodes if n.op == "call_function" and is_random(n)),
        ],
        graph.nodes,
    )
    known = {n for n in graph.nodes if n not in at_a_step} | set(sequences)
    backward = needed_for([*d_invariants, *d_sequences, *d_before])
    read = {
        arg for node in backward & in_reverse for arg in inputs_of(node) if arg not in in_reverse
    } | {n for n in (*d_invariants, *d_sequences, *d_before) if n not in in_reverse}
    # The state after a step is the one before the next: where that is kept, it costs nothing.
    free = {b for a, b in zip(carries, after, strict=True) if a in read and not recompute}
    saved = values_to_save(read, known, set(carries), free - set(carries), recompute=recompute)
    order = {node: i for i, node in enumerate(graph.nodes)}
    saved.sort(key=order.__getitem__)

    forward = Loop(
        graph, invariants, sequences, carries, after, [*out_nodes, *saved], [], reverse=False
    )
    reverse = Loop(
        graph,
        invariants,
        [*sequences, *saved, *d_outs],
        d_after,
        d_before,
        d_sequences,
        d_invariants,
        reverse=True,
    )
    return LoopPair(forward, reverse, outs, saved, trained_inv, trained_carry)
