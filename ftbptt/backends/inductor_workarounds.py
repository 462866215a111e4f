"""Defects of Inductor, with wrong numbers or a crash, worked around in the graph of a program."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..compiler.graphs import VIEWS, Node, aten


def work_around_defects(program: fx.GraphModule) -> None:
    """Changes the graph where Inductor would take it for another."""
    _write_to_whole_tensors(program.graph)
    _compute_once(program.graph)
    _give_loops_what_views_look_at(program.graph)
    _sum_once(program.graph)
    program.recompile()


def _write_to_whole_tensors(graph: fx.Graph) -> None:
    """Copies an expanded tensor before ``index_put``.

    Inductor (2.11 to 2.13) does index_put in place on what nothing else reads, also where it is a
    tensor expanded over the steps: all of them would be written to the memory of one.
    """
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        whole = node.args[0]
        value = whole.meta["val"]
        if any(s == 0 and n != 1 for s, n in zip(value.stride(), value.shape, strict=True)):
            with graph.inserting_before(node):
                copied = graph.call_function(
                    aten.clone.default,
                    (whole,),
                    {"memory_format": torch.contiguous_format},
                )
                copied.meta["val"] = value.contiguous()
            node.replace_input_with(whole, copied)


def _compute_once(graph: fx.Graph) -> None:
    """Puts into memory what is compared with its own maximum, as the gradient of ``amax`` does.

    Inductor (2.11 to 2.13) computes it once for the maximum and once for the comparison, in C++
    once with a library's ``erf`` or ``tanh`` and once with that of vectors: nothing is equal then.
    """
    for node in graph.find_nodes(op="call_function", target=aten.eq.Tensor):
        for value, other in (node.args[:2], node.args[1::-1]):
            while isinstance(other, fx.Node) and other.target in VIEWS:
                other = other.args[0]
            of_value = isinstance(other, fx.Node) and value in other.args
            if not of_value or other.target not in (aten.amax.default, aten.amin.default):
                continue
            kept = _in_memory(graph, value)
            for user in (node, other):
                user.replace_input_with(value, kept)


def _give_loops_what_views_look_at(graph: fx.Graph) -> None:
    """Takes views that change nothing (a transpose's transpose) from the inputs of loops.

    Inductor (2.11 to 2.13) makes one temporary handle for such a view before a loop and lets go of
    it at the end of each step: the second one reads freed memory.
    """
    for loop in graph.find_nodes(op="call_function", target=torch.ops.higher_order.while_loop):
        for value in {arg for args in loop.args[2:] for arg in args if isinstance(arg, fx.Node)}:
            source = value
            while source.target in VIEWS:
                source = source.args[0]
            if source is not value and _layout(source) == _layout(value):
                loop.replace_input_with(value, source)


def _sum_once(graph: fx.Graph) -> None:
    """Copies a sum in 16 bits where the same one is asked for twice, as for an LSTM's two biases.

    Inductor (2.11 to 2.13) rounds one accumulator twice in C++, under one name, which no compiler
    takes.
    """
    known: dict[Any, Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        if node.meta["val"].dtype not in (torch.bfloat16, torch.float16):
            continue
        first = known.setdefault((node.args[0], str(node.args[1:]), str(node.kwargs)), node)
        if first is not node:
            with graph.inserting_before(node):
                copied = graph.call_function(aten.clone.default, (first,))
                copied.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(copied)
            graph.erase_node(node)


def _layout(node: Node) -> tuple[Any, ...]:
    """Size, strides and offset; symbols by their names, so that nothing is learnt of them."""
    value = node.meta["val"]
    return value.dtype, *map(str, (*value.shape, *value.stride(), value.storage_offset()))


def _in_memory(graph: fx.Graph, value: Node) -> Node:
    """The value, computed before it is used: no other operation makes Inductor do that."""
    fake = value.meta["val"].contiguous()
    with graph.inserting_after(value):
        whole = graph.call_function(
            aten.clone.default, (value,), {"memory_format": torch.contiguous_format}
        )
    with graph.inserting_after(whole):
        kept = graph.call_function(aten.as_strided.default)
    with graph.inserting_before(kept):
        shape: list[Any] = list(fake.shape)
        for i, n in enumerate(shape):
            if not isinstance(n, int):
                shape[i] = graph.call_function(aten.sym_size.int, (whole, i))
                shape[i].meta["val"] = n
    kept.args = (whole, shape, list(fake.stride()))
    whole.meta["val"] = kept.meta["val"] = fake
    return kept
