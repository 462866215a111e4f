"""The values of a loop that runs, by the nodes of its step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .graphs import Node


@dataclass
class LoopValues:
    """What a loop that has run, up to some block, knows of the nodes of its step."""

    steps: Any
    windows: int
    invariants: dict[Node, Tensor]
    sequences: dict[Node, Tensor]
    finals: dict[Node, Tensor] = field(default_factory=dict)
    totals: dict[Node, Tensor] = field(default_factory=dict)
    row_sums: dict[Node, Tensor] = field(default_factory=dict)

    def sequence(self, node: Node) -> Tensor:
        """The values at all steps, ``[K, ...]``, or ``[K, windows, ...]``."""
        if node not in self.sequences:  # the same at every step
            value = self.invariant(node)
            leading_axes = (self.steps, self.windows) if self.windows else (self.steps,)
            self.sequences[node] = value.expand(*leading_axes, *value.shape)
        return self.sequences[node]

    def total(self, node: Node) -> Tensor:
        """Their sum over the steps."""
        if node not in self.totals:
            self.totals[node] = self.sequence(node).sum(0)
        return self.totals[node]

    def row_sum(self, node: Node) -> Tensor:
        """The sum over steps and rows, ``[N]``: of an LSTM's two biases it is the gradient."""
        if node not in self.row_sums:
            self.row_sums[node] = _sum_of_rows(self.sequence(node))
        return self.row_sums[node]

    def invariant(self, node: Node) -> Tensor:
        """The same at every step. A view of a parameter, or a constant, is computed here."""
        if node not in self.invariants:
            args = torch.fx.node.map_arg(node.args, self.invariant)
            kwargs = torch.fx.node.map_arg(node.kwargs, self.invariant)
            self.invariants[node] = node.target(*args, **kwargs)
        return self.invariants[node]


# From so many rows on, their sum is a product with ones.
_ROWS_FOR_A_PRODUCT = 16


def _sum_of_rows(x: Tensor) -> Tensor:
    """``[K, B, N] -> [N]``; a large batch by products with ones, which read it in order."""
    if x.shape[1] < _ROWS_FOR_A_PRODUCT:
        return x.sum((0, 1))
    ones = x.new_ones(1, 1, x.shape[1]).expand(x.shape[0], 1, x.shape[1])
    return torch.bmm(ones, x).sum(0)
