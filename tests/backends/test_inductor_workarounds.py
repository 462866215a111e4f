"""What Inductor is told and given, where torch's own would be wrong."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from inspect import currentframe
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx, nn
from torch._inductor import codecache, compile_fx, config, cpu_vec_isa, sizevars
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.exc import CppCompileError, InductorError
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing

from ftbptt import make_train_segment, reference_segment
from ftbptt._compat.instructions import reported_instructions
from ftbptt._compat.strides import polynomial_strides
from ftbptt._compat.tracing import FakeTensorMode, make_fx, symbolic_steps
from ftbptt.backends import compile as compile_backend
from ftbptt.backends.compile import build
from ftbptt.backends.inductor_workarounds import DECOMPOSITIONS

from ..cells import problem
from ..kernels.scans import random
from ..oracle import check


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


@pytest.mark.slow
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
    expected = nullcontext() if is_tried_again else pytest.raises(InductorError, match="a bug")
    # With other instructions the headers are other ones, and precompiled for this program only.
    with expected, config.patch(cpp_cache_precompile_headers=False):
        check_compiled(lambda x: [2 * x])


@pytest.mark.slow
def test_guards_on_the_number_of_steps_when_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In what torch keeps of compiled graphs there are none. K may be too large for it on a GPU."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_backend, "products_in_cpp", nullcontext)  # with it torch keeps none

    def guards() -> list[Any]:
        mode, steps = symbolic_steps(64)
        with mode:
            examples = [torch.empty(steps, 32, 10), torch.empty(steps, 32, dtype=torch.int64)]
        loss = nn.functional.cross_entropy
        build(lambda out, y: [loss(out.flatten(0, 1), y.flatten())], examples, mode)
        return [guard.expr for guard in mode.shape_env.guards]

    assert guards() == guards() != []


@pytest.mark.slow
def test_loops_where_their_wrapper_in_cpp_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11 and 2.12."""
    monkeypatch.delattr(CppWrapperCpu, "_get_while_loop_carried_output_names")
    cell = problem("elman")
    check(make_train_segment(cell.step, cell.loss, backend="compile"), cell, 7)


ROW, COLUMN, STEPS = sympy.symbols("row column steps", integer=True, nonnegative=True)


