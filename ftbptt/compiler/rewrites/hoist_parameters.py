"""Work that depends on parameters only leaves the loop: done once per segment, with one vjp."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from ..._compat.tracing import FakeTensorMode
from ..._trees import differentiable
from ..graphs import (
    SPLITS,
    VIEWS,
    Node,
    extract,
    inputs_of,
    is_getitem,
    needed_for,
    reachable_from,
    varying_with,
    vjp_by,
)
from ..signature import Level, vmapped, with_level_axes
from ..tracing.custom_gradient import CustomGradient
from ..tracing.trace import trace_function


@dataclass
class Preparation:
    """``prepare(*inputs) -> [*prepared]`` and ``finish(*inputs, *d_prepared) -> [*d_inputs]``.

    The inputs are the invariants of the step. ``finish`` is None if no prepared value depends on a
    trained input. ``with_grad`` are the indices of the prepared values that have a gradient,
    ``trained`` those of the inputs that get one; ``batched`` says for each level of vmap which
    prepared values have its axis.
    """

    prepare: fx.GraphModule
    finish: fx.GraphModule | None
    with_grad: list[int]
    trained: list[int]
    batched: list[list[bool]]

    def reached_from(self, prepared: Container[int]) -> set[int]:
        """The trained inputs with a gradient from those of the prepared values."""
        graph = cast(fx.GraphModule, self.finish).graph
        d_prepared = graph.find_nodes(op="placeholder")[-len(self.with_grad) :]
        pairs = zip(self.with_grad, d_prepared, strict=True)
        reached = reachable_from((d for i, d in pairs if i in prepared), graph.nodes)
        d_inputs = zip(self.trained, graph.output_node().args[0], strict=True)
        return {i for i, gradient in d_inputs if gradient in reached}


def split_invariants(
    module: fx.GraphModule, invariants: int
) -> tuple[fx.GraphModule | None, fx.GraphModule]:
    """split_invariants : step graph -> (preparation or None, step graph on prepared values)

    Work that depends on invariants only (a normalized weight, a matrix exponential) leaves the
    loop: ``preparation(*invariants) -> [*prepared]``, and the step takes ``(*invariants,
    *prepared, ...)``. Views of a parameter stay in the step.
    """
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    varying = set(placeholders[invariants:])
    # A backward that someone wrote need not be linear: that of each step's gradient, not the sum's.
    varying |= {n for n in graph.nodes if isinstance(n.target, CustomGradient)}
    varying = varying_with(varying, graph)
    output = graph.output_node()

    def is_prepared(node: Node) -> bool:
        return (
            node.op == "call_function"
            and node not in varying
            and isinstance(node.meta.get("val"), Tensor)
            and any(not is_light(n) for n in needed_for([node]))
        )

    def is_light(node: Node) -> bool:
        """A parameter, a view of one, or a constant."""
        light = node.target in VIEWS or node.target in SPLITS or is_getitem(node)
        return node.op == "placeholder" or light or not inputs_of(node)

    read_in_step = [
        node
        for node in graph.nodes
        if is_prepared(node) and any(user in varying or user is output for user in node.users)
    ]
    # Of a view of prepared work, the work is prepared and the view stays in the step.
    prepared: list[Node] = []
    for node in read_in_step:
        while node.target in VIEWS and is_prepared(inputs_of(node)[0]):
            node = inputs_of(node)[0]
        if node not in prepared:
            prepared.append(node)
    if not prepared:
        return None, module
    inputs, rest = placeholders[:invariants], placeholders[invariants:]
    preparation = extract(inputs, prepared, graph)
    step = extract([*inputs, *prepared, *rest], list(output.args[0]), graph)
    return preparation, step


def make_preparation(
    module: fx.GraphModule,
    levels: Sequence[Level],
    flags: list[list[bool]],
    inputs: Sequence[Tensor],
    trained: list[int],
    mode: FakeTensorMode,
) -> Preparation:
    """make_preparation : graph ``(*inputs) -> [*prepared]`` -> it and its vjp, under the levels

    ``flags`` says for each level which inputs have its axis; ``inputs`` are fake examples.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    results = module.graph.output_node().args[0]
    batched = []
    for level_flags in flags:
        with_axis = [node for node, flag in zip(placeholders, level_flags, strict=True) if flag]
        reached = reachable_from(with_axis, module.graph.nodes)
        batched.append([node in reached for node in results])
    from_trained = reachable_from([placeholders[i] for i in trained], module.graph.nodes)
    with_grad = [
        i
        for i, node in enumerate(results)
        if node in from_trained and differentiable(node.meta["val"])
    ]

    def pull(*args: Tensor) -> list[Tensor]:
        _, vjp = vjp_by(module, args[: len(inputs)], trained, with_grad)
        return list(vjp(args[len(inputs) :]))

    run: Any = module.forward  # see trace_function
    for level, in_flags, out_flags in zip(levels, flags, batched, strict=True):
        if any(in_flags):  # results without the axis stay without it: shared work is done once
            dims = tuple(0 if flag else None for flag in in_flags)
            out_dims: Any = [0 if flag else None for flag in out_flags]
            run = torch.func.vmap(run, dims, out_dims, randomness=level.randomness)
    with mode:
        cotangents = [torch.empty_like(results[i].meta["val"]) for i in with_grad]
        pull_flags = [[*level_flags, *([True] * len(with_grad))] for level_flags in flags]
        pull_examples = with_level_axes([*inputs, *cotangents], levels, pull_flags)
        examples = with_level_axes(inputs, levels, flags)
    finish = None
    if with_grad:
        over_levels = vmapped(pull, levels, pull_flags)
        finish = trace_function(over_levels, pull_examples, mode, differentiated=module)
    prepare = trace_function(run, examples, mode)
    return Preparation(prepare, finish, with_grad, trained, batched)
