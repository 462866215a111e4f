"""Work on the parameters alone leaves the loop: done once per segment, with one gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._compat import FakeTensorMode
from .graphs import (
    SPLITS,
    VIEWS,
    Node,
    extract,
    inputs_of,
    is_getitem,
    is_random,
    needed_for,
    reachable_from,
    vjp_by,
)
from .signature import Level, differentiable, vmapped, with_level_axes
from .trace import trace_function


@dataclass
class Preparation:
    """``prepare(*given) -> [*prepared]`` and ``finish(*given, *d_prepared) -> [*d_given]``.

    ``finish`` is None if no prepared value depends on a trained one.

    ``graded`` are the prepared values that have a gradient, ``trained`` the given ones that get
    one; ``batched`` says per level of vmap which prepared values have its axis.
    """

    prepare: fx.GraphModule
    finish: fx.GraphModule | None
    graded: list[int]
    trained: list[int]
    batched: list[list[bool]]


def split_invariants(
    module: fx.GraphModule, invariants: int
) -> tuple[fx.GraphModule | None, fx.GraphModule]:
    """split_invariants : step graph -> (preparation or None, step graph on prepared values)

    Work on parameters alone (a weight normalised, a matrix exponential) leaves the loop:
    ``preparation(*invariants) -> [*prepared]``, and the step takes ``(*invariants, *prepared,
    ...)``. Mere views of a parameter stay in the step.
    """
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    varying = set(placeholders[invariants:])
    varying |= {n for n in graph.nodes if n.op == "call_function" and is_random(n)}
    varying = reachable_from(varying, graph.nodes)
    output = graph.output_node()

    def is_prepared(node: Node) -> bool:
        return (
            node.op == "call_function"
            and node not in varying
            and isinstance(node.meta.get("val"), Tensor)
            and any(not is_light(n) for n in needed_for([node]))
        )

    def is_light(node: Node) -> bool:
        """A parameter, a view of one, or a constant made of nothing."""
        light = node.target in VIEWS or node.target in SPLITS or is_getitem(node)
        return node.op == "placeholder" or light or not inputs_of(node)

    read_in_step = [
        node
        for node in graph.nodes
        if is_prepared(node) and any(user in varying or user is output for user in node.users)
    ]
    # A view of prepared work is better taken in the step, from the work itself.
    prepared: list[Node] = []
    for node in read_in_step:
        while node.target in VIEWS and is_prepared(inputs_of(node)[0]):
            node = inputs_of(node)[0]
        if node not in prepared:
            prepared.append(node)
    if not prepared:
        return None, module
    given = placeholders[:invariants]
    preparation = extract(given, prepared, graph)
    step = extract([*given, *prepared, *placeholders[invariants:]], list(output.args[0]), graph)
    return preparation, step


def make_preparation(
    module: fx.GraphModule,
    levels: Sequence[Level],
    flags: list[list[bool]],
    given: Sequence[Tensor],
    trained: list[int],
    mode: FakeTensorMode,
) -> Preparation:
    """make_preparation : graph ``(*given) -> [*prepared]`` -> it and its vjp, under the levels"""
    placeholders = module.graph.find_nodes(op="placeholder")
    results = module.graph.output_node().args[0]
    batched = []
    for own in flags:
        axis = [node for node, flag in zip(placeholders, own, strict=True) if flag]
        touched = reachable_from(axis, module.graph.nodes)
        batched.append([node in touched for node in results])
    from_trained = reachable_from([placeholders[i] for i in trained], module.graph.nodes)
    graded = [
        i
        for i, node in enumerate(results)
        if node in from_trained and differentiable(node.meta["val"])
    ]

    def pull(*args: Tensor) -> list[Tensor]:
        _, back = vjp_by(module, args[: len(given)], trained, graded)
        return list(back(args[len(given) :]))

    def forward(*args: Tensor) -> list[Tensor]:
        return list(module(*args))

    run: Any = forward
    for level, own, kept in zip(levels, flags, batched, strict=True):
        if any(own):  # a value that lacks the axis stays without it: shared work is done once
            dims = tuple(0 if flag else None for flag in own)
            out_dims: Any = [0 if flag else None for flag in kept]
            run = torch.func.vmap(run, dims, out_dims, randomness=level.randomness)
    with mode:
        cotangents = [torch.empty_like(results[i].meta["val"]) for i in graded]
        pull_flags = [[*own, *([True] * len(graded))] for own in flags]
        pull_examples = with_level_axes([*given, *cotangents], levels, pull_flags)
        examples = with_level_axes(given, levels, flags)
    finish = None
    if graded:
        over_levels = vmapped(pull, levels, pull_flags)
        finish = trace_function(over_levels, pull_examples, mode, differentiated=module)
    return Preparation(
        trace_function(run, examples, mode),
        finish,
        graded,
        trained,
        batched,
    )
