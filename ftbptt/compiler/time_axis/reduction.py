"""The sum of a value over the steps, as few operations on full sequences.

A parameter's gradient is a sum over the steps of what each step contributes. Summation is pushed
through everything linear, so that ``sum_t A_t @ B_t`` becomes one GEMM over the K steps and the
batch together, instead of K small ones or K contributions in memory that are summed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..._trees import tree_leaves
from ..graphs import VIEWS, Node, aten, matrix_product, new_node, value_of
from .convolution import weight_gradient

Values = Callable[[Node], Tensor]


@dataclass(frozen=True)
class Term:
    """The sum of ``node`` over the steps; ``kind`` says how it is computed from ``operands``.

    - ``sum``: add up the sequence of the node;
    - ``times_steps``: the node is an invariant, times K;
    - ``gemm``: one GEMM over all steps and the batch;
    - ``convolution``: the gradient of its weight, over all steps and the batch in the same way;
    - ``rows``: the sum of the operand over all steps and the batch;
    - ``scatter``: one scatter of all steps and the batch;
    - ``total``: a sum that the node's loop returns;
    - ``apply``: the node's operation, applied to the sums of its arguments.
    """

    kind: str
    node: Node
    operands: tuple[Any, ...] = ()

    def leaves(self) -> Iterator[Node]:
        """The values that must exist at every step."""
        if self.kind == "sum":
            yield self.node
        elif self.kind in ("gemm", "convolution", "rows", "scatter"):
            yield from (operand for operand in self.operands if isinstance(operand, fx.Node))
        for term in self.terms():
            yield from term.leaves()

    def terms(self) -> list[Term]:
        """The sums among its operands."""
        return [operand for operand in tree_leaves(self.operands) if isinstance(operand, Term)]

    def all(self) -> Iterator[Term]:
        """This term and, recursively, the sums among its operands."""
        yield self
        for term in self.terms():
            yield from term.all()

    def with_totals(self, nodes: set[Node]) -> Term:
        """The same, given that loops return the sums of these nodes over steps and batch."""
        if self.kind == "rows" and self.node in nodes:
            return Term("total", self.node)

        def changed(operand: Any) -> Any:
            if isinstance(operand, list):
                return [changed(item) for item in operand]
            return operand.with_totals(nodes) if isinstance(operand, Term) else operand

        return replace(self, operands=tuple(map(changed, self.operands)))

    def evaluate(self, sequence: Values, total: Values, invariant: Values, steps: Any) -> Tensor:
        """The value, from functions for a node's sequence ``[K, ...]``, total and invariant."""
        if self.kind in ("sum", "total"):
            return total(self.node)
        if self.kind == "times_steps":
            return invariant(self.node) * steps
        if self.kind == "gemm":
            return _gemm(*(sequence(operand) for operand in self.operands))
        if self.kind == "rows":
            return _sum_of_rows(sequence(self.operands[0])).reshape(value_of(self.node).shape)
        if self.kind == "convolution":
            rows = [sequence(operand).flatten(0, 1) for operand in self.operands]
            weight, *options = self.node.args[2:]
            return self.node.target(*rows, invariant(weight), *options)
        if self.kind == "scatter":
            values = [sequence(a) if isinstance(a, fx.Node) else a for a in self.operands]
            return self.node.target(*values)

        def value(operand: Any) -> Any:
            if isinstance(operand, Term):
                return operand.evaluate(sequence, total, invariant, steps)
            if isinstance(operand, list):
                return [value(item) for item in operand]
            return invariant(operand) if isinstance(operand, fx.Node) else operand

        return self.node.target(*map(value, self.operands), **self.node.kwargs)


def _gemm(a: Tensor, b: Tensor) -> Tensor:
    """``sum_t a[t] @ b[t]`` of ``[K, (n,) M, R]`` and ``[K, (n,) R, N]``: one (batched) GEMM."""
    a = a.movedim(0, -2)  # [(n,) M, K, R]
    b = b.movedim(0, -3)  # [(n,) K, R, N]
    return matrix_product(a.flatten(-2), b.flatten(-3, -2))


def _sum_of_rows(x: Tensor) -> Tensor:
    """``[K, B, N] -> [N]``; a large batch by products with ones, which read it in order."""
    if x.shape[1] < _ROWS_FOR_A_PRODUCT:
        return x.sum((0, 1))
    ones = x.new_ones(1, 1, x.shape[1]).expand(x.shape[0], 1, x.shape[1])
    return torch.bmm(ones, x).sum(0)


