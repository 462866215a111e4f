"""The sum of a value over the steps, as few operations on full sequences.

A parameter's gradient is a sum over the steps of what each step contributes. Summation is pushed
through everything linear, so that ``sum_t A_t @ B_t`` becomes one GEMM over the K steps and the
batch together, instead of K small ones or K contributions in memory that are summed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from ..graphs import VIEWS, Node, aten, matrix_product, new_node, value_of
from ..loop_values import LoopValues
from .convolution import weight_gradient


@dataclass(frozen=True)
class Term:
    """The sum of ``node`` over the steps. Each subclass is a way to compute it."""

    node: Node

    def sequences(self) -> Sequence[Node]:
        """The nodes whose values at every step it reads itself."""
        return []

    def evaluate(self, values: LoopValues, sums: Mapping[Node, Tensor]) -> Tensor:
        """``sums``: those of the nodes before it in the graph."""
        raise NotImplementedError


class StepSum(Term):
    """Its values at all steps, added up."""

    def sequences(self) -> Sequence[Node]:
        return [self.node]

    def evaluate(self, values: LoopValues, sums: Mapping[Node, Tensor]) -> Tensor:
        return values.total(self.node)


class LoopTotal(StepSum):
    """The same, which the node's loop returns."""

    def sequences(self) -> Sequence[Node]:
        return []


class TimesSteps(Term):
    """An invariant, times K."""

    def evaluate(self, values: LoopValues, sums: Mapping[Node, Tensor]) -> Tensor:
        return values.invariant(self.node) * values.steps


class BatchSum(Term):
    """A node that sums a matrix over its rows: the sum of all steps' rows."""

    @property
    def summed(self) -> Node:
        return self.node.args[0]

    def sequences(self) -> Sequence[Node]:
        return [self.summed]

    def evaluate(self, values: LoopValues, sums: Mapping[Node, Tensor]) -> Tensor:
        return values.row_sum(self.summed).reshape(value_of(self.node).shape)


@dataclass(frozen=True)
class Gemm(Term):
    """A product of matrices, or of batches of them: one GEMM over all steps and the batch."""

    a: Node
    b: Node

    def sequences(self) -> Sequence[Node]:
        return [self.a, self.b]

    def evaluate(self, values: LoopValues, sums: Mapping[Node, Tensor]) -> Tensor:
        a = values.sequence(self.a).movedim(0, -2)  # [(n,) M, K, R]
        b = values.sequence(self.b).movedim(0, -3)  # [(n,) K, R, N]
        return matrix_product(a.flatten(-2), b.flatten(-3, -2))


class ConvolutionGradient(Term):
    """The gradient of a convolution's weight: one over all steps and the batch."""

    def sequences(self) -> Sequence[Node]:
        return self.node.args[:2]

    def evaluate(self, values: LoopValues, sums: Mapping[Node, Tensor]) -> Tensor:
        rows = [values.sequence(node).flatten(0, 1) for node in self.sequences()]
        weight, *options = self.node.args[2:]
        return self.node.target(*rows, values.invariant(weight), *options)


class EmbeddingGradient(Term):
    """The gradient of an embedding's weight: one scatter of all steps and the batch."""

    def sequences(self) -> Sequence[Node]:
        return self.node.args[:2]

    def evaluate(self, values: LoopValues, sums: Mapping[Node, Tensor]) -> Tensor:
        rows = [values.sequence(node) for node in self.sequences()]
        return self.node.target(*rows, *self.node.args[2:])


@dataclass(frozen=True)
class Apply(Term):
    """A linear operation, applied to the sums of those operands that vary."""

    summed: frozenset[Node]

    def evaluate(self, values: LoopValues, sums: Mapping[Node, Tensor]) -> Tensor:
        def value(arg: Node) -> Tensor:
            return sums[arg] if arg in self.summed else values.invariant(arg)

        return self.node.target(*fx.node.map_arg(self.node.args, value), **self.node.kwargs)


_LINEAR_VIEWS = VIEWS - {aten.lift_fresh.default}


