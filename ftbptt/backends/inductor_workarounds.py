"""Workarounds for Inductor bugs that give wrong numbers or crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler.graphs import (
    COMPARISONS,
    Node,
    aten,
    extreme_in,
    is_extreme,
    is_random,
    owner_of,
)


def _expm1(x: Tensor) -> Tensor:
    """Inductor's (2.11 to 2.13) is ``exp(x) - 1`` on a CPU, which has no digits for a small x."""
    if x.is_complex() or not x.is_cpu:
        return NotImplemented
    return torch.tanh(x / 2) * (torch.exp(x) + 1)


def _with_own_memory(operation: Any) -> Callable[..., Any]:
    """The operation on a base that was expanded over the steps, copied first.

    torch (2.11; mended in 2.13) says that the result has the strides of the base. Inductor then
    writes all steps to the memory of one, where an operator wants the strides that were traced.
    """

    def decomposed(base: Tensor, *args: Any, **options: Any) -> Any:
        if not _is_expanded(base):
            return NotImplemented
        copy = base.clone(memory_format=torch.contiguous_format)
        return operation(copy, *args, **options)

    return decomposed


# In addition to Inductor's own.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.expm1.default: _expm1,
    **{
        operation: _with_own_memory(operation)
        for operation in (aten.slice_scatter.default, aten.diagonal_scatter.default)
    },
}


def work_around_defects(program: fx.GraphModule) -> None:
    """Rewrites the patterns that Inductor compiles wrongly, also in the bodies of loops."""
    for module in program.modules():
        if isinstance(module, fx.GraphModule):
            _copy_before_index_put(module.graph)
            _materialize_before_comparison(module.graph)
            _skip_identity_views_of_loop_inputs(module.graph)
            _deduplicate_sums(module.graph)
            module.recompile()


def _copy_before_index_put(graph: fx.Graph) -> None:
    """Copies an expanded tensor before ``index_put`` writes to it, and one that it also reads.

    Inductor (2.11 to 2.13) does an index_put in place if nothing after it reads its target. If the
    target is expanded over the steps, all steps would be written to the memory of one; if what is
    put there is a part of the target, it would be read after it was changed.
    """
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        target, put = node.args[0], node.args[2]
        value = target.meta["val"]
        if _is_expanded(value) or owner_of(target) is owner_of(put):
            with graph.inserting_before(node):
                copy = _contiguous_copy(graph, target)
            node.replace_input_with(target, copy)


def _materialize_before_comparison(graph: fx.Graph) -> None:
    """Materializes a value that is compared with its own maximum, as in the gradient of ``amax``.

    Inductor (2.11 to 2.13) computes such a value twice, for the maximum and for the comparison. In
    C++ one of the two may use the scalar ``erf`` or ``tanh`` and the other the vectorized one,
    which round differently, so that no element equals the maximum; nor does one in 16 bits, to
    which only the maximum is rounded, and what a loop writes, for a comparison after it. In a
    program of both loops the value may be there twice too.
    """
    numbers = _numbered(graph)
    sources: dict[Node, Node] = {}  # of what is materialized
    for value in list(graph.nodes):
        extremes = [user for user in value.users if is_extreme(user)]
        copies = [user for user in value.users if user.target is aten.copy_.default]
        writers = [user for user in copies if user.args[1] is value and user.args[0] is not value]
        if extremes and writers:
            materialized = _materialize(graph, value)
            sources[materialized] = value
            for user in (*extremes, *writers):
                user.replace_input_with(value, materialized)
    for node in [node for node in graph.nodes if node.target in COMPARISONS]:
        for value, other in (node.args[:2], node.args[1::-1]):
            extreme = extreme_in(other)
            if extreme is None:
                continue
            read = extreme.args[0]
            if numbers.get(value) != numbers[sources.get(read, read)]:
                continue
            if read not in sources:
                materialized = _materialize(graph, read)
                sources[materialized] = read
                extreme.replace_input_with(read, materialized)
                read = materialized
            node.replace_input_with(value, read)


def _numbered(graph: fx.Graph) -> dict[Node, int]:
    """A number for each node, the same for the same operations on the same values."""
    numbers: dict[Node, int] = {}
    by_key: dict[Any, int] = {}
    for node in graph.nodes:
        key: Any = node
        if isinstance(node.meta.get("val"), torch.SymInt):  # the steps, of whichever tensor
            key = str(node.meta["val"])
        elif node.op == "call_function" and not is_random(node):
            args = fx.node.map_arg((node.args, node.kwargs), lambda arg: f"%{numbers[arg]}")
            key = node.target, str(args)
        numbers[node] = by_key.setdefault(key, len(by_key))
    return numbers


def _skip_identity_views_of_loop_inputs(graph: fx.Graph) -> None:
    """Removes views that change nothing (the transpose of a transpose) from the inputs of loops.

    Inductor (2.11 to 2.13) creates one temporary handle for such a view before a loop and releases
    it at the end of every step: the second step reads freed memory.
    """
    for loop in graph.find_nodes(op="call_function", target=torch.ops.higher_order.while_loop):
        for value in {arg for args in loop.args[2:] for arg in args if isinstance(arg, fx.Node)}:
            source = owner_of(value)
            if source is not value and _layout(source) == _layout(value):
                loop.replace_input_with(value, source)


def _deduplicate_sums(graph: fx.Graph) -> None:
    """Replaces the second of two equal 16-bit sums (an LSTM's two biases) by a copy of the first.

    For such a pair Inductor (2.11 to 2.13) rounds one accumulator twice in C++, under one name,
    which does not compile.
    """
    sums: dict[Any, Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        if node.meta["val"].dtype not in (torch.bfloat16, torch.float16):
            continue
        first = sums.setdefault((node.args[0], str(node.args[1:]), str(node.kwargs)), node)
        if first is not node:
            with graph.inserting_before(node):
                copy = graph.call_function(aten.clone.default, (first,))
                copy.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(copy)
            graph.erase_node(node)


def _is_expanded(value: Tensor) -> bool:
    """Whether several elements of it lie at one place in memory."""
    return any(s == 0 and n != 1 for s, n in zip(value.stride(), value.shape, strict=True))


def _contiguous_copy(graph: fx.Graph, value: Node) -> Node:
    copy = graph.call_function(
        aten.clone.default, (value,), {"memory_format": torch.contiguous_format}
    )
    copy.meta["val"] = value.meta["val"].contiguous()
    return copy


def _layout(node: Node) -> tuple[Any, ...]:
    """Dtype, sizes, strides and offset; symbols as strings, so that comparing adds no guard."""
    value = node.meta["val"]
    return value.dtype, *map(str, (*value.shape, *value.stride(), value.storage_offset()))


def _materialize(graph: fx.Graph, value: Node) -> Node:
    """The value, computed once and read from memory by its users.

    ``clone`` alone would be inlined; ``as_strided`` forces Inductor to realize its input.
    """
    with graph.inserting_after(value):
        copy = _contiguous_copy(graph, value)
    with graph.inserting_after(copy):
        materialized = graph.call_function(aten.as_strided.default)
    with graph.inserting_before(materialized):
        fake = copy.meta["val"]
        shape: list[Any] = list(fake.shape)
        for i, n in enumerate(shape):
            if not isinstance(n, int):
                shape[i] = graph.call_function(aten.sym_size.int, (copy, i))
                shape[i].meta["val"] = n
    materialized.args = (copy, shape, list(fake.stride()))
    materialized.meta["val"] = fake
    return materialized
