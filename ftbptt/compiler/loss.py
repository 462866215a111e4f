"""The caller's loss as graphs over the whole segment: its value, and its gradient by the outputs.

They hold for any K. A loss that reads K as a number (``out.reshape(64, -1)``) is noticed by the
guards that tracing leaves, and gets graphs of its own for each K; so does one that torch cannot
trace with a symbol. The symbol is above 1, which torch decides without a guard: for a single step
the loss is traced again, and the graphs are compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx

from .._compat import FakeTensorMode, holds_for, is_pinned, symbolic_steps
from .._layout import Layout
from .._loss import segment_loss
from .._trees import TreeSpec, tree_unflatten
from .function_overrides import Composed
from .graphs import is_same_graph, reachable_from, value_of, vjp_by
from .signature import Leaf, Level, Recipe, Signature, differentiable, under, vmapped
from .time_batching import for_any_length
from .trace import TRACING, forbid_trained_captures, own_words, trace_function


@dataclass
class LossGraphs:
    """``value(*outs, *ys, *mask) -> [loss]``, ``joint(...) -> [loss, *d_out]``; time is axis 0."""

    joint: fx.GraphModule
    steps: Any  # K: a symbol, or a number if the graphs hold for that one only
    trace_value: Callable[[], fx.GraphModule]

    @cached_property
    def value(self) -> fx.GraphModule:
        """Traced when it is first needed: training does without."""
        with TRACING:
            return self.trace_value()

    def holds_for(self, steps: int) -> bool:
        return steps == self.steps if isinstance(self.steps, int) else holds_for(self.steps, steps)


@dataclass
class Values:
    """``graph(*outs, *ys, *mask) -> [loss]`` without the axes of vmap, traced for K ``steps``."""

    graph: fx.GraphModule
    mode: FakeTensorMode
    steps: Any


_SOME_STEPS = 64
_MANY_LENGTHS = 5  # more than a stream and its ragged end have


class LossTracer:
    """Traces the loss for outputs like ``outs`` (fake, of one step, without the axes of vmap).

    ``steps`` is the K of the call that it is traced for.
    """

    def __init__(
        self,
        recipe: Recipe,
        signature: Signature,
        out_spec: TreeSpec,
        outs: Sequence[Tensor],
        steps: int,
    ) -> None:
        self.recipe, self.signature, self.out_spec = recipe, signature, out_spec
        self.levels = signature.levels
        # For what does not depend on K, and where torch needs a number in place of the symbol.
        self.example_steps = recipe.context + _SOME_STEPS
        mask = [] if signature.mask is None else [signature.mask]
        batched = (True,) * len(self.levels)
        shared = signature.shared is not None
        shapes = [o.shape[1:] if shared else o.shape for o in outs]
        self.outs = [
            Leaf(tuple(shape), o.dtype, o.device, batched, shared)
            for shape, o in zip(shapes, outs, strict=True)
        ]
        self.leaves = [*self.outs, *signature.y, *mask]
        self.graphs: dict[int | None, LossGraphs] = {}
        self.tried = False  # whether they hold for more than one K
        self.fits: dict[int, bool] = {}  # whether those do for a K that was asked for
        self._for_any: Values | None = None
        # torch cannot trace everything with a symbol, and a loss may be written for one K; what
        # is wrong in itself fails again.
        with suppress(Exception):
            self._for_any = self._values(None)
        first = self._for_any
        if first is None:
            with suppress(Exception):
                first = self._values(self.example_steps)
        if first is None:
            self.example_steps = steps
            first = self._values(steps)
        self.graded = self._graded(first.graph)

    def graphs_for(self, steps: int) -> tuple[int | None, LossGraphs]:
        """The loss of K steps, and the key it is known by: None if it holds for more than one K."""
        if not self.tried:
            with TRACING:
                if self._for_any is not None and not is_pinned(self._for_any.steps):
                    with suppress(Exception):
                        graphs = self._trace(self._for_any)
                        if not is_pinned(graphs.steps):
                            self.graphs[None] = graphs
                self.tried = True
        if steps not in self.fits:
            self.fits[steps] = self._fits(steps)
        if self.fits[steps]:
            return None, self.graphs[None]
        if steps not in self.graphs:
            with TRACING:
                self.graphs[steps] = self._trace(self._values(steps))
            if None not in self.graphs and len(self.graphs) == _MANY_LENGTHS:
                warnings.warn(
                    "ftbptt: the loss is compiled anew for each number of steps (this is the "
                    f"{len(self.graphs)}th): it reads K as a number, as by len(out) or a reshape. "
                    "Leave that to mean() or flatten(), or give segments of fewer lengths.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return steps, self.graphs[steps]

    def _fits(self, steps: int) -> bool:
        """Whether the graphs for more than one K are right for this one."""
        if None not in self.graphs or not self.graphs[None].holds_for(steps):
            return False
        return steps > 1 or self._is_same_for_one

    @cached_property
    def _is_same_for_one(self) -> bool:
        """Whether the loss does with a single step what it does with more."""
        with TRACING:
            plain = self._values(1)
            self.graphs[1] = self._trace(plain)
            examples = self._examples(plain.mode, 1, self._axes())
            try:
                own, other = (
                    trace_function(self.graphs[key].joint, examples, plain.mode, functional=True)
                    for key in (1, None)
                )
            except Exception:  # shapes that only more steps have
                return False
        return is_same_graph(own, other)

    def _values(self, steps: int | None) -> Values:
        """The loss of one sequence or batch, from a call of the caller's function."""
        mode, length = FakeTensorMode(allow_non_fake_inputs=True), steps
        if steps is None:
            mode, length = symbolic_steps(self.example_steps)
        s, n_out, n_y = self.signature, len(self.outs), len(self.signature.y)
        layout = Layout(s.time_dim)

        def value(*args: Tensor) -> list[Tensor]:
            out = tree_unflatten(list(args[:n_out]), self.out_spec)
            leaves = list(args[n_out : n_out + n_y])
            y = None if s.specs[3] is None else tree_unflatten(leaves, s.specs[3])
            mask = args[n_out + n_y] if s.mask is not None else None
            mask = mask if mask is None or mask.dim() < 2 else layout.time_back(mask)
            back = layout.time_back
            y = y if y is None else back(y)
            recipe = self.recipe
            with under(s.autocast):
                loss = segment_loss(recipe.loss, back(out), y, mask, s.time_dim, recipe.context)
            return [loss]

        with own_words("loss", self.recipe.loss), Composed("loss"):
            graph = trace_function(
                value, self._examples(mode, length, []), mode, before_autograd=True
            )
        captures = [getattr(graph, n.target) for n in graph.graph.find_nodes(op="get_attr")]
        forbid_trained_captures(
            "loss",
            captures,
            "A loss has no parameters of its own: compute with it in the step, whose out the loss "
            "gets, or detach it.",
        )
        return Values(graph, mode, length)

    def _examples(
        self, mode: FakeTensorMode, steps: Any, axes: Sequence[tuple[Level, list[bool]]]
    ) -> list[Tensor]:
        shapes = [leaf.shape for leaf in self.leaves]
        for level, flags in axes:
            shapes = [
                (level.size, *shape) if flag else shape
                for shape, flag in zip(shapes, flags, strict=True)
            ]
        with mode:
            return [
                torch.empty((steps, *shape), dtype=leaf.dtype, device=leaf.device)
                for leaf, shape in zip(self.leaves, shapes, strict=True)
            ]

    def _graded(self, graph: fx.GraphModule) -> list[bool]:
        """Which outputs the loss reads and can have a gradient."""
        placeholders = graph.graph.find_nodes(op="placeholder")[: len(self.outs)]
        output = graph.graph.output_node()
        return [
            differentiable(value_of(node)) and output in reachable_from([node], graph.graph.nodes)
            for node in placeholders
        ]

    def _trace(self, plain: Values) -> LossGraphs:
        graded = [i for i, wanted in enumerate(self.graded) if wanted]

        def value(*args: Tensor) -> list[Tensor]:
            return list(plain.graph(*args))

        def joint(*args: Tensor) -> list[Tensor]:
            results, pull = vjp_by(plain.graph, args, graded, [0])
            return [*results, *pull([torch.ones_like(results[0])])]

        return LossGraphs(
            self._over_axes(joint if graded else value, len(graded), plain),
            plain.steps,
            partial(self._over_axes, value, 0, plain),
        )

    def _over_axes(
        self,
        function: Callable[..., list[Tensor]],
        grads: int,
        plain: Values,
    ) -> fx.GraphModule:
        """The graph of ``function -> [loss, *grads]`` under vmap, differentiated before that.

        So its operations are those that have a rule of our own, and K stays a symbol.
        """
        mode, steps = plain.mode, plain.steps
        examples = self._examples(mode, steps, [])
        graph = trace_function(function, examples, mode, differentiated=plain.graph)
        axes, out_dims = self._axes(), [0] + [1] * grads
        if not axes:
            return graph
        batched: Callable[..., list[Tensor]] = for_any_length(graph)
        if self.signature.shared is not None:
            (level, shared), *axes = axes
            batched = _mean(vmapped(batched, [level], [shared], 1, out_dims), level.size)
        over_levels = vmapped(batched, self.levels, [flags for _, flags in axes], 1, out_dims)
        examples = self._examples(mode, steps, self._axes())
        return trace_function(over_levels, examples, mode, functional=True)

    def _axes(self) -> list[tuple[Level, list[bool]]]:
        """The axes beside time, from the inside, and which leaves have them."""
        s = self.signature
        shared = [] if s.shared is None else [(s.shared, [leaf.shared for leaf in self.leaves])]
        return [
            *shared,
            *(
                (level, [leaf.batched[i] for leaf in self.leaves])
                for i, level in enumerate(s.levels)
            ),
        ]


def _mean(function: Callable[..., list[Tensor]], size: int) -> Callable[..., list[Tensor]]:
    """The mean over the sequences of ``in_dims``, from each one's ``[loss, *d_out]``."""

    def run(*args: Tensor) -> list[Tensor]:
        values, *grads = function(*args)
        return [values.mean(), *(grad / size for grad in grads)]

    return run
