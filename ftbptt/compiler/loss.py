"""The caller's loss as graphs over the whole segment: its value, and its gradient by the outputs.

They hold for any K. A loss that reads K as a number (``out.reshape(64, -1)``) is noticed by the
guards that tracing leaves, and gets graphs of its own for each K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._compat import FakeTensorMode, TreeSpec, holds_for, symbolic_steps, tree_unflatten
from .._layout import Layout
from .._loss import segment_loss
from .graphs import reachable_from
from .signature import Leaf, Recipe, Signature, vmapped
from .trace import own_words, trace_function


@dataclass
class LossGraphs:
    """``value(*outs, *ys, *mask) -> [loss]``, ``joint(...) -> [loss, *d_out]``; time is axis 0."""

    value: fx.GraphModule
    joint: fx.GraphModule
    steps: Any  # K: a symbol, or a number if the graphs hold for that one only

    def holds_for(self, steps: int) -> bool:
        return steps == self.steps if isinstance(self.steps, int) else holds_for(self.steps, steps)


class LossTracer:
    """Traces the loss for outputs like ``outs`` (fake, of one step, without the axes of vmap)."""

    def __init__(
        self, recipe: Recipe, signature: Signature, out_spec: TreeSpec, outs: Sequence[Tensor]
    ) -> None:
        self.recipe, self.signature, self.out_spec = recipe, signature, out_spec
        self.levels = signature.levels
        mask = [] if signature.mask is None else [signature.mask]
        self.rest: list[Leaf] = [*signature.y, *mask]
        batched = (True,) * len(self.levels)
        self.outs = [Leaf(tuple(o.shape), o.dtype, o.device, batched) for o in outs]
        self.graphs: dict[int | None, LossGraphs] = {}
        first = self._value_graph(*self._steps(None))
        self.graded = self._graded(first)

    def graphs_for(self, steps: int) -> tuple[int | None, LossGraphs]:
        """The loss of K steps, and the key it is known by: None if it holds for more than one K."""
        if None not in self.graphs:
            self.graphs[None] = self._trace(None)
        if self.graphs[None].holds_for(steps):
            return None, self.graphs[None]
        if steps not in self.graphs:
            self.graphs[steps] = self._trace(steps)
        return steps, self.graphs[steps]

    def _steps(self, steps: int | None) -> tuple[FakeTensorMode, Any]:
        if steps is None:
            return symbolic_steps()
        return FakeTensorMode(allow_non_fake_inputs=True), steps

    def _value_graph(self, mode: FakeTensorMode, steps: Any) -> fx.GraphModule:
        """The loss without levels of vmap, from a call of the caller's function."""
        s, n_out, n_y = self.signature, len(self.outs), len(self.signature.y)
        layout = Layout(s.time_dim)

        def value(*args: Tensor) -> list[Tensor]:
            out = tree_unflatten(list(args[:n_out]), self.out_spec)
            leaves = list(args[n_out : n_out + n_y])
            y = None if s.specs[3] is None else tree_unflatten(leaves, s.specs[3])
            mask = args[n_out + n_y] if s.mask is not None else None
            mask = mask if mask is None or mask.dim() < 2 else layout.time_back(mask)
            back = layout.time_back
            return [
                segment_loss(
                    self.recipe.loss, back(out), y if y is None else back(y), mask, s.time_dim
                )
            ]

        function: Any = value
        if s.shared is not None:
            flags = [True] * n_out + [leaf.shared for leaf in self.rest]
            per_sequence = vmapped(value, [s.shared], [flags], dim=1)

            def function(*args: Tensor) -> list[Tensor]:
                return [per_sequence(*args)[0].mean()]

        with own_words("loss", self.recipe.loss):
            return trace_function(function, self._examples(mode, steps), mode, before_autograd=True)

    def _examples(self, mode: FakeTensorMode, steps: Any, *, levels: bool = False) -> list[Tensor]:
        s, examples = self.signature, []
        with mode:
            for leaf in [*self.outs, *self.rest]:
                shape = [s.shared.size, *leaf.shape] if s.shared and leaf.shared else leaf.shape
                if levels:
                    for level, flag in zip(self.levels, leaf.batched, strict=True):
                        shape = [level.size, *shape] if flag else shape
                examples.append(torch.empty((steps, *shape), dtype=leaf.dtype, device=leaf.device))
        return examples

    def _graded(self, graph: fx.GraphModule) -> list[bool]:
        """Which outputs the loss reads and can have a gradient."""
        placeholders = graph.graph.find_nodes(op="placeholder")[: len(self.outs)]
        output = graph.graph.output_node()
        return [
            (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
            and output in reachable_from([node], graph.graph.nodes)
            for leaf, node in zip(self.outs, placeholders, strict=True)
        ]

    def _trace(self, steps: int | None) -> LossGraphs:
        mode, symbol = self._steps(steps)
        plain = self._value_graph(mode, symbol)
        graded = [i for i, wanted in enumerate(self.graded) if wanted]
        leaves = [*self.outs, *self.rest]
        flags = [[leaf.batched[i] for leaf in leaves] for i in range(len(self.levels))]

        def joint(*args: Tensor) -> list[Tensor]:
            given = list(args)

            def primal(*outs: Tensor) -> Tensor:
                for i, out in zip(graded, outs, strict=True):
                    given[i] = out
                return plain(*given)[0]

            if not graded:
                return list(plain(*given))
            value, pull, *_ = torch.func.vjp(primal, *(given[i] for i in graded))
            return [value, *pull(torch.ones_like(value))]

        examples = self._examples(mode, symbol, levels=True)
        out_dims = [0] + [1] * len(graded)
        over_levels = vmapped(joint, self.levels, flags, dim=1, out_dims=out_dims)
        value_over_levels = vmapped(lambda *a: list(plain(*a)), self.levels, flags, 1, [0])
        return LossGraphs(
            trace_function(value_over_levels, examples, mode),
            trace_function(over_levels, examples, mode),
            symbol,
        )
