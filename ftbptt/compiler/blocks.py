"""The blocks of a loop: what backends run, and kernels are made from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from .adjoint import Loop
from .graphs import Node, value_of
from .time_axis.reduction import TimeSums


@dataclass
class MapBlock:
    """A block without a carry: all K steps in one batched call.

    ``module(*invariants, *sequences) -> [*outputs]`` is one step of it, and ``batched`` the same
    in operations that vmap well over time.
    """

    invariants: list[Node]
    sequences: list[Node]
    outputs: list[Node]
    module: fx.GraphModule
    batched: fx.GraphModule


@dataclass(eq=False)
class ScanBlock:
    """A true recurrence: K dependent steps.

    ``module(*invariants, *sequences, *carries) -> [*next carries, *emits]`` is one step of it.
    ``history`` flags the carries whose value at every step is read elsewhere. ``linear``: the next
    carry is elementwise affine in the carry. ``totals``, which follow the emits in the module, are
    sums over the batch that are returned summed over the steps.
    """

    carries: list[Node]
    next_carries: list[Node]
    invariants: list[Node]
    sequences: list[Node]
    emits: list[Node]
    history: list[bool]
    linear: bool
    module: fx.GraphModule
    totals: list[Node] = field(default_factory=list)
    reverse: bool = False  # from the last step to the first

    @property
    def with_history(self) -> list[Node]:
        """The carries whose value at every step is read elsewhere."""
        return [carry for carry, flag in zip(self.carries, self.history, strict=True) if flag]

    @property
    def device(self) -> torch.device:
        return value_of(self.carries[0]).device


@dataclass
class ShiftBlock:
    """A carry that is a value of the previous step (a delay line): its sequence is a shift."""

    carry: Node
    source: Node


Block = MapBlock | ScanBlock | ShiftBlock


@dataclass
class DistributedLoop:
    """A loop as blocks in the order they run, and the sums over its steps.

    ``hoisted(*invariants) -> values of hoisted_nodes`` runs once, before the blocks.
    """

    loop: Loop
    hoisted_nodes: list[Node]
    hoisted: fx.GraphModule | None
    blocks: list[Block]
    sums: TimeSums
