"""The operations that traced graphs consist of: decompositions, torch's and this package's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..._compat.inductor import inductor_decompositions, torch_decompositions
from ..._compat.tracing import LARGEST_KNOWN, DynamicOutputShapeException, not_traced
from ..graphs import aten


def _mv(matrix: Tensor, vector: Tensor) -> Tensor:
    return torch.mm(vector.unsqueeze(0), matrix.t()).squeeze(0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.unsqueeze(0), b.unsqueeze(1)).reshape(())


def _trilinear(
    a: Tensor, weight: Tensor, b: Tensor, expand_a: list[int], expand_weight: list[int],
    expand_b: list[int], summed: list[int], unrolled: int = 1,
) -> Tensor:  # fmt: skip
    """``nn.Bilinear`` with one GEMM; torch's is a loop over the outputs, whatever vmap does."""
    if (expand_a, expand_weight, expand_b, summed) != ([1, 3], [0], [1, 2], [2, 3]):
        return NotImplemented
    by_output = torch.mm(a, weight.transpose(0, 1).flatten(1)).unflatten(1, (weight.shape[0], -1))
    return (by_output * b.unsqueeze(1)).sum(-1)


def _lu_solve(lu: Tensor, pivots: Tensor, b: Tensor, **options: Any) -> Any:
    """With as many axes in front of both: else vmap over the factors is wrong (2.13)."""
    if lu.shape[:-2] == b.shape[:-2]:
        return NotImplemented
    axes = torch.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    lu, b = (matrix.expand(*axes, *matrix.shape[-2:]) for matrix in (lu, b))
    pivots = pivots.expand(*axes, pivots.shape[-1])
    return aten.linalg_lu_solve.default(lu, pivots, b, **options)


def _solve_ex(a: Tensor, b: Tensor, **options: Any) -> Any:
    """With as many axes in front of both: else vmap takes some of them for its own (2.13)."""
    is_vector = b.dim() == 1 or b.shape == a.shape[:-1]
    if a.dim() == b.dim() and not is_vector:
        return NotImplemented
    b = b.unsqueeze(-1) if is_vector else b
    result, *of_a = aten._linalg_solve_ex.default(
        _with_axes(a, b.dim()), _with_axes(b, a.dim()), **options
    )
    for _ in range(b.dim() - a.dim()):
        of_a = [value.squeeze(0) for value in of_a]
    return result.squeeze(-1) if is_vector else result, *of_a


def _with_axes(x: Tensor, least: int) -> Tensor:
    """With axes of one element in front, where it has fewer."""
    return x if x.dim() >= least else x.reshape(*[1] * (least - x.dim()), *x.shape)


def _distances(a: Tensor, b: Tensor, p: float = 2.0, mode: Any = None) -> Tensor:
    """``cdist`` as a norm, of whose gradient K stays a symbol."""
    return torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)


