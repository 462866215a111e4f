"""Every primitive of the kernels' arithmetic against torch, of ordinary and of special numbers.

All operations of a kind are one kernel. Rows of 33 numbers run in vectors with a tail, rows of 3
one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt.backends import EAGER, FUSED
from ftbptt.compiler.graphs import Node
from ftbptt.compiler.tracing.decompositions import past_autograd
from ftbptt.kernels import expressions

from .scans import Scan, assert_same, random, source_of

pytestmark = pytest.mark.usefixtures("poisoned")
aten = torch.ops.aten
Operation = Callable[[Tensor, Tensor], Tensor]

UNARY = [
    "neg", "abs", "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal",
    "sin", "cos", "tan", "sinh", "cosh", "atan", "tanh", "sigmoid", "erf", "erfc", "floor", "ceil",
    "round", "trunc", "sign", "relu", "acos", "asin",
]  # fmt: skip
FLOAT: dict[str, Operation] = {
    **{name: lambda x, y, name=name: getattr(torch, name)(x) for name in UNARY},
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: torch.rsub(x, 1.5),
    "mul": lambda x, y: x * y,
    "mul_number": lambda x, y: x * -0.1,
    "div": lambda x, y: x / y,
    "div_number": lambda x, y: 3 / x,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": lambda x, y: x.abs() ** y,
    "pow_number": lambda x, y: x**3,
    "pow_of_number": lambda x, y: 2.5**x,
    "atan2": torch.atan2,
    "fmod": lambda x, y: torch.fmod(x.clamp(-50, 50), y.abs().clamp_min(0.5)),
    "remainder": lambda x, y: x.clamp(-50, 50) % torch.where(y.abs() < 0.5, 0.5, y),
    "clamp": lambda x, y: torch.clamp(x, -0.5, 2),
    "clamp_crossed": lambda x, y: torch.clamp(x, 1.0, -1.0),
    "clamp_min": lambda x, y: torch.clamp_min(x, 0.3),
    "clamp_max": lambda x, y: torch.clamp_max(x, 0.3),
    "clamp_max_named": lambda x, y: torch.clamp(x, max=-0.3),
    "clamp_to_nothing": lambda x, y: torch.clamp(x, min=float("-inf")),
    "clamp_tensor": lambda x, y: torch.clamp(x, min=y, max=y.abs()),
    "clone": lambda x, y: x.clone(),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where_numbers": lambda x, y: torch.where(x > 0.1, x, -1.5),
    "threshold_backward": lambda x, y: aten.threshold_backward(x, y, 0.5),
    "infinite_numbers": lambda x, y: torch.where(x > 0, float("-inf"), y) * float("inf"),
    "nan_number": lambda x, y: torch.where(x > 0, float("nan"), y),
    "full_like": lambda x, y: x + torch.full_like(x, 0.1),
    "zeros_and_ones": lambda x, y: torch.where(x > 0, torch.ones_like(x), torch.zeros_like(x)),
    "negative_zero": lambda x, y: torch.where(x > 0, x, -0.0),
    **{
        name: lambda x, y, name=name: getattr(torch, name)(x, y)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    "gt_number": lambda x, y: x > 0.1,
    "ne_number": lambda x, y: x != 0,
    "isnan": lambda x, y: torch.isnan(x),
    "isinf": lambda x, y: torch.isinf(x),
    "logical_and": lambda x, y: (x > 0) & (y > 0),
    "logical_and_of_floats": torch.logical_and,
    "logical_or": lambda x, y: torch.logical_or(x > 0, y),
    "logical_xor": lambda x, y: torch.logical_xor(x, y > 1),
    "logical_not": lambda x, y: torch.logical_not(x),
    "bitwise": lambda x, y: ((x > 0) | (y < 0)) ^ (x > 1),
    "bitwise_not": lambda x, y: ~(x > 0),
    "bool_to_float": lambda x, y: (x > 0).to(x.dtype) * y,
    "float_to_bool": lambda x, y: x.to(torch.bool),
    "where_bools": lambda x, y: torch.where(x > 0, y > 0, y < 1),
    "true_or": lambda x, y: torch.logical_or(x > 0, torch.ones_like(x, dtype=torch.bool)),
}
# FunctionOverrides of several: rounded in another order than torch does.
COMPOSED: dict[str, Operation] = {
    "add_alpha": lambda x, y: torch.add(x, y, alpha=-0.5),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=3),
    "sigmoid_backward": aten.sigmoid_backward,
    "tanh_backward": aten.tanh_backward,
}
INTEGER: dict[str, Operation] = {
    "add": lambda x, y: x + y,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=3),
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: torch.rsub(x, 7),
    "mul": lambda x, y: x * y,
    "abs": lambda x, y: x.abs(),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda x, y: torch.clamp(x, 1, 5),
    "sign": lambda x, y: x.sign(),
    "relu": lambda x, y: torch.relu(x),
    "floor": lambda x, y: x.floor(),
    "where": lambda x, y: torch.where(x > y, x, 3),
    "bitwise_and": lambda x, y: x & y,
    "bitwise_or": lambda x, y: x | 5,
    "bitwise_xor": lambda x, y: x ^ y,
    "div": lambda x, y: x / (y.abs() + 1),
    "exp": lambda x, y: torch.exp(x),
    "compared": lambda x, y: x <= y,
    "compared_with_a_fraction": lambda x, y: x > 0.5,
    "to_float": lambda x, y: x.to(torch.float64) * 0.1,
    "through_float16": lambda x, y: (x * 0.7).to(torch.float16).to(torch.float64),
    "to_small": lambda x, y: x.to(torch.int16),
    "to_bool": lambda x, y: x.to(torch.bool),
    "from_float": lambda x, y: (x * 0.75).to(x.dtype),
    "logical_and": torch.logical_and,
    "mixed": lambda x, y: x * 0.5 + y,
}
COMPLEX: dict[str, Operation] = {
    "add": lambda x, y: x + y,
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=2),
    "mul": lambda x, y: x * y,
    "mul_number": lambda x, y: x * (0.5 - 2j),
    "div": lambda x, y: x / y,
    "neg": lambda x, y: -x,
    "reciprocal": lambda x, y: x.reciprocal(),
    "conj": lambda x, y: x.conj_physical() * y,
    "where": lambda x, y: torch.where(torch.ones(x.shape, dtype=torch.bool), x, y),
    "abs": lambda x, y: x.abs(),
    "parts": lambda x, y: x.real * y.imag,
    "complex": lambda x, y: torch.complex(x.imag, y.real),
    "pairs": lambda x, y: torch.view_as_real(x) * torch.view_as_real(y),
    "of pairs": lambda x, y: torch.view_as_complex(torch.view_as_real(x) * 2),
}
ROUNDED: dict[str, Operation] = {
    "through_bfloat16": lambda x, y: (x * 0.7).to(torch.bfloat16).to(x.dtype) + y,
    "through_float16": lambda x, y: (x * 0.7).to(torch.float16).to(x.dtype) + y,
    "compared_in_bfloat16": lambda x, y: (
        x.to(torch.bfloat16) == (x * 1.001).to(torch.bfloat16)
    ).to(x.dtype),
}
VECTOR_COMPLEX = ("add", "sub_alpha", "mul", "mul_number", "neg", "conj")


def special(dtype: torch.dtype) -> list[float]:
    info = torch.finfo(dtype)
    ordinary = [0.0, 0.1, 0.3, 0.5, 0.62, 0.63, 1.0, 1.5, 2.5, 3.0, 7.7, 20.0, 50.0]
    edges = [87.0, 88.7, 89.5, 95.0, 103.0, 105.0, 700.0, 709.7, 745.0, 1e4, 3.3e4]
    extremes = [info.max, info.tiny, info.tiny * info.eps * 3, 1e-3, info.eps, float("inf")]
    values = [*ordinary, *edges, *extremes]
    return [*values, *(-v for v in values), float("nan")]


def values(dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    """Two sequences ``[K, B, width]`` in which every value meets every other one."""
    if dtype.is_floating_point:
        column = torch.tensor(special(dtype), dtype=torch.float64).to(dtype)
    else:
        column = torch.tensor([0, 1, 2, 3, 5, 7, 11, 100]).to(dtype)
        column = column if dtype == torch.uint8 else torch.cat([column, -column])
    x, y = torch.meshgrid(column, column, indexing="ij")
    x, y = x.reshape(-1), y.reshape(-1)
    rows = -(-len(x) // (2 * width))
    index = torch.arange(2 * rows * width) % len(x)
    return x[index].reshape(2, rows, width), y[index].reshape(2, rows, width)


def scan_over(
    operations: dict[str, Operation], x: Tensor, y: Tensor, *, as_written: bool = True
) -> Scan:
    """A kernel of all the operations, on numbers that went through a carry."""

    def step(_: Any, now: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        return list(now), [operation(*now) for operation in operations.values()]

    return Scan(step, [], [x, y], [x[0], y[0]], history=[False, False], as_written=as_written)


def check(operations: dict[str, Operation], x: Tensor, y: Tensor, ulps: float = 4) -> None:
    """Each result is torch's own, or that of float64."""
    scan = scan_over(operations, x, y)
    found, wanted = scan.fused()[2:], scan.run(EAGER)[2:]
    wide = [t.double() if t.is_floating_point() else t for t in (x, y)]
    exact = scan_over(operations, *wide).run(EAGER)[2:]
    wrong = []
    for name, a, b, c in zip(operations, found, wanted, exact, strict=True):
        assert a.dtype == b.dtype, name
        bad = ~(close(a, b, ulps) | close(a, c.to(a.dtype), ulps))
        if bad.any():
            first = [(t[bad][:3]).tolist() for t in (x, y, a, b)]
            wrong.append(f"{name}: of x, y = {first[0]}, {first[1]}: {first[2]}, not {first[3]}")
    assert not wrong, "\n".join(wrong)


