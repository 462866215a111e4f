"""The kernels of a GPU in Triton's interpreter: every cell of the table, and every operation."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from torch import Tensor

from ftbptt.backends import EAGER, FUSED
from ftbptt.kernels.gpu import module as triton_module

from ..cells import CELLS, NOT_BFLOAT16, WITH_ROWS, problem, slow_but
from ..oracle import check, check_low_precision
from ..segment.random_steps import Recipe, recipes
from ..segment.test_parity import MASKABLE_ROWS, check_all_steps, flags
from ..segment.test_parity import where_time_is as over_time
from ..segment.test_random_cells import check_recipe, examples
from ..segment.test_vmap import check_ensemble, check_shared
from . import test_expressions as numbers
from . import test_fused_operations as operations
from . import test_fused_shapes as shapes
from .scans import Scan, assert_same, random
from .test_fused import NOT_FUSED, make, not_fused, start_from_params
from .test_fused_shapes import data_for, gated
from .test_row_order import MODELS, heads_of_models

pytestmark = pytest.mark.usefixtures("interpreted")

# Triton has no complex numbers, and no slices of what is in registers.
SEVERAL_VECTORS = "GPU kernels do not support products of several vectors of a row"
HEADS_WITHOUT_AXIS = (
    f"{SEVERAL_VECTORS}, but those of heads, if the state has an axis for them, [rows, heads, "
    "units], and the recurrence does not mix them"
)
REFUSED = NOT_FUSED | {
    "slot_attention": [("forward", SEVERAL_VECTORS), ("reverse", SEVERAL_VECTORS)],
    "slstm": [("forward", HEADS_WITHOUT_AXIS), ("reverse", HEADS_WITHOUT_AXIS)],
    "lru_complex": [("forward", "GPU kernels do not support torch.complex128"),
                    ("reverse", "GPU kernels do not support torch.complex128")],
}  # fmt: skip
QUICK = [
    "lstm_readout", "layer_norm_lstm", "embedding_tied", "counter_and_flag", "lru_complex",
    "elman_one_sequence", "fast_weights",
]  # fmt: skip


@pytest.mark.parametrize("name", CELLS)
def test_what_is_fused(name: str) -> None:
    found = make(problem(name)).explain(*problem(name).data(3))
    assert not_fused(found) == REFUSED.get(name, [])
    kernels = [b.runs for b in found.blocks if "scan" in b.kind and "no kernel" not in b.runs]
    assert all("one generated Triton kernel for all steps" in runs for runs in kernels)


@pytest.mark.parametrize("name", slow_but(QUICK, CELLS))
def test_cells(name: str) -> None:
    check_all_steps(make(problem(name)), name)


def test_no_rows() -> None:
    """Also none of any model, or no models."""
    shapes.test_no_rows()
    shapes.test_no_models_or_no_rows_of_them()


@pytest.mark.parametrize("name", slow_but(["gru_batch_first", "counter_and_flag"], MASKABLE_ROWS))
def test_mask_and_reset_by_row(name: str) -> None:
    given, segment = problem(name), make(problem(name))
    for steps in (7, 1):
        reset = over_time(given, flags(steps, given.rows, seed=1))
        mask = over_time(given, flags(steps, given.rows, seed=2, true=0.7))
        check(segment, given, steps, reset=reset, mask=mask)


@pytest.mark.parametrize("name", slow_but(["lstm_readout"], WITH_ROWS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and name in NOT_BFLOAT16:
        pytest.skip("no such complex numbers")
    check_low_precision(make(problem(name, dtype)), problem(name, dtype), 7)


def test_learned_initial_state() -> None:
    given = problem("lstm_readout")
    segment = make(given, initial_state=start_from_params, recompute=True)
    reset = flags(7, given.rows, true=0.5)
    check(segment, given, 7, reset=reset, initial_state=start_from_params)


@pytest.mark.parametrize("name", slow_but(["lstm_readout", "elman_one_sequence"], CELLS))
def test_vmap(name: str) -> None:
    """Weights of their own for each model: programs of one group each."""
    check_shared(make(problem(name)), name, 3)
    check_ensemble(make(problem(name)), name, 3)


def test_models_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first axis of a GPU's grid has room for more than 65,535 programs."""
    grids = []

    class Function:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *memory, **options: None

    module = SimpleNamespace(
        AXES=2, GROUPED=[0], PARTS=1, WORKSPACE=[], ROW_BYTES=64, EXACT=False, run=Function()
    )
    monkeypatch.setattr(triton_module, "load", lambda path: module)
    triton_module.launch("", [], [torch.empty(0)], [1, 70_000, 65])
    assert grids == [(2 * 70_000,)]


