"""The caller's loss as graphs over the full segment: its value, and its gradient by the outputs.

They hold for any K, which is a symbol in them. A loss that reads K as a number (``out.reshape(64,
-1)``) shows in the guards that tracing leaves, and gets separate graphs for each K; so does one
that torch cannot trace with a symbol. torch decides without a guard that the symbol is above 1:
for a single step the loss is traced again, and the graphs are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._compat.tracing import FakeTensorMode, ShapeEnv, holds_for, is_pinned, symbolic_steps
from .._trees import differentiable, leaf_names
from .._warnings import warn
from ..contract.loss import MaskMismatch
from .flat_loss import PARAMETERS_IN_LOSS, FlatLoss
from .graphs import (
    Node,
    aten,
    has_dynamic_shape,
    has_same_code,
    is_same_graph,
    new_node,
    owner_of,
    reachable_from,
    vjp_by,
)
from .signature import Level, vmapped
from .time_axis.batching import for_any_length
from .tracing.attempts import Tried, unless_it_fails
from .tracing.captures import materialized, with_tensors_as_inputs
from .tracing.constants import Constants
from .tracing.custom_gradient import CustomGradient
from .tracing.effects import forbid_reading_places, without_effects
from .tracing.errors import explain_trace_errors, needs_values
from .tracing.function_overrides import FunctionOverrides
from .tracing.step_checks import CHANGED_BY_LOSS, forbid_mutation, forbid_trained_captures
from .tracing.trace import TRACING, trace_function

# The key of the graphs that hold for any K; others have their K as the key.
ANY_STEPS = None
# What the symbol stands for while tracing, where torch needs a number in its place.
EXAMPLE_STEPS = 64
# With a number that is not the caller's the loss is traced for what it tells, not to be run.
_MOST_CALLS = 1000
# A loss with separate graphs for so many K is worth a warning: a stream and its end have fewer.
_MANY_LENGTHS = 5


class LossProgram(NamedTuple):
    """``graph(*outs, *ys, *mask, *captured) -> [loss]``, or ``-> [loss, *d_out]``."""

    graph: Callable[..., list[Tensor]]
    captured: list[Tensor]  # what the loss closes over
    key: int | None  # the K that it is for, or ANY_STEPS


@dataclass
class LossGraphs:
    """``value(*outs, *ys, *mask) -> [loss]``, ``joint(...) -> [loss, *d_out]``; time is axis 0."""

    joint: fx.GraphModule
    steps: Any  # K: a symbol, or a number if the graphs hold for that one only
    trace_value: Callable[[], fx.GraphModule]
    device: torch.device
    # Tensors that a loss closes over, and the copies of them that programs read instead.
    copied: list[tuple[Tensor, Tensor]]

    @property
    def key(self) -> int | None:
        """What programs of them can be stored under: the K that they are for, or ANY_STEPS."""
        return self.steps if isinstance(self.steps, int) else ANY_STEPS

    @cached_property
    def value(self) -> fx.GraphModule:
        """Traced when it is first needed: training does not need it."""
        with TRACING:
            return self.trace_value()

    def program(self, with_grad: bool) -> LossProgram:
        return self._joint_program if with_grad else self._value_program

    @cached_property
    def _joint_program(self) -> LossProgram:
        return self._made(self.joint)

    @cached_property
    def _value_program(self) -> LossProgram:
        return self._made(self.value)

    def _made(self, graph: fx.GraphModule) -> LossProgram:
        """With what it closes over as inputs: a compiler takes small constants for numbers."""
        lifted, originals = with_tensors_as_inputs(graph)
        captured = [materialized(tensor, self.device) for tensor in originals]
        pairs = zip(originals, captured, strict=True)
        self.copied += [(tensor, copy) for tensor, copy in pairs if tensor is not copy]
        return LossProgram(lifted, captured, self.key)

    def holds_for(self, steps: int) -> bool:
        return holds_for(self.steps, steps) if self.key is ANY_STEPS else steps == self.key


@dataclass
class _TracedLoss:
    """``graph(*outs, *ys, *mask) -> [loss]`` without the axes of vmap, traced for K ``steps``."""

    graph: fx.GraphModule
    mode: FakeTensorMode
    steps: Any


class SegmentLoss:
    """A loss, traced.

    ``steps`` is the K of the call that it is traced for. ``with_grad`` says which outputs the loss
    has a gradient by.
    """

    is_traced = True

    def __init__(self, loss: FlatLoss, steps: int, constants: Constants) -> None:
        self.loss, self.constants = loss, constants
        self.recipe, self.signature, self.outs = loss.recipe, loss.signature, loss.outs
        self.example_steps = self.recipe.context + EXAMPLE_STEPS
        self._graphs: dict[int, LossGraphs] = {}  # by the K that was asked for
        self.copied: list[tuple[Tensor, Tensor]] = []  # see LossGraphs
        self.with_grad = [leaf.is_differentiable for leaf in self.outs]
        # With a symbol for K; else with a number that no loss expects; else with the caller's.
        self._symbolic = unless_it_fails(lambda: self._trace_loss(None))
        if self._symbolic is not None and is_pinned(self._symbolic.steps):
            self._symbolic = None
        traced, mismatch = self._symbolic, None
        if traced is None:
            try:
                traced = self._trace_loss(self.example_steps, _MOST_CALLS)
            except MaskMismatch as error:
                mismatch = error
            except Exception:
                pass  # see unless_it_fails
        is_of_one_k = traced is None
        if traced is None:
            traced = self._trace_loss(steps)
            if mismatch is not None and any(steps in out.shape for out in self.outs):
                raise ValueError(
                    f"{mismatch} The loss was tried with {self.example_steps} steps; with {steps}, "
                    "as many as another axis of out has, the shapes fit by chance."
                ) from mismatch
            self.example_steps = steps
        self.traced = traced.graph
        with_grad = self._outs_with_grad(traced.graph)
        # The loss has a gradient with respect to none of the outputs.
        self.is_constant = bool(self.outs) and not any(with_grad)
        if not is_of_one_k:  # else: with more steps it may depend on more of them
            self.with_grad = with_grad
        if any(has_dynamic_shape(node) for node in self.traced.graph.nodes):
            with explain_trace_errors("loss", self.recipe.loss):
                self.graphs_for(steps)  # not all gradients can be traced, and none under vmap

    def computes_as(self, other: object) -> bool:
        """Whether it is the same for all K. What was traced for one K is not compared."""
        if not isinstance(other, SegmentLoss):
            return False
        keys = {graphs.key for graphs in (*self._graphs.values(), *other._graphs.values())}
        graph, other_graph = self.traced.graph, other.traced.graph
        if not keys <= {ANY_STEPS} or not has_same_code(graph, other_graph):
            return False
        if not any(isinstance(node.target, CustomGradient) for node in graph.nodes):
            return True
        # A gradient that someone wrote is traced in the joint graphs only.
        if (mine := self._for_any) is None or (others := other._for_any) is None:
            return False
        return has_same_code(mine.joint.graph, others.joint.graph)

    def graphs_for(self, steps: int) -> LossGraphs:
        """The loss of K steps."""
        if steps not in self._graphs:
            self._graphs[steps] = self._make_graphs_for(steps)
        return self._graphs[steps]

    def _make_graphs_for(self, steps: int) -> LossGraphs:
        for_any = self._for_any
        if for_any is not None and not for_any.holds_for(steps):
            for_any = None
        if for_any is not None and steps > 1:
            return for_any
        with TRACING:
            traced = self._trace_loss(steps)
            self._check_outs(traced)
            graphs = self._make_graphs(traced)
            if for_any is not None and self._is_same(graphs, for_any, traced.mode):
                return for_any
        if self._for_any is None and len(self._graphs) + 1 == _MANY_LENGTHS:
            warn(
                "ftbptt: the loss is compiled anew for each number of steps (this is the "
                f"{_MANY_LENGTHS}th): it reads K as a number, as by len(out) or a reshape. "
                "Leave that to mean() or flatten(), or give segments of fewer lengths.",
                RuntimeWarning,
            )
        return graphs

    def _check_outs(self, traced: _TracedLoss) -> None:
        """Raises ValueError for a loss that depends on outputs that it did not depend on before.

        The reverse loop, which is the same for every K, has no gradients by them.
        """
        flags = zip(self._outs_with_grad(traced.graph), self.with_grad, strict=True)
        new = [now and not before for now, before in flags]
        if any(new):
            names = ", ".join(compress(leaf_names("out", self.loss.out_spec), new))
            raise ValueError(
                f"loss: of {traced.steps} steps it depends on {names}, of {self.example_steps} it "
                "does not. Let it use the same outputs whatever the number of steps, some of them "
                "times 0 if need be."
            )

    @cached_property
    def _for_any(self) -> LossGraphs | None:
        """The graphs for any K above 1, if the loss reads K nowhere as a number."""
        traced = self._symbolic
        if traced is None:
            return None
        with TRACING:
            graphs = unless_it_fails(lambda: self._make_graphs(traced))
        return None if graphs is None or is_pinned(graphs.steps) else graphs

    def _is_same(self, for_one: LossGraphs, for_any: LossGraphs, mode: FakeTensorMode) -> bool:
        """Whether the loss does with a single step what it does with more."""
        examples = self._examples(mode, 1, self.loss.axes)
        modules = unless_it_fails(  # it may have shapes that only more steps have
            lambda: [
                trace_function(graphs.joint, examples, mode, functional=True)
                for graphs in (for_one, for_any)
            ]
        )
        return modules is not None and is_same_graph(*modules)

    def _trace_loss(self, steps: int | None, most_calls: float = math.inf) -> _TracedLoss:
        """The loss of one sequence or batch, for K ``steps`` (None: a symbol)."""
        if steps is None:
            return self._trace_loss_in(*symbolic_steps(self.example_steps), most_calls)
        try:
            return self._trace_loss_in(
                FakeTensorMode(allow_non_fake_inputs=True), steps, most_calls
            )
        except RuntimeError as error:
            if not needs_values("loss", error):
                raise
        # It may select as many elements as a mask says, which is a symbol then.
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        return self._trace_loss_in(mode, steps, most_calls)

    def _trace_loss_in(self, mode: FakeTensorMode, length: Any, most_calls: float) -> _TracedLoss:
        def traced() -> fx.GraphModule:
            examples = self._examples(mode, length, [])
            given = dict(zip(("out", "y"), self.loss.trees(examples), strict=True))
            with (
                explain_trace_errors("loss", self.recipe.loss, **given),
                FunctionOverrides("loss"),
                Tried(length, most_calls),
            ):
                return trace_function(
                    self.loss, examples, mode, before_autograd=True, constants=self.constants
                )

        graph = without_effects(
            "loss",
            self.recipe.loss,
            traced,
            "compute such a value from the result of the call, or return it in the step's out.",
            self.constants,
        )
        forbid_reading_places("loss", self.recipe.loss, traced, graph, self.constants)
        forbid_mutation("loss", graph, lambda _: CHANGED_BY_LOSS)
        forbid_trained_captures("loss", graph, PARAMETERS_IN_LOSS)
        _put_value_into_own_memory(graph.graph)
        return _TracedLoss(graph, mode, length)

    def _examples(
        self, mode: FakeTensorMode, steps: Any, axes: Sequence[tuple[Level, list[bool]]]
    ) -> list[Tensor]:
        """Fake outs, ys and mask of K ``steps``, with these axes (see ``FlatLoss``)."""
        shapes = [leaf.shape for leaf in self.loss.leaves]
        for level, flags in axes:
            shapes = [
                (level.size, *shape) if flag else shape
                for shape, flag in zip(shapes, flags, strict=True)
            ]
        with mode:
            return [
                torch.empty((steps, *shape), dtype=leaf.dtype, device=leaf.device)
                for leaf, shape in zip(self.loss.leaves, shapes, strict=True)
            ]

    def _outs_with_grad(self, graph: fx.GraphModule) -> list[bool]:
        """Which outputs the loss has a gradient by."""
        placeholders = graph.graph.find_nodes(op="placeholder")[: len(self.outs)]
        output = graph.graph.output_node()
        passing = [node for node in graph.graph.nodes if node is output or _passes_gradient(node)]
        return [
            node in passing and output in reachable_from([node], passing) for node in placeholders
        ]

    def _make_graphs(self, traced: _TracedLoss) -> LossGraphs:
        with_grad = [i for i, flag in enumerate(self.with_grad) if flag]
        run = traced.graph.forward  # see trace_function

        def joint(*args: Tensor) -> list[Tensor]:
            results, vjp = vjp_by(run, args, with_grad, [0])
            return [*results, *vjp([torch.ones_like(results[0])])]

        return LossGraphs(
            self._over_axes(joint if with_grad else traced.graph, len(with_grad), traced),
            traced.steps,
            partial(self._over_axes, traced.graph, 0, traced),
            self.signature.x[0].device,
            self.copied,
        )

    def _over_axes(
        self,
        function: Callable[..., list[Tensor]],
        grads: int,
        traced: _TracedLoss,
    ) -> fx.GraphModule:
        """The graph of ``function -> [loss, *grads]`` under vmap.

        It is differentiated first, so that vmap meets the operations that ``time_axis.batching``
        has rules for, and K stays a symbol.
        """
        mode, steps = traced.mode, traced.steps
        examples = self._examples(mode, steps, [])
        graph = trace_function(function, examples, mode, differentiated=traced.graph)
        axes, out_dims = self.loss.axes, [0] + [1] * grads
        if not axes:
            return graph
        batched: Callable[..., list[Tensor]] = for_any_length(graph)
        for level, flags in axes:
            batched = vmapped(batched, [level], [flags], 1, out_dims)
            if level is self.signature.mean_axis:
                batched = _mean(batched, level.size)
        examples = self._examples(mode, steps, axes)
        return trace_function(batched, examples, mode, functional=True)


def _put_value_into_own_memory(graph: fx.Graph) -> None:
    """Copies a loss that is a part of what it is given, such as ``out[-1]``."""
    output = graph.output_node()
    (value,) = output.args[0]
    if owner_of(value).op != "call_function":
        with graph.inserting_before(output):
            output.args = ([new_node(graph, aten.clone.default, value)],)
        graph.owning_module.recompile()


def _mean(function: Callable[..., list[Tensor]], size: int) -> Callable[..., list[Tensor]]:
    """From ``[loss, *d_out]`` of each sequence of ``in_dims``: the mean loss, and its gradient."""

    def run(*args: Tensor) -> list[Tensor]:
        values, *grads = function(*args)
        return [values.mean(), *(grad / size for grad in grads)]

    return run


def _passes_gradient(node: Node) -> bool:
    """Whether a gradient can go back through an operation."""
    value = node.meta.get("val")  # None: it checks values, as one_hot and cholesky do
    if isinstance(value, Tensor):
        return differentiable(value) and node.target is not aten.detach.default
    return isinstance(value, (tuple, list))  # else a number, such as K
