"""A scan block by itself: the kernel of a step against the same steps in a Python loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ftbptt._compat.tracing import FakeTensorMode, make_fx
from ftbptt.backends import EAGER, FUSED
from ftbptt.compiler.blocks import ScanBlock
from ftbptt.compiler.tracing.trace import trace_function
from ftbptt.kernels.cpu import loop
from ftbptt.kernels.cpu.loop import print_cpp
from ftbptt.kernels.lower import make_row_loop

from ..oracle import SMALLEST_SCALE

# (next carries, emits) = step(invariants, x_t, carries); each is a list of tensors.
ScanStep = Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]
KERNEL = "one generated C++ kernel for all steps"


def scan_of(
    step: ScanStep,
    invariants: Sequence[Tensor],
    sequences: Sequence[Tensor],
    carries: Sequence[Tensor],
    history: Sequence[bool] | None = None,
    *,
    as_written: bool = False,
) -> ScanBlock:
    """The block of a step, of which nothing is taken out of the loop. Sequences are [K, ...].

    ``as_written``: in the operations that the step calls, none of them decomposed.
    """
    n_inv, n_seq, n_carries = len(invariants), len(sequences), len(carries)

    def flat(*leaves: Tensor) -> list[Tensor]:
        own = leaves[:n_inv], leaves[n_inv : n_inv + n_seq], leaves[n_inv + n_seq :]
        return tree_leaves(tuple(map(list, step(*own))))

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = [*invariants, *(s[0] for s in sequences), *carries]
    examples = [mode.from_tensor(t) for t in given]
    if as_written:
        with mode:
            module = make_fx(torch.func.functionalize(flat))(*examples)
    else:  # as the engine does: a step's graph first, then what of it is left behind autograd
        module = trace_function(flat, examples, mode, before_autograd=True)
        module = trace_function(module, examples, mode)
    nodes = module.graph.find_nodes(op="placeholder")
    outputs = list(module.graph.output_node().args[0])
    return ScanBlock(
        carries=nodes[n_inv + n_seq :],
        next_carries=outputs[:n_carries],
        invariants=nodes[:n_inv],
        sequences=nodes[n_inv : n_inv + n_seq],
        emits=outputs[n_carries:],
        history=list(history or [True] * n_carries),
        linear=False,
        module=module,
    )


class Scan:
    """A step's block, to be run by its kernel and by a Python loop."""

    def __init__(
        self,
        step: ScanStep,
        invariants: Sequence[Tensor],
        sequences: Sequence[Tensor],
        carries: Sequence[Tensor],
        history: Sequence[bool] | None = None,
        *,
        as_written: bool = False,
    ) -> None:
        self.block = scan_of(step, invariants, sequences, carries, history, as_written=as_written)
        self.given = list(invariants), list(sequences), list(carries)

    def run(self, backend: Any, *given: Sequence[Tensor], reverse: bool = False) -> list[Tensor]:
        """``[*finals, *histories, *emits]``, of the tensors it was made of or others like them."""
        own = [list(tensors) for tensors in given or self.given]
        assert _shapes(own) == _shapes(self.given), "a block is for rows of one number"
        steps = own[1][0].shape[0]
        result = backend.run_scan(replace(self.block, reverse=reverse), *own, steps)
        histories = [history for history in result.histories if history is not None]
        return [*result.finals, *histories, *result.emits, *result.totals]

    def fused(self, *given: Sequence[Tensor], reverse: bool = False) -> list[Tensor]:
        described = FUSED.describe(self.block)
        assert described.startswith("one generated"), described
        return self.run(FUSED, *given, reverse=reverse)

    def check(self, *given: Sequence[Tensor], tolerance: float = 1e-12) -> None:
        """The kernel's numbers are those of the loop, forward and in reverse."""
        for reverse in (False, True):
            found = self.fused(*given, reverse=reverse)
            assert_same(found, self.run(EAGER, *given, reverse=reverse), tolerance)


def _shapes(given: Sequence[Sequence[Tensor]]) -> list[Any]:
    invariants, sequences, carries = given
    return [t.shape for t in (*invariants, *carries)] + [t.shape[1:] for t in sequences]


def share_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the products of kernels on CPUs, however small those are."""
    monkeypatch.setattr(loop, "_SHARED_BYTES", 1)
    monkeypatch.setattr(loop, "_SHARED_ROWS", 1 << 20)
    monkeypatch.setattr(loop, "_LEAST_SHARE", 1)


def source_of(block: ScanBlock) -> str:
    """The C++ of a block's kernel."""
    return print_cpp(make_row_loop(block))


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    """Equal within the tolerance, relative to the largest finite number of a tensor; NaN as NaN."""
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if b.dtype == torch.bool:
            assert torch.equal(a, b), f"output {i} differs"
            continue
        scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance * max(scale, SMALLEST_SCALE), equal_nan=True,
            msg=lambda text, i=i: f"output {i}: {text}",
        )  # fmt: skip


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
