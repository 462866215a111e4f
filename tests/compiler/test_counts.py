"""Artefacts are counted, not only numbers compared: GEMMs a step, and what is never in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ftbptt import make_train_segment
from ftbptt.compiler.blocks import Block, MapBlock, ScanBlock
from ftbptt.compiler.distribute import distribute
from ftbptt.kernels.lower import make_row_loop
from ftbptt.kernels.rowloop import Product

from ..cells import CELLS, REPRESENTATIVE, problem, slow_but
from ..cells.problems import H

Segments = Callable[..., Any]
GEMMS = {
    "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward",
}  # fmt: skip

# GEMMs for one more step, forward and reverse: the products on the carry's own cycle, each once
# forward and once in reverse. Everything else is batched over the steps, or done once.
PER_STEP = {
    "elman": 2,
    "lstm_readout": 2,
    "stacked_lstm_cells": 6,
    "layer_norm_lstm": 2,
    "peephole_lstm": 2,
    "cho_gru": 4,
    "tied_weights": 2,
    "embedding_tied": 2,
    "weight_normalised": 2,  # its work on the weights alone is not in the loop
    "spectral_scaled": 2,
    "nested_everything": 4,
    "lstm_cell": 2,
    "lstm_cell_unbatched": 2,
    "gru_cell": 2,
    "lstm": 2,
    "gru_3_layers": 6,
    "gru_unbatched": 4,
    "lstm_unbatched": 2,
    "sequence_model": 4,
    "reads_time_twice": 4,
    "fast_weights": 0,  # linear in its carry: no product in the loop
    "conv_lstm": 2,  # of h: forward, and its gradient
    "ema": 0,
    "min_gru": 0,
    "lru_complex": 0,
    "delay_line": 0,
    "ring_buffer": 0,
    "memoryless": 0,
    "exchanged_state": 0,
}
# GEMMs a segment, whatever K: inputs, readouts, and one for each weight.
ONCE = {
    "elman": 6,  # x @ w, h @ v; d of w, u, v; d h from the readout
    "lstm_cell": 3,  # x @ w; d of w, u
    "lstm_readout": 6,
    "stacked_lstm_cells": 11,  # 3 inputs; 6 weights; d of the inputs of layers 2 and 3
    "gru_3_layers": 11,
    "memoryless": 2,
    "conv_lstm": 3,  # of x; d of both parts of the kernel
}


class Made(TorchDispatchMode):
    """Counts the GEMMs that run, and notes the shape of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.gemms += function.overloadpacket.__name__ in GEMMS
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.shapes |= {tuple(leaf.shape) for leaf in tensors}
        return result


def made_by(segment: Any, name: str, steps: int) -> Made:
    segment(*problem(name).data(steps))  # traced and built
    with Made() as made:
        segment(*problem(name).data(steps))
    return made


@pytest.mark.parametrize("name", PER_STEP)
def test_gemms(name: str, segments: Segments) -> None:
    segment = segments(name, "eager")
    seven, eight = (made_by(segment, name, steps).gemms for steps in (7, 8))
    assert eight - seven == PER_STEP[name]
    if name in ONCE:
        assert seven - 7 * PER_STEP[name] == ONCE[name]


@pytest.mark.parametrize(
    "name", slow_but(REPRESENTATIVE, [name for name in CELLS if name != "unused_parameters"])
)
def test_no_gradient_for_each_step_in_memory(name: str, segments: Segments) -> None:
    """A weight's gradient is one contraction over steps and rows, never ``[K, *weight]``."""
    steps = 13
    made = made_by(segments(name, "eager"), name, steps)
    assert len(made.shapes) > 3
    for weight in tree_leaves(problem(name).params):
        if weight.dim() == 2:
            assert (steps, *weight.shape) not in made.shapes
            assert (steps, *weight.shape[::-1]) not in made.shapes


def test_evaluate_keeps_nothing_for_a_backward(segments: Segments) -> None:
    segment, given = segments("lstm_readout", "eager"), problem("lstm_readout")
    segment.evaluate(*given.data(7))
    segment(*given.data(7))
    with Made() as graded:
        segment(*given.data(7))
    with Made() as evaluated:
        segment.evaluate(*given.data(7))
    assert evaluated.gemms == 7 + 2
    assert graded.gemms == 2 * 7 + 6


def test_rows_reset_at_no_gemm_of_their_own(segments: Segments) -> None:
    segment, given = segments("lstm_cell", "eager"), problem("lstm_cell")
    reset = torch.zeros(7, 3, dtype=torch.bool)
    segment(*given.data(7), reset=reset)
    segment(*given.data(7))
    with Made() as without:
        segment(*given.data(7))
    with Made() as within:
        segment(*given.data(7), reset=reset)
    assert within.gemms == without.gemms


def blocks_of(name: str, phase: str) -> list[Block]:
    """Of a cell's segment, "forward" or "reverse"."""
    given = problem(name)
    segment = make_train_segment(given.step, given.loss, backend="eager")
    plan, _ = segment.plan(*given.data(3))
    return distribute(getattr(plan.loops, phase)).blocks


def scans_of(name: str) -> tuple[ScanBlock, ScanBlock]:
    """The loops of a cell's segment, forward and reverse."""
    forward, reverse = (
        [block for block in blocks_of(name, phase) if isinstance(block, ScanBlock)]
        for phase in ("forward", "reverse")
    )
    return forward[0], reverse[0]


def operations_of(block: MapBlock | ScanBlock) -> set[str]:
    called = [node for node in block.module.graph.nodes if node.op == "call_function"]
    return {node.target.__name__.partition(".")[0] for node in called}


def test_gradients_of_gates_leave_the_loop_once() -> None:
    """Joined, for the weight's GEMM and the bias's sum alike."""
    _, reverse = scans_of("lstm_readout")
    assert [node.target for node in reverse.emits] == [torch.ops.aten.cat.default]


def test_a_kernel_adds_projections_where_it_uses_them() -> None:
    """Nothing as wide as all gates is computed, but by the product."""
    forward, _ = scans_of("lstm_readout")
    operations = make_row_loop(forward).operations
    widths = {op.value.size for op in operations if not isinstance(op, Product)}
    assert widths == {H}


def test_the_state_after_a_step_is_read_where_it_is_kept() -> None:
    """The readout's weight needs h of after each step: the h of before the next, not o tanh(c)."""
    first = blocks_of("lstm_readout", "reverse")[0]
    assert isinstance(first, MapBlock)
    assert operations_of(first) == {"mm", "permute"}


def test_all_chunks_of_a_projection_are_cut_in_the_loop() -> None:
    """Its bias is added there too: before the loop nothing is left but the product."""
    first = blocks_of("gru_cell", "forward")[0]
    assert isinstance(first, MapBlock)
    assert operations_of(first) == {"mm", "permute"}


def test_gates_are_joined_once() -> None:
    """Two gates of a GRU, joined for the state's weight, lie among the three for the input's."""
    _, reverse = scans_of("cho_gru")
    (joined,) = reverse.emits
    assert joined.target is torch.ops.aten.cat.default
    assert len(joined.args[0]) == 3
    after = blocks_of("cho_gru", "reverse")[-1]
    assert isinstance(after, MapBlock)
    assert operations_of(after) <= {"slice", "permute"}
