"""Windows of a reverse loop that run together: a sliding window in the gradient.

Each step's loss reaches back over the same number of steps, so there are about as many reverse
loops as steps. They differ only in the steps they read, so they run as one, with the windows as an
additional axis of the carry. A reverse loop is linear in the gradients: the results of the windows'
recurrences are added up step by step, and the rest (which includes the parameters' gradients) is
done once for all windows, on these totals.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._compat.tracing import FakeTensorMode
from .._trees import differentiable
from .blocks import DistributedLoop, ScanBlock
from .graphs import Node, aten, needed_for, owner_of, reachable_from, value_of
from .run_loop import RunScan
from .split_recurrences import SplitLoop
from .time_axis.batching import for_any_length
from .tracing.custom_gradient import CustomGradient
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


# What is linear in its first operand, as are the gradients of operations and all views; in each of
# its first two operands, but not in both; and in what it adds or puts together, at these places.
_LINEAR = {
    "neg", "sum", "mean", "clone", "_to_copy", "div", "cumsum", "flip", "roll", "repeat", "index",
    "index_select", "gather", "constant_pad_nd", "diagonal", "diag_embed", "tril", "triu", "unfold",
    "real", "imag", "_conj", "conj_physical", "view_as_real", "view_as_complex", "_fft_c2c",
    "_fft_r2c", "_fft_c2r",
}  # fmt: skip
_PRODUCTS = {"mul", "mm", "bmm", "convolution", "input_gradient", "weight_gradient"}
_SUMS = {
    "add": (0, 1), "sub": (0, 1), "cat": (0,), "stack": (0,), "where": (1, 2), "complex": (0, 1),
    "slice_scatter": (0, 1), "select_scatter": (0, 1), "diagonal_scatter": (0, 1),
    "scatter": (0, 3), "scatter_add": (0, 3), "index_add": (0, 3), "index_put": (0, 2),
}  # fmt: skip


def check_is_linear(split: SplitLoop, step: fx.Graph, d_outs: Sequence[Node]) -> None:
    """Raises ValueError if a loop does more with what its recurrences return than add and scale it.

    It is given the totals of all windows, and ``d_outs``. Autograd's own gradients are linear,
    those that someone wrote (torch.autograd.Function) may do anything, such as clip.
    """
    if not any(isinstance(node.target, CustomGradient) for node in step.nodes):
        return
    rest, totals = split.rest.loop, split.recurrences.loop.stacked
    needed = needed_for(rest.summed, stop=[*rest.sequences, *rest.invariants])
    nodes = [node for node in rest.graph.nodes if node in needed.difference(totals)]
    of_totals, gradients = reachable_from(totals, nodes), reachable_from([*totals, *d_outs], nodes)
    for node in nodes:
        if node.op != "call_function" or node not in gradients:
            # Else the gradient of a parameter would be added once, not for each window.
            is_linear = node not in rest.summed or node in gradients or _is_zero(node)
        else:
            is_linear = _adds_only(node, gradients) and (
                node not in of_totals or _is_linear(node, of_totals)
            )
        if not is_linear:
            raise ValueError(
                "window: a gradient in the step is not linear, as of a torch.autograd.Function "
                f"that clips it, or is not known to be ({node.target}), but the gradients of "
                "windows are added up there. "
                "train_stream(..., k1=1, k2=...) runs each window by itself."
            )


def _is_linear(node: Node, varying: Container[Node]) -> bool:
    name, read = _name_of(node), [arg in varying for arg in node.args[:2]]
    if name in _SUMS:
        return name != "where" or not read[0]
    if name in _PRODUCTS:
        return read != [True, True]
    if name == "_to_copy" and not differentiable(value_of(node)):
        return False
    is_known = name in _LINEAR or "_backward" in name or owner_of(node) is not node
    return is_known and read[1:] != [True] and node.kwargs.get("rounding_mode") is None


def _adds_only(node: Node, gradients: Container[Node]) -> bool:
    """Whether all that a sum adds up is a gradient, or zero."""
    places = _SUMS.get(_name_of(node), ())
    operands = [node.args[i] for i in places if i < len(node.args)]
    operands = [arg for own in operands for arg in (own if isinstance(own, list) else [own])]
    return all(arg in gradients or _is_zero(arg) for arg in operands)


def _is_zero(value: Any) -> bool:
    if not isinstance(value, fx.Node):
        return bool(value == 0)
    owner = owner_of(value)
    if owner.target in (aten.full.default, aten.full_like.default):
        return bool(owner.args[1] == 0)
    if owner.target is aten.scalar_tensor.default:
        return bool(owner.args[0] == 0)
    return owner.target in (aten.zeros.default, aten.zeros_like.default)


def _name_of(node: Node) -> str:
    """``add`` for ``aten.add.Tensor``, and the name of a function."""
    return str(getattr(node.target, "overloadpacket", node.target).__name__)


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