def _plus_product(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
        value = product(a, b)
        value = value if alpha == 1 else value * alpha
        return value if beta == 0 else value + (bias if beta == 1 else bias * beta)

    return run


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    result = source.to(target.dtype).expand(target.shape)
    # A tangent is copied to have its primal's layout, without which it is an error. (To ask for the
    # layout of K steps would make a number of K.)
    is_fixed = all(isinstance(size, int) for size in target.shape)
    return result.contiguous() if is_fixed and target.is_contiguous() else result


def _slice_scatter(
    x: Tensor, part: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    if not x.is_complex():
        return NotImplemented
    x, part = torch.view_as_real(x), torch.view_as_real(part)
    dim = dim if dim >= 0 else dim - 1  # the axis of the two parts is last
    return torch.view_as_complex(torch.slice_scatter(x, part, dim, start, end, step))


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    positions = _positions(indices)
    return NotImplemented if positions is None else aten.index.Tensor(x, positions)


def _by_vector(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operation whose index may be a single number: of its gradient torch takes a vector."""

    def run(x: Tensor, dim: int, index: Tensor, *args: Any, **options: Any) -> Any:
        if index.dim() or not x.dim():
            return NotImplemented
        return operation(x, dim, index.unsqueeze(0), *args, **options)

    return run


def _take(x: Tensor, index: Tensor) -> Any:
    return NotImplemented if index.dim() else aten.take.default(x, index.unsqueeze(0)).squeeze(0)


_BY_VECTORS: dict[Any, Callable[..., Any]] = {
    aten.index_select.default: _by_vector(aten.index_select.default),
    aten.index_add.default: _by_vector(aten.index_add.default),
    aten.take.default: _take,
}


def _points(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A constant, as torch makes it: Inductor's decomposition rounds it otherwise."""

    def run(*numbers: Any, **options: Any) -> Tensor:
        is_known = all(isinstance(number, int | float | complex) for number in numbers)
        if not is_known or numbers[2] > LARGEST_KNOWN:  # of K points, which is a symbol
            return NotImplemented
        with not_traced():
            points = make(*numbers, **options)
        return aten.lift_fresh_copy.default(points)

    return run


_BY_POINTS: dict[Any, Callable[..., Any]] = {
    op.default: _points(op.default) for op in (aten.linspace, aten.logspace)
}


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return x[mask.nonzero(as_tuple=True)]


def _index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Any:
    """``x[:, mask] = value`` with a value that broadcasts over the selected positions, as a where.

    (How many positions are selected depends on the values of the mask.)
    """
    *ahead, mask = indices
    if mask is not None and mask.dtype is torch.bool and all(index is None for index in ahead):
        rest = x.dim() - len(ahead) - mask.dim()
        selected = values.shape[-rest - 1] if values.dim() > rest else None
        if selected is None or (isinstance(selected, int) and selected == 1):
            if selected is not None:
                values = values.unflatten(-rest - 1, (1,) * mask.dim())
            while values.dim() > x.dim():
                values = values.squeeze(0)
            mask = mask.reshape(*mask.shape, *(1,) * rest)
            return torch.where(mask, x + values if accumulate else values, x)
    positions = _positions(indices)
    if positions is None:
        return NotImplemented
    return aten.index_put.default(x, positions, values, accumulate)


def _positions(indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """Indices with the positions that masks select in their place; None if there are no masks.

    Raises DynamicOutputShapeException in a trace that takes no number of positions for a symbol.
    """
    positions: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype is not torch.bool:
            positions.append(index)
        else:
            positions += index.nonzero(as_tuple=True)
    return None if all(map(operator.is_, positions, indices)) else positions


def _pack_padded_sequence(*_: Any) -> Any:
    """Its gradient cannot be traced, even where its number of rows may be a symbol."""
    raise DynamicOutputShapeException(aten._pack_padded_sequence.default)


def _select_scatter(x: Tensor, part: Tensor, dim: int, index: Any) -> Tensor:
    """As a slice: under vmap torch's is a scatter, whose gradient by the part is too large."""
    index = index if index >= 0 else index + x.shape[dim]
    part = part.unsqueeze(dim if dim >= 0 else dim + x.dim())
    return torch.slice_scatter(x, part, dim, index, index + 1)


def _diagonal_scatter(
    x: Tensor, part: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    """By a mask: Inductor (2.13) writes a diagonal of all steps in place, and fails."""
    matrices = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(n, device=x.device) for n in matrices.shape[-2:])
    by_column = _pad(part, (max(offset, 0), 0))
    by_column = _pad(by_column, (0, matrices.shape[-1] - by_column.shape[-1]))
    on_diagonal = columns - rows.unsqueeze(1) == offset
    result = torch.where(on_diagonal, by_column.unsqueeze(-2), matrices)
    return result.movedim((-2, -1), (dim1, dim2))


def _log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """``grad * sigmoid(-x)``; torch's has integers in it, of which kernels have no vectors."""
    z = torch.exp(-x.abs())
    share = z / (1 + z)
    return grad * torch.where(x < 0, 1 - share, share)


_MEAN, _SUM = 1, 2  # what losses call their reductions (torch/nn/_reduction.py)


def _of_any_number(backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The gradient of a mean by that of a sum; torch's is ``1.0 / numel``, an error for no element.

    In the dtype in which torch computes it.
    """

    def run(grad: Tensor, x: Tensor, target: Tensor, reduction: int, *options: Any) -> Tensor:
        if reduction != _MEAN:
            return backward(grad, x, target, reduction, *options)
        dtype = torch.promote_types(x.dtype, target.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        share = grad.to(wide) / x.numel()
        return backward(share, x.to(wide), target.to(wide), _SUM, *options).to(dtype)

    return run


def _atanh(x: Tensor) -> Tensor:
    """Inductor's (2.13) is 0 for small numbers in float32, as hyperbolic networks have them."""
    if x.is_complex():
        return NotImplemented
    size = x.abs()
    value = 0.5 * torch.log1p(2 * size / (1 - size))
    return torch.where(x < 0, -value, value)


def _acosh(x: Tensor) -> Tensor:
    """Inductor's (2.13) is infinite for large numbers, whose square is."""
    if x.is_complex():
        return NotImplemented
    beyond = x - 1
    return torch.log1p(beyond + beyond.sqrt() * (beyond + 2).sqrt())


# The powers that torch computes without its pow (aten/src/ATen/native/cpu/PowKernel.cpp). In a
# kernel pow takes as long as a small product of matrices.
_POWERS: dict[float, Callable[[Tensor], Tensor]] = {
    -2: lambda x: (x * x).reciprocal(),
    -1: torch.reciprocal,
    -0.5: torch.rsqrt,
    0.5: torch.sqrt,
    1: torch.clone,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
}


def _pow(x: Tensor, exponent: Any) -> Tensor:
    is_number = isinstance(exponent, int | float)  # else a number of steps, which has no hash
    if not (is_number and x.is_floating_point() and exponent in _POWERS):
        return NotImplemented
    return _POWERS[exponent](x)


def _roll(x: Tensor, shifts: Any, dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return _roll(x.flatten(), shifts, (0,)).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        first = -shift % max(x.shape[dim], 1)
        if first:
            x = torch.cat(_slices(x, [first, x.shape[dim] - first], dim)[::-1], dim)
    return x


def _pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.dim() - 1 - i  # from the last axis to the first
        if min(before, after) < 0:
            x = aten.slice.Tensor(x, dim, max(-before, 0), x.shape[dim] + min(after, 0))
        shape = list(x.shape)
        parts = [x]
        for count, at in ((after, 1), (before, 0)):
            if count > 0:
                shape[dim] = count
                parts.insert(at, torch.full(shape, value, dtype=x.dtype, device=x.device))
        x = torch.cat(parts, dim) if len(parts) > 1 else x
    return x


# Of their gradients torch has no shapes where the batch is a symbol.
_RESIZES = [
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default, aten.upsample_linear1d.default,
    aten.upsample_bilinear2d.default, aten.upsample_trilinear3d.default,
    aten.upsample_bicubic2d.default, aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default, aten._upsample_nearest_exact3d.default,
]  # fmt: skip

# Matrix-vector products as matrix products: one kind of GEMM to hoist and to differentiate. And the
# results of functionalize (copy, fill, zero), where autograd knows only the in-place operations, or
# only real numbers (slice_scatter).
BEFORE_AUTOGRAD: dict[Any, Callable[..., Any]] = {
    aten.mv.default: _mv,
    aten.dot.default: _dot,
    aten.addmv.default: _plus_product(_mv),
    aten._trilinear.default: _trilinear,
    aten.linalg_lu_solve.default: _lu_solve,
    aten._linalg_solve_ex.default: _solve_ex,
    aten._cdist_forward.default: _distances,
    aten._euclidean_dist.default: _distances,
    aten.copy.default: _copy,
    aten.fill.Scalar: torch.full_like,
    aten.zero.default: torch.zeros_like,
    # Zeros without memory, as the gradient of ``sgn``: compiled code reads memory.
    aten._efficientzerotensor.default: torch.zeros,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.masked_select.default: _masked_select,
    **_BY_VECTORS,
    **_BY_POINTS,
    aten._neg_view.default: torch.neg,
    aten._pack_padded_sequence.default: _pack_padded_sequence,
    **torch_decompositions(_RESIZES),
}


@cache
def past_autograd() -> dict[Any, Callable[..., Any]]:
    """Inductor's table of decompositions into core operations.

    Without the decompositions of operations that should stay one node of the reverse loop, and
    those into operations that vmap has no rule for (``flip`` becomes a prim). Biases are added
    after products; ``split`` and ``unbind`` become single slices, ``roll`` and padding slices that
    are joined, a diagonal that is written a mask.
    """
    table = inductor_decompositions()
    for op in (
        aten.sigmoid_backward,
        aten.tanh_backward,
        aten.embedding_dense_backward,
        aten.threshold_backward,
        aten.flip,
        aten.max_pool2d_with_indices,
        aten.max_pool3d_with_indices,
        aten.stack,
        aten._to_copy,
        aten.mm,
        aten.bmm,
        aten.add,  # torch's takes complex numbers apart, as views of real ones
    ):
        for overload in op.overloads():
            table.pop(getattr(op, overload), None)
    # Their indices are vectors by then, and Inductor's own are for every K. Points that are left
    # have another number for every K too, or are autograd's own.
    own = _BY_VECTORS.keys() | _BY_POINTS.keys()
    table.update({op: run for op, run in BEFORE_AUTOGRAD.items() if op not in own})
    # vmap has no rule for the prims that other decompositions are made of.
    table[torch.ops.prims.convert_element_type.default] = lambda x, dtype: x.to(dtype)
    if hasattr(torch.ops.prims, "fma"):
        table[torch.ops.prims.fma.default] = lambda a, b, c: a * b + c
    # torch has no shapes for them where they broadcast over a symbolic K (2.13).
    table[aten.addcmul.default] = lambda x, a, b, *, value=1: x + value * a * b
    table[aten.addcdiv.default] = lambda x, a, b, *, value=1: x + value * a / b
    table[aten.addmm.default] = _plus_product(torch.mm)
    table[aten.baddbmm.default] = _plus_product(torch.bmm)
    table[aten.split.Tensor] = _split
    table[aten.split_with_sizes.default] = lambda x, sizes, dim=0: _slices(x, sizes, dim)
    table[aten.roll.default] = _roll
    table[aten.constant_pad_nd.default] = _pad
    table[aten.diagonal_scatter.default] = _diagonal_scatter
    table[aten.log_sigmoid_backward.default] = _log_sigmoid_backward
    for op in (aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward):
        table[op.default] = _of_any_number(table[op.default])
    table[aten.atanh.default] = _atanh
    table[aten.acosh.default] = _acosh
    table[aten.pow.Tensor_Scalar] = _pow
    table[aten.unbind.int] = lambda x, dim=0: [x.select(dim, i) for i in range(x.shape[dim])]
    return table


def _split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    starts = range(0, x.shape[dim], max(size, 1)) or [0]  # of an empty axis one part, empty too
    return _slices(x, [min(size, x.shape[dim] - at) for at in starts], dim)


def _slices(x: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [aten.slice.Tensor(x, dim, a, a + n) for a, n in zip(starts, sizes, strict=True)]