_ROWS_FOR_A_PRODUCT = 16

_LINEAR_VIEWS = VIEWS - {aten.lift_fresh.default}


def time_sum(node: Node, varying: set[Node], inputs: set[Node]) -> Term:
    """time_sum : a node of the step, what varies with the step, the loop's inputs -> Term

    Changes its arguments: where a weight's gradient is a transposed GEMM, the operands' transposes
    may be added to the node's graph, and are then added to ``varying``. ``inputs`` are not looked
    into: what a saved value was computed from does not exist in the reverse loop.
    """

    def apply(*operands: Any) -> Term:
        return Term("apply", node, operands)

    def sum_of(arg: Any) -> Any:
        return time_sum(arg, varying, inputs) if isinstance(arg, fx.Node) else arg

    if node not in varying:
        return Term("times_steps", node)
    target, args = node.target, node.args
    if node in inputs or node.op != "call_function":
        return Term("sum", node)
    if target is aten.permute.default and args[0].target in (aten.mm.default, aten.bmm.default):
        swapped = _swapped_gemm(args[0], args[1], varying, inputs)
        if swapped is not None:
            return swapped
    if target is aten.sum.dim_IntList and _sums_rows(node) and args[0] in varying:
        return Term("rows", node, (args[0],))
    if target in _LINEAR_VIEWS or target is aten.sum.dim_IntList or target is aten.neg.default:
        return apply(sum_of(args[0]), *args[1:])
    if target in (aten.add.Tensor, aten.sub.Tensor):
        if all(isinstance(a, fx.Node) for a in args[:2]):
            return apply(sum_of(args[0]), sum_of(args[1]))
        return Term("sum", node)
    if target in (aten.mul.Tensor, aten.div.Tensor, aten.mm.default, aten.bmm.default):
        a_varies, b_varies = args[0] in varying, args[1] in varying
        if a_varies and not b_varies:
            return apply(sum_of(args[0]), args[1])
        if b_varies and not a_varies and target is not aten.div.Tensor:
            return apply(args[0], sum_of(args[1]))
        if a_varies and b_varies and target in (aten.mm.default, aten.bmm.default):
            return Term("gemm", node, (args[0], args[1]))
        return Term("sum", node)
    if target is aten.cat.default and len(node.users) == 1:  # other users need it concatenated
        return apply([sum_of(arg) for arg in args[0]], *args[1:])
    if target in (aten.slice_scatter.default, aten.select_scatter.default):
        return apply(sum_of(args[0]), sum_of(args[1]), *args[2:])
    if target is weight_gradient and args[2] not in varying:
        return Term("convolution", node, args[:2])
    # args[4]: scale_grad_by_freq, whose frequencies are those of one step.
    is_scatter = target is aten.embedding_dense_backward.default and not args[4]
    if is_scatter and args[0] in varying and args[1] in varying:
        return Term("scatter", node, tuple(args))
    return Term("sum", node)


def _sums_rows(node: Node) -> bool:
    """Whether the node sums a floating point matrix over its first axis."""
    value, dims = value_of(node.args[0]), node.args[1]
    return value.dim() == 2 and list(dims) == [0] and value.is_floating_point()


def _swapped_gemm(
    product: Node, dims: Sequence[int], varying: set[Node], inputs: set[Node]
) -> Term | None:
    """``(a @ b)^T`` as ``b^T @ a^T``, so that the gradient of a weight comes out contiguous.

    None if it does not apply. Changes the graph and ``varying``, see :func:`time_sum`.
    """
    rank = product.meta["val"].dim()
    swaps = list(dims) == [*range(rank - 2), rank - 1, rank - 2]
    if not swaps or len(product.users) > 1 or product in inputs:
        return None
    a, b = product.args[:2]
    if a not in varying or b not in varying:
        return None
    operands = (_transposed(b, dims, inputs), _transposed(a, dims, inputs))
    varying.update(operands)
    return Term("gemm", product, operands)


def _transposed(node: Node, dims: Sequence[int], inputs: set[Node]) -> Node:
    """A node of the graph that is ``node`` transposed; added to the graph if there is none."""
    is_transpose = node.target is aten.permute.default and list(node.args[1]) == list(dims)
    if is_transpose and node not in inputs:
        return node.args[0]
    graph = node.graph
    for user in node.users:
        if user.target is aten.permute.default and list(user.args[1]) == list(dims):
            return user
    with graph.inserting_after(node):
        return new_node(graph, aten.permute.default, node, list(dims))