def close(a: Tensor, b: Tensor, ulps: float) -> Tensor:
    """Where two results are within ``ulps`` of each other, and NaN where NaN."""
    if not a.is_floating_point():
        return torch.isclose(a, b, rtol=1e-14) if a.is_complex() else a == b
    info = torch.finfo(a.dtype)
    wide, other = a.double(), b.double()
    near = (wide - other).abs() <= ulps * info.eps * (other.abs() + info.tiny)
    return (a == b) | near | (a.isnan() & b.isnan())


@pytest.mark.parametrize("width", [33, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floating_point(dtype: torch.dtype, width: int) -> None:
    x, y = values(dtype, width)
    check(FLOAT, x, y)
    assert is_in_vectors(FLOAT, x, y) == (width == 33)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_half_precision(dtype: torch.dtype) -> None:
    """Computed in float32 and rounded once; torch rounds no better."""
    x, y = values(dtype, 33)
    check(FLOAT, x, y, ulps=1)
    assert is_in_vectors(FLOAT, x, y)


@pytest.mark.parametrize("width", [33, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_casts_to_half_precision_round(dtype: torch.dtype, width: int) -> None:
    """Also where what they round is not put into memory."""
    x, y = values(dtype, width)
    check(ROUNDED, x, y)
    assert is_in_vectors(ROUNDED, x, y) == (width == 33)  # of float64 all but the casts


@pytest.mark.parametrize("width", [33, 3])
def test_composed_ones(width: int) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        x, y = random(2, 7, width, dtype=dtype), random(2, 7, width, dtype=dtype, seed=1)
        for as_written in (True, False):
            scan = scan_over(COMPOSED, x, y, as_written=as_written)
            assert_same(scan.fused(), scan.run(EAGER), 8 * torch.finfo(dtype).eps)


def is_in_vectors(operations: dict[str, Operation], x: Tensor, y: Tensor) -> bool:
    return "using V = Vec<" in source_of(scan_over(operations, x, y).block)


BESIDE_INTEGERS: dict[str, Operation] = {
    "a choice": lambda x, y: torch.where(x > y, 1, 2) + (x > 0),
    "a number of it": lambda x, y: torch.where(x > 0, 1, 3) * y,
    "smooth": lambda x, y: torch.tanh(x) * y,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_numbers_beside_integers(dtype: torch.dtype) -> None:
    """They stay in vectors, in loops of their own."""
    x, y = values(dtype, 33)
    check(BESIDE_INTEGERS, x, y)
    assert is_in_vectors(BESIDE_INTEGERS, x, y)


def test_the_gradient_of_logsigmoid() -> None:
    """Without the integers of torch's formula; infinities included."""
    x, grad = values(torch.float64, 33)
    _, buffer = torch.ops.aten.log_sigmoid_forward(x)
    formula = past_autograd()[torch.ops.aten.log_sigmoid_backward.default]
    wanted = torch.ops.aten.log_sigmoid_backward(grad, x, buffer)
    assert_same([formula(grad, x, buffer)], [wanted], 1e-15)
    operations = {"gradient": lambda x, y: torch.ops.aten.log_sigmoid_backward(y, x, y)}
    source = source_of(scan_over(operations, x, grad, as_written=False).block)
    assert "int64_t(1)" not in source


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_integers(dtype: torch.dtype) -> None:
    check(INTEGER, *values(dtype, 5))


@pytest.mark.parametrize("width", [5, 3])
def test_complex(width: int) -> None:
    x, y = values(torch.float64, width)
    x, y = (t.nan_to_num(0.5, 2.0, -2.0).clamp(-10, 10) + 0.25 for t in (x, y))
    check(COMPLEX, torch.complex(x, y), torch.complex(y, x + 1))
    alone = {name: COMPLEX[name] for name in VECTOR_COMPLEX}
    check(alone, torch.complex(x, y), torch.complex(y, x + 1))


def test_every_known_operation_is_in_a_test() -> None:
    met = set()
    for operations, dtype in (
        (FLOAT, torch.float64), (COMPOSED, torch.float64), (INTEGER, torch.int64),
        (COMPLEX, torch.complex128),
    ):  # fmt: skip
        x = torch.ones(2, 3, 5, dtype=dtype)
        for as_written in (True, False):
            scan = scan_over(operations, x, x, as_written=as_written)
            met |= {expressions._overload_name(node) for node in scan.block.module.graph.nodes}
    # Other names of the same, that tracing does not make, and what normal forms have of pairs.
    same = {"_conj", "conj_physical", "contiguous", "convert_element_type", "real", "imag"}
    assert set(expressions._TABLE) - met == same


def refused(operation: Operation, x: Tensor) -> str:
    scan = scan_over({"it": operation}, x, x)
    return FUSED.describe(scan.block).partition("no kernel: ")[2]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: torch.round(x, decimals=1),
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: torch.rsub(x, 2.0, alpha=3),
        lambda x, y: torch.rsub(x, y, alpha=3),
        lambda x, y: torch.cumsum(x, -1),
        lambda x, y: torch.hypot(x, y),
    ],
)
def test_a_form_that_is_not_known_is_refused_or_right(operation: Operation) -> None:
    x, y = values(torch.float64, 5)
    if refused(operation, x):
        return
    check({"it": operation}, x, y)


def large_integers(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As ``values``: the largest ones, what a double cannot hold, and a few small ones."""
    info = torch.iinfo(dtype)
    large = [info.min, info.min + 1, info.max, info.max - 1, info.max // 2 + 1]
    large += [n for n in (2**53 + 1, -(2**53) - 1, 2**31 + 1, 3037000493) if abs(n) < info.max]
    small = [0, 1, 2, 3, 7, *(-n for n in (1, 2, 7) if info.min)]
    column = torch.tensor([*large, *small], dtype=dtype)
    x, y = torch.meshgrid(column, column, indexing="ij")
    return x.reshape(1, -1, 1).expand(2, -1, 3), y.reshape(1, -1, 1).expand(2, -1, 3)


INTEGER_TYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", INTEGER_TYPES)
def test_large_integers_are_exact_and_wrap_around(dtype: torch.dtype) -> None:
    """What torch does not compute in floating point must not be."""
    operations: dict[str, Operation] = {
        **INTEGER,
        "neg": lambda x, y: -x,
        "square": lambda x, y: x**2,
        "pow": lambda x, y: x**y,
        "fmod": lambda x, y: torch.fmod(x, y | 1),
        "fmod_number": lambda x, y: torch.fmod(x, torch.iinfo(dtype).max - 56),
        "remainder": lambda x, y: torch.remainder(x, y | 1),
        "remainder_of_number": lambda x, y: x % 7,
        "round": lambda x, y: x.round(),
        "trunc": lambda x, y: torch.trunc(x),
        "where": lambda x, y: torch.where(x > y, x, y),
        "next_is_larger": lambda x, y: x + 1 > x,
        "compared": lambda x, y: (x < y) | (x == y + 1),
        "compared_with_a_number": lambda x, y: x > torch.iinfo(dtype).max - 1,
    }
    check(operations, *large_integers(dtype))


def test_an_integer_is_divided_by_zero_without_a_signal() -> None:
    x = torch.ones(2, 3, 4, dtype=torch.int64)
    (found,) = scan_over({"it": torch.fmod}, x, x - 1).fused()[2:]
    assert not found.any()


@pytest.mark.parametrize("dtype", INTEGER_TYPES)
@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: ~x,
        lambda x, y: torch.bitwise_not(x) + y,
        lambda x, y: x // (y | 1),
        lambda x, y: torch.div(x, y | 1, rounding_mode="trunc"),
        lambda x, y: x << 3,
        lambda x, y: x >> 3,
    ],
)
def test_integers_beyond_what_is_known(operation: Operation, dtype: torch.dtype) -> None:
    x, y = large_integers(dtype)
    if not refused(operation, x):
        check({"it": operation}, x, y)


def test_nodes_without_a_kernel_are_named() -> None:
    def name(node: Node) -> str:
        return str(node)

    assert "hypot" in refused(torch.hypot, torch.ones(2, 3, 5))
    node = torch.fx.Graph().call_function(aten.cumsum.default)
    with pytest.raises(expressions.Unsupported, match="kernels do not support this operation"):
        expressions.expression(node, name)
