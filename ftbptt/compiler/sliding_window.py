"""Windows of a reverse loop that run together: a sliding window in the gradient.

Each step's loss reaches back over the same number of steps, so there are about as many reverse
loops as steps. They differ only in the steps they read, so they run as one, with the windows as an
additional axis of the carry. A reverse loop is linear in the gradients: the results of the windows'
recurrences are added up step by step, and the rest (which includes the parameters' gradients) is
done once for all windows, on these totals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat.tracing import FakeTensorMode
from .blocks import DistributedLoop, ScanBlock
from .graphs import Node, aten, needed_for, reachable_from, value_of
from .run_loop import RunScan
from .split_recurrences import SplitLoop
from .time_axis.batching import for_any_length
from .tracing.trace import trace_function


class WindowBatch(NamedTuple):
    """Windows that run at once, each ``stride`` steps after the one before.

    ``start`` is the first step of the first window, ``losses`` how many of a window's last steps
    have a loss.
    """

    start: int
    windows: int
    losses: int


@dataclass(frozen=True)
class Sliding:
    """A window of ``length`` steps starts every ``stride`` steps; its last ``stride`` have a loss.

    The first windows start before the segment does, so sequences are padded. The values of the
    padding do not matter: no gradient comes back from it.
    """

    length: int
    stride: int

    def batches(self, first: int, steps: int, count: int) -> list[WindowBatch]:
        """The windows whose losses are at the steps from ``first`` on, up to ``count`` at once."""
        full_windows = (steps - first) // self.stride
        batches = []
        for w in range(0, full_windows, count):
            start = first + (w + 1) * self.stride - self.length
            batches.append(WindowBatch(start, min(count, full_windows - w), self.stride))
        losses_left = steps - first - full_windows * self.stride
        if losses_left:
            batches.append(WindowBatch(steps - self.length, 1, losses_left))
        return batches

    def padded(self, sequence: Tensor, count: int) -> Tensor:
        """``[K, ...]`` with room for ``count`` windows at its first and at its last step.

        Step t is at index ``t + length - 1``.
        """
        last = len(sequence) - 1
        end = len(sequence) + count * self.stride + self.length
        steps = torch.arange(1 - self.length, end, device=sequence.device)
        return sequence.index_select(0, steps.clamp(0, last))

    def part(self, padded: Tensor, batch: WindowBatch, count: int) -> Tensor:
        """The steps of a padded sequence that ``count`` windows of the batch read."""
        return padded.narrow(
            0, batch.start + self.length - 1, self.length + (count - 1) * self.stride
        )

    def side_by_side(self, part: Tensor) -> Tensor:
        """The steps of windows as a view ``[length, windows, ...]``."""
        return part.unfold(0, self.length, self.stride).movedim(-1, 0)

    def with_loss(self, d_out: Tensor, batch: WindowBatch, count: int) -> Tensor:
        """The gradients of a padded output for each window, ``[length, windows, ...]``.

        They are 0 at the steps of a window without a loss.
        """
        d_windows = d_out.new_zeros((self.length, count, *d_out.shape[1:]))
        all_steps = self.side_by_side(self.part(d_out, batch, count))
        has_loss = slice(self.length - batch.losses, None), slice(batch.windows)
        d_windows[has_loss] = all_steps[has_loss]
        return d_windows

    def add(self, total: Tensor, batch: WindowBatch, values: Tensor) -> None:
        """Adds the windows' values, ``[length, windows, ...]``, to the steps of a padded total."""
        for i in range(self.length):
            first = batch.start + self.length - 1 + i
            steps = total[first : first + (batch.windows - 1) * self.stride + 1 : self.stride]
            steps += values[i, : batch.windows]


# What a gradient someone wrote (torch.autograd.Function) may do to it, as to clip it.
_NOT_LINEAR = {
    aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.Tensor,
    aten.sign.default, aten.abs.default, aten.tanh.default, aten.sigmoid.default,
    aten.relu.default, aten.hardtanh.default, aten.round.default, aten.sqrt.default,
    aten.rsqrt.default, aten.reciprocal.default, aten.exp.default, aten.log.default,
    aten.pow.Tensor_Scalar, aten.maximum.default, aten.minimum.default, aten.amax.default,
    aten.linalg_vector_norm.default, aten.isnan.default, aten.isfinite.default,
}  # fmt: skip
_PRODUCTS = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}
_COMPARISONS = {"gt", "ge", "lt", "le", "eq", "ne"}


def check_is_linear(split: SplitLoop) -> None:
    """Raises ValueError if a loop does more with what its recurrences return than add and scale it.

    It is given the totals of all windows.
    """
    rest, totals = split.rest.loop, split.recurrences.loop.stacked
    needed = needed_for(rest.summed, stop=[*rest.sequences, *rest.invariants])
    nodes = [node for node in rest.graph.nodes if node in needed.difference(totals)]
    varying = reachable_from(totals, nodes)
    for node in nodes:
        read = [arg in varying for arg in node.args[:2]]
        is_linear = not (
            (any(read) and (node.target in _NOT_LINEAR or _is_comparison(node)))
            or (all(read) and node.target in _PRODUCTS)
            or (node.target is aten.div.Tensor and read[1])
            or (node.target is aten.where.self and read[0])
        )
        if not is_linear:
            raise ValueError(
                "window: a gradient in the step is not linear, as of a torch.autograd.Function "
                f"that clips it ({node.target}), but the gradients of windows are added up there. "
                "train_stream(..., k1=1, k2=...) runs each window by itself."
            )


def _is_comparison(node: Node) -> bool:
    package, _, name = str(node.target).partition(".")
    return package == "aten" and name.partition(".")[0] in _COMPARISONS


def on_windows(run_scan: RunScan, loop: DistributedLoop, windows: int) -> RunScan:
    """Runs the loop's scan blocks on many windows at once: their values are ``[windows, ...]``."""
    widened = {id(b): _widened(b, windows) for b in loop.blocks if isinstance(b, ScanBlock)}

    def run(block: ScanBlock, *args: Any) -> Any:
        return run_scan(widened[id(block)], *args)

    return run


def _widened(block: ScanBlock, windows: int) -> ScanBlock:
    """The block with an axis of windows in front of its sequences and carries."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    n_inv, n_carries = len(block.invariants), len(block.carries)
    with mode:
        examples = [
            torch.empty(
                (*(() if i < n_inv else (windows,)), *value_of(node).shape),
                dtype=value_of(node).dtype,
                device=value_of(node).device,
            )
            for i, node in enumerate((*block.invariants, *block.sequences, *block.carries))
        ]
    dims = (None,) * n_inv + (0,) * (len(examples) - n_inv)
    module = trace_function(
        torch.func.vmap(for_any_length(block.module), dims), examples, mode, functional=True
    )
    placeholders = module.graph.find_nodes(op="placeholder")
    results = list(module.graph.output_node().args[0])
    first_carry = n_inv + len(block.sequences)
    return replace(
        block,
        carries=placeholders[first_carry:],
        next_carries=results[:n_carries],
        invariants=placeholders[:n_inv],
        sequences=placeholders[n_inv:first_carry],
        emits=results[n_carries:],
        module=module,
    )