@dataclass(frozen=True)
class TimeSums:
    """The sums of ``results`` over the steps, and what they are computed from.

    ``terms`` are in the order of the graph: a linear operation comes after its operands.
    """

    results: list[Node]
    terms: dict[Node, Term]

    def sequences(self) -> list[Node]:
        """The nodes whose values at every step are read."""
        return [node for term in self.terms.values() for node in term.sequences()]

    def with_totals(self, nodes: set[Node]) -> TimeSums:
        """The same, given that loops return the sums of these nodes over the steps."""
        return TimeSums(self.results, self.terms | {node: LoopTotal(node) for node in nodes})

    def evaluate(self, values: LoopValues) -> list[Tensor]:
        """Tensors of their own: callers write to gradients in place."""
        sums: dict[Node, Tensor] = {}
        memory: dict[Node, Node] = {}  # nodes with the same one have sums that share memory
        for node, term in self.terms.items():
            sums[node] = term.evaluate(values, sums)
            is_view = isinstance(term, Apply) and node.target in _LINEAR_VIEWS
            own = term.summed if isinstance(term, BatchSum) else node
            memory[node] = memory[node.args[0]] if is_view else own
        returned: set[Node] = set()
        results = []
        for node in self.results:
            is_taken = memory[node] in returned
            results.append(sums[node].clone() if is_taken else sums[node])
            returned.add(memory[node])
        return results


def time_sums(results: list[Node], varying: set[Node], inputs: set[Node]) -> TimeSums:
    """time_sums : nodes of the step, what varies with the step, the loop's inputs -> TimeSums

    Changes its arguments: where a weight's gradient is a transposed GEMM, the operands' transposes
    may be added to the graph, and are then added to ``varying``. ``inputs`` are not looked into:
    what a saved value was computed from does not exist in the reverse loop.
    """
    terms: dict[Node, Term] = {}
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node not in terms:
            terms[node] = term = _term(node, varying, inputs)
            waiting += term.summed if isinstance(term, Apply) else ()
    if not terms:
        return TimeSums([], {})
    return TimeSums(results, {n: terms[n] for n in results[0].graph.nodes if n in terms})


def _term(node: Node, varying: set[Node], inputs: set[Node]) -> Term:
    if node not in varying:
        return TimesSteps(node)
    if node in inputs or node.op != "call_function":
        return StepSum(node)
    target, args = node.target, node.args
    products = (aten.mm.default, aten.bmm.default)
    if target is aten.permute.default and args[0].target in products:
        operands = _swapped_operands(args[0], args[1], varying, inputs)
        if operands is not None:
            return Gemm(args[0], *operands)
    if target in products and args[0] in varying and args[1] in varying:
        return Gemm(node, *args)
    if target is aten.sum.dim_IntList and _sums_rows(node) and args[0] in varying:
        return BatchSum(node)
    if target is weight_gradient and args[2] not in varying:
        return ConvolutionGradient(node)
    # args[4]: scale_grad_by_freq, whose frequencies are those of one step.
    is_scatter = target is aten.embedding_dense_backward.default and not args[4]
    if is_scatter and args[0] in varying and args[1] in varying:
        return EmbeddingGradient(node)
    summed = _summed_operands(node, varying)
    # Sums of narrower operands would be rounded before a wider dtype takes them up.
    exact = all(value_of(arg).dtype == value_of(node).dtype for arg in summed)
    return Apply(node, frozenset(summed)) if summed and exact else StepSum(node)


def _summed_operands(node: Node, varying: set[Node]) -> set[Node]:
    """The operands in which the node is linear, so that their sums give its own; or none."""
    target, args = node.target, node.args
    if target in _LINEAR_VIEWS or target in (aten.sum.dim_IntList, aten.neg.default):
        return {args[0]}
    if target is aten.slice_scatter.default:
        return set(args[:2])
    if target is aten.cat.default and len(node.users) == 1:  # other users need it concatenated
        return set(args[0])
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return set(args[:2]) if all(isinstance(arg, fx.Node) for arg in args[:2]) else set()
    if target in (aten.mul.Tensor, aten.mm.default, aten.bmm.default):
        operands = {arg for arg in args[:2] if arg in varying}
        return operands if (args[0] in varying) != (args[1] in varying) else set()
    if target is aten.div.Tensor:
        return {args[0]} if args[1] not in varying else set()
    return set()


def _sums_rows(node: Node) -> bool:
    """Whether the node sums a floating point matrix over its first axis, in its own dtype."""
    value, dims = value_of(node.args[0]), node.args[1]  # None: all axes
    is_exact = value.is_floating_point() and value.dtype == value_of(node).dtype
    return value.dim() == 2 and list(dims or ()) == [0] and is_exact


def _swapped_operands(
    product: Node, dims: Sequence[int], varying: set[Node], inputs: set[Node]
) -> tuple[Node, Node] | None:
    """``b^T, a^T`` for ``(a @ b)^T``, so that the gradient of a weight comes out contiguous.

    None if it does not apply. Changes the graph and ``varying``, see :func:`time_sums`.
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
    return operands


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