def test_a_module_is_for_all_who_may_read_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Inductor's files, and the kernels of a CPU: a cache may be shared."""
    monkeypatch.setattr(triton_module, "compile_cache_dir", lambda: str(tmp_path))
    (tmp_path / "other").touch()
    path = triton_module.write("steps = 3")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert list(path.parent.iterdir()) == [path]


def test_triton_compiles_beside_the_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not in the user's home, where it may be that nothing can be written."""
    monkeypatch.setattr(triton_module, "compile_cache_dir", lambda: str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "one that the user names")
    triton_module.load(str(triton_module.write("steps = 4")))
    assert os.environ["TRITON_CACHE_DIR"] == "one that the user names"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    triton_module.load(str(triton_module.write("steps = 5")))
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def check_tf32(units: int) -> None:
    """Products in TF32 are of numbers rounded to it, of which a matrix unit would cut bits off."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        return [x[0] + carried[0] @ given[0]], []

    def nearest(x: Tensor) -> Tensor:
        bits = (x.view(torch.int32) + 0x1000) >> 13 << 13
        return torch.where(x.isnan(), x, bits.view(torch.float32))

    weight, h = (random(*shape, dtype=torch.float32) for shape in ((units, units), (17, units)))
    h[1, 0], h[2, 0] = torch.inf, torch.nan
    scan = Scan(step, [weight], [torch.zeros(1, 17, units)], [h])
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        found = scan.fused()[:1]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert_same(found, [nearest(h) @ nearest(weight)], 1e-6)


@pytest.mark.parametrize("units", [7, 33])
def test_tf32(units: int) -> None:
    check_tf32(units)


@pytest.mark.parametrize("rows", [1, 17])
def test_weights_of_each_group(rows: int) -> None:
    """Groups of one tile, and of several."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        return [torch.tanh(x[0] + torch.bmm(carried[0], given[0]))], []

    Scan(step, [random(3, 5, 5)], [random(4, 3, rows, 5, seed=1)], [random(3, rows, 5)]).check()


@pytest.mark.parametrize(("models", "rows", "heads"), [*MODELS, (2, 17, 3)])
def test_heads_are_rows(models: int, rows: int, heads: int) -> None:
    """A program has the rows of one head of one model."""
    heads_of_models(models, rows, heads).check()


def test_one_weight_for_all_heads_and_one_for_each() -> None:
    """Beside each other in a step."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        h = torch.bmm(carried[0].transpose(0, 1), given[0]).transpose(0, 1)
        h = (torch.sin(h).flatten(0, 1) @ given[1]).view(x[0].shape) + x[0]
        return [torch.tanh(h)], [h]

    for rows, heads, units in [(3, 2, 5), (4, 4, 4), (17, 3, 1)]:
        weights = [random(heads, units, units, seed=1), random(units, units, seed=2)]
        carry = random(rows, heads, units)
        Scan(step, weights, [random(4, *carry.shape, seed=3)], [carry]).check()


def test_weights_that_are_those_of_groups_and_of_heads() -> None:
    """The same weights in two products, along the first and along the last axis of rows."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        h = torch.sin(torch.bmm(carried[0], given[0]) + x[0])
        return [torch.bmm(h.transpose(0, 1), given[0]).transpose(0, 1)], [h]

    carry = random(3, 3, 5)
    Scan(step, [random(3, 5, 5)], [random(4, *carry.shape, seed=1)], [carry]).check()


