"""What Inductor is told and given, where torch's own would be wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ftbptt._compat.tracing import make_fx
from ftbptt.backends.inductor_workarounds import DECOMPOSITIONS


@pytest.mark.parametrize(
    "write",
    [
        lambda base: torch.slice_scatter(base, torch.ones(4, 3, 2), 2, 1, 3),
        lambda base: torch.select_scatter(base, torch.ones(4, 7), 1, 2),
        lambda base: torch.diagonal_scatter(base, torch.ones(4, 3), 0, 1, 2),
    ],
)
def test_scatters_into_expanded_tensors(write: Callable[[Tensor], Tensor]) -> None:
    """Inductor allocates what the strides say that were traced: memory of all steps, not of one."""

    def written(x: Tensor) -> Tensor:
        return write(x.expand(4, 3, 7))

    x = torch.zeros(3, 7)
    program = make_fx(written, decomposition_table=DECOMPOSITIONS, tracing_mode="fake")(x)
    (result,) = program.graph.output_node().all_input_nodes
    assert result.meta["val"].stride() == written(x).stride()
    assert torch.equal(program(x), written(x))
