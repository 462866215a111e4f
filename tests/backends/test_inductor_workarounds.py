"""What Inductor is told and given, where torch's own would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from inspect import currentframe
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import compile_fx, config
from torch._inductor.exc import CppCompileError, InductorError

from ftbptt._compat.tracing import FakeTensorMode, make_fx
from ftbptt.backends.compile import build
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


@pytest.mark.parametrize(
    ("error", "is_tried_again"),
    [(CppCompileError(["c++"], "unknown option"), True), (ValueError("a bug"), False)],
)
def test_a_compiler_without_the_vector_instructions(
    error: Exception, is_tried_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then Inductor asks what it has."""
    compile_inner = compile_fx.compile_fx_inner

    def compile_as_told(*args: Any, **options: Any) -> Any:
        if config.cpp.vec_isa_ok:
            raise InductorError(error, currentframe())
        return compile_inner(*args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_as_told)

    def doubled(x: Tensor) -> list[Tensor]:
        return [2 * x]

    x, mode = torch.arange(7.0), FakeTensorMode()
    with mode:
        examples = [torch.empty(7)]
    with nullcontext() if is_tried_again else pytest.raises(InductorError, match="a bug"):
        (found,) = build(doubled, examples, mode)(x)
        assert torch.equal(found, 2 * x)