def test_a_weight_for_each_head_beside_one_for_each_head_of_each_row() -> None:
    """As of attention to what each row keeps: no program has rows of one weight of either kind."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        h = torch.bmm(carried[0].transpose(0, 1), given[0]).transpose(0, 1) + x[0]
        own = torch.bmm(torch.sin(h).reshape(-1, 1, 4), given[1])
        return [torch.tanh(h + own.view(h.shape))], []

    weights = [random(3, 4, 4, seed=1), random(6, 4, 4, seed=2)]
    scan = Scan(step, weights, [random(4, 2, 3, 4, seed=3)], [random(2, 3, 4)])
    assert "a weight for each head beside one for each head of each row" in FUSED.describe(
        scan.block
    )
    assert_same(scan.run(FUSED), scan.run(EAGER), 1e-12)


def test_heads_that_a_step_mixes() -> None:
    def step(given: Any, x: Any, carried: Any) -> Any:
        h = torch.bmm(carried[0].transpose(0, 1), given[0]).transpose(0, 1)
        return [torch.tanh(h + h.mean(1, keepdim=True) + x[0])], []

    scan = Scan(step, [random(2, 5, 5)], [random(4, 3, 2, 5, seed=1)], [random(3, 2, 5)])
    assert HEADS_WITHOUT_AXIS in FUSED.describe(scan.block)


@pytest.mark.parametrize("table", ["REDUCTIONS", "JOINS", "VIEWS"])
def test_features(table: str) -> None:
    operations.check(getattr(operations, table), random(2, 3, 4, 5))


@pytest.mark.parametrize("features", [(1,), (2,), (1, 5), (5, 1), (16,), (4, 16)])
def test_sizes_with_and_without_padding(features: tuple[int, ...]) -> None:
    names = ("sum_inner", "amax", "softmax", "layer_norm", "prod")
    chosen = {name: operations.REDUCTIONS[name] for name in names}
    operations.check(chosen, random(2, *features))


def test_casts_to_half_precision_round() -> None:
    """Also where what they round is not put into memory."""
    halves = (torch.bfloat16, torch.float16)
    casts = {f"{half}": lambda h, half=half: (h * 0.7).to(half).to(h.dtype) for half in halves}
    operations.check(casts, random(2, 3, 5))


def test_nan_is_the_maximum() -> None:
    """As in torch, whatever is padded."""
    carry = random(3, 5)
    carry[1, 2] = float("nan")

    def step(_: Any, x: Any, carried: Any) -> Any:
        h = carried[0] + x[0]
        return [h], [h.amax(-1), h.amin(-1), torch.maximum(h, -h), torch.relu(h), h.clamp(-1, 1)]

    scan = Scan(step, [], [random(3, 3, 5, seed=1)], [carry])
    assert_same(scan.fused(), scan.run(EAGER), 1e-12)


@pytest.mark.parametrize("emits", [(), ("values",), ("maximum",), ("values", "maximum")])
def test_a_maximum_is_one_of_the_values_that_it_is_of(emits: tuple[str, ...]) -> None:
    """In 16 bits too, though one of them is read from memory and the other in registers."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        values = (carried[0].flatten(1) @ given[0]).view(x[0].shape) + x[0]
        maximum = values.amax(-1, keepdim=True)
        results = {"values": values, "maximum": maximum}
        return [torch.tanh(values)], [values == maximum, *(results[name] for name in emits)]

    half = {"dtype": torch.bfloat16}
    carry = random(3, 2, 5, **half)
    scan = Scan(step, [random(10, 10, **half)], [random(6, 3, 2, 5, seed=1, **half)], [carry])
    is_maximum = scan.fused()[2]
    assert is_maximum.any(-1).all()


def test_mathematics() -> None:
    """Each function of torch is the right one of Triton's or NVIDIA's."""
    functions: dict[str, operations.Operation] = {
        **{name: getattr(torch, name) for name in
           ("exp", "exp2", "expm1", "sin", "cos", "tan", "sinh", "cosh", "atan", "tanh", "sigmoid",
            "erf", "erfc", "floor", "ceil", "round", "trunc", "sign", "relu", "abs", "neg",
            "reciprocal", "square")},
        **{name: lambda h, name=name: getattr(torch, name)(h.abs() + 0.1) for name in
           ("log", "log2", "log1p", "sqrt", "rsqrt")},
        **{name: lambda h, name=name: getattr(torch, name)(torch.tanh(h)) for name in
           ("acos", "asin")},
        "pow": lambda h: (h.abs() + 0.1) ** torch.sin(h),
        "atan2": lambda h: torch.atan2(h, h.cos()),
        "fmod": lambda h: torch.fmod(h, 0.3),
        "gelu": torch.nn.functional.gelu,
        "softplus": torch.nn.functional.softplus,
        "where": lambda h: torch.where((h > 0) & (h < 1) | ~(h > -1), h, -0.5),
        "negative zero": lambda h: torch.atan2(-(h.abs() * 0), -1 - h.abs()),
    }  # fmt: skip
    operations.check(functions, random(3, 7), 1e-9)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8])