@pytest.mark.parametrize(
    "index",
    [
        sympy.Integer(3),
        ROW,
        7 * (ROW + 1) * STEPS + COLUMN,
        (ROW + COLUMN) * (STEPS - ROW) + 2 * ROW**2,
        FloorDiv(ROW, 16) * 5 + COLUMN,
        ModularIndexing(ROW, 1, 32) + STEPS * COLUMN,
        ModularIndexing(ROW + COLUMN, 3, 5),
        Mod(ROW, 7) + ROW,
        sympy.Ge(COLUMN, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("variable", [ROW, STEPS], ids=str)
@pytest.mark.parametrize("length", [None, 16])
def test_strides_are_what_inductor_finds(index: Any, variable: Any, length: int | None) -> None:
    find = sizevars.stride_at_vec_range.__wrapped__  # without what is kept of it
    expected = find(index, variable, length)
    before = sizevars.stride_at
    with polynomial_strides():
        assert sizevars.stride_at is not before
        assert find(index, variable, length) == expected
    assert sizevars.stride_at is before


def check_compiled(function: Callable[[Tensor], list[Tensor]]) -> None:
    x, mode = torch.arange(7.0), FakeTensorMode()
    with mode:
        examples = [torch.empty(7)]
    (found,), (expected,) = build(function, examples, mode)(x), function(x)
    torch.testing.assert_close(found, expected)


def test_vector_instructions_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test program is compiled, and what Inductor knows of them is not changed."""
    before = cpu_vec_isa.valid_vec_isa_list

    def refuse(*_: object) -> bool:
        raise AssertionError("Inductor asks")

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", refuse)
    with reported_instructions():
        picked = cpu_vec_isa.pick_vec_isa()
        assert picked
    reported = torch.backends.cpu.get_cpu_capability()
    if reported in ("AVX2", "AVX512"):
        assert str(picked) == reported.lower()
    check_compiled(lambda x: [x.exp().sin() + x])
    assert cpu_vec_isa.valid_vec_isa_list is before


def test_what_inductor_asks_is_put_back_by_the_last_of_several_threads() -> None:
    """Kernels are compiled in the background meanwhile; it had stayed replaced for ever."""
    before = cpu_vec_isa.valid_vec_isa_list
    first, second = reported_instructions(), reported_instructions()
    first.__enter__()
    replaced = cpu_vec_isa.valid_vec_isa_list
    second.__enter__()
    first.__exit__(None, None, None)
    assert cpu_vec_isa.valid_vec_isa_list is replaced
    second.__exit__(None, None, None)
    assert cpu_vec_isa.valid_vec_isa_list is before


def test_without_the_program_that_hashes_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have a compiler, but no openssl, without which torch 2.13 cannot compile."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(codecache, "_precompile_header", _refuse_to_hash)
    check_compiled(lambda x: [x.cos() * 3 + x])


def _refuse_to_hash(*_: object, **__: object) -> str:
    raise FileNotFoundError("openssl")


def test_what_inductor_says_of_itself_is_not_for_the_user() -> None:
    """torch is about to remove what it lowers a diagonal with (2.13)."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        check_compiled(lambda x: [x.new_ones(3, 4, 4).cumsum(0).diagonal(dim1=-2, dim2=-1) * 2])


def test_a_convolution_leaves_no_tensor_in_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake one was left, for which torch warned of a bug in the user's code."""
    programs: list[fx.GraphModule] = []

    def compiled(program: fx.GraphModule, *_: Any) -> Any:
        programs.append(program)
        raise KeyboardInterrupt

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + nn.functional.conv1d(h, params["w"], padding=1))
        return h, h

    monkeypatch.setattr(compile_backend, "inductor_compile", compiled)
    segment = make_train_segment(step, lambda out, y: out.square().mean(), backend="compile")
    with pytest.raises(KeyboardInterrupt):
        segment({"w": torch.randn(3, 3, 3)}, torch.zeros(2, 3, 5), torch.randn(4, 2, 3, 5), None)
    (program,) = programs
    held = [getattr(program, node.target) for node in program.graph.find_nodes(op="get_attr")]
    assert held  # the graphs of loops
    assert all(isinstance(value, nn.Module) for value in held)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_maximum(dtype: torch.dtype) -> None:
    """Of values that the program of a small segment computes twice: each found none to be it."""

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + params["w"] * h)
        return (h * params["v"] + x).amax(-1), h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return out.float().square().mean()

    params = {name: random(8, dtype=dtype, seed=seed) for seed, name in enumerate("wv")}
    x, state = random(6, 3, 8, dtype=dtype, seed=2), random(3, 8, dtype=dtype, seed=3)
    found = make_train_segment(step, loss)(params, state, x, x).grads
    wanted = reference_segment(step, loss, params, state, x, x).grads
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    "is_extreme",
    [
        lambda values: values == values.amax(-1, keepdim=True),
        lambda values: values >= values.max(-1, keepdim=True)[0],
        lambda values: ~(values.amin(-1, keepdim=True) < values),
    ],
    ids=["the maximum", "not below it", "the minimum not below it"],
)
def test_a_maximum_within_a_loop(is_extreme: Callable[[Tensor], Tensor]) -> None:
    """Is one of the values that it is of, also in 16 bits."""

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        values = h * params["w"] + x
        is_found = is_extreme(values)
        return is_found, torch.tanh(values + is_found)

    half = {"dtype": torch.bfloat16}
    params, state = {"w": random(8, **half)}, random(3, 8, seed=1, **half)
    x = random(6, 3, 8, seed=2, **half)
    segment = make_train_segment(step, lambda out, y: out.float().mean(), backend="compile")
    assert segment.evaluate(params, state, x, x).out.any(-1).all()