def test_large_integers(dtype: torch.dtype) -> None:
    """NVIDIA's functions are for floating point numbers only; and no byte is below zero."""
    x, y = numbers.large_integers(dtype)
    others: dict[str, numbers.Operation] = {
        "fmod": lambda x, y: torch.fmod(x, y | 1),
        "add_negative": lambda x, y: x + -1,
        "mask": lambda x, y: x & ~1,
    }
    numbers.check(numbers.INTEGER | others, x, y)
    assert "powers of integers" in numbers.refused(lambda x, y: x**2, x)


@pytest.mark.parametrize("rows", [1, 16, 17, 37])
@pytest.mark.parametrize("units", [1, 3, 16, 33])
def test_rows_and_units(rows: int, units: int) -> None:
    """Tiles that are full, begun, or several."""
    Scan(gated, *data_for(3, (rows,), units)).check()


@pytest.mark.parametrize("rows", [(1, 3), (3, 1), (2, 3)])
def test_row_axes(rows: tuple[int, ...]) -> None:
    Scan(gated, *data_for(3, rows, 5)).check()


def test_elements_of_an_elementwise_loop_are_rows() -> None:
    """A program of a linear scan has an element for each thread, not a row."""
    from ftbptt.backends.fused import _source_for

    def step(given: Any, x: Any, carried: Any) -> Any:
        return [given[0] * carried[0] + x[0] * x[1]], []

    sequences = [random(4, 3, 5, seed=1), random(4, 3, 1, seed=2)]
    scan = Scan(step, [random(5)], sequences, [random(3, 5)])
    assert _source_for(scan.block)[1].rows.dims == (3, 5)
    scan.check()


def test_weights_that_are_too_large_are_split_or_left_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(given: Any, x: Any, carried: Any) -> Any:
        return [torch.tanh(x[0] + carried[0] @ given[0])], []

    def runs(units: int, rows: int) -> str:
        given = [torch.zeros(units, units)]
        scan = Scan(step, given, [torch.zeros(2, rows, units)], [torch.zeros(rows, units)])
        return FUSED.describe(scan.block)

    assert runs(128, 4096) == "one generated Triton kernel for all steps"
    split = "one generated Triton kernel for all steps, its weights split over {} programs"
    assert runs(129, 1) == split.format(16)
    assert runs(256, 200) == split.format(8)
    assert runs(256, 1056) == split.format(2)  # 66 tiles, 132 programs
    needs = "its weights need {} KB of a multiprocessor's shared memory, which has {} KB for them; "
    needs += "split, with {} rows, they do not fit on 132 multiprocessors"
    assert needs.format(256, 192, 1057) in runs(256, 1057)
    assert needs.format(1 << 16, 192, 1) in runs(4096, 1)
    # A GPU with less of it.
    monkeypatch.setattr("ftbptt.kernels.gpu.kernel._SHARED_BYTES", 64 << 10)
    assert runs(128, 1) == split.format(8)
    assert needs.format(64, 29, 2000) in runs(128, 2000)


def test_rows_that_are_wider_than_registers_are_left_to_others() -> None:
    """For which Triton's compiler takes minutes, or fails. Here the batch is one row."""

    def step(given: Any, x: Any, carried: Any) -> Any:
        return [torch.tanh(x[0] + carried[0] - carried[0].mean())], []

    def runs(rows: int) -> str:
        scan = Scan(step, [], [torch.zeros(2, rows, 64)], [torch.zeros(rows, 64)])
        return FUSED.describe(scan.block)

    assert runs(64) == "one generated Triton kernel for all steps"
    assert "32 KB of each row in registers, which have room for 16 KB" in runs(65)


@pytest.mark.slow
@examples(30)
@drawn(recipes())
def test_random_cells(recipe: Recipe) -> None:
    check_recipe(recipe, "fused")
