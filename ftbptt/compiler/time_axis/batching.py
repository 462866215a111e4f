"""One step of a map block -> all steps at once: ``vmap`` over time, with some rules replaced.

functorch's rules for ``cat``, ``gather``, writes into a slice, convolutions, pooling and others
read sizes as numbers, which would fix a program to one K. Its rule for products with a shared
weight repeats the weight K times for some strides of the other operand; here the steps always
become rows of one GEMM.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ..._compat.graph_modules import GraphModule
from ..graphs import aten, matrix_product
from .convolution import (
    convolution_over_time,
    in_front,
    input_gradient,
    input_gradient_over_time,
    weight_gradient,
    weight_gradient_over_time,
)
from .images import image_operations, images_over_time


def _with_rule(run: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """``run(*args)``, which vmap batches by ``rule(steps, dims, *args) -> (value, dim)``."""

    class Batched(torch.autograd.Function):
        generate_vmap_rule = False

        @staticmethod
        def forward(*args: Any) -> Any:
            return run(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Nothing is differentiated through a program."""

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return rule(info.batch_size, in_dims, *args)

    def batched(*args: Any) -> Any:  # a graph needs a function, with a name
        return Batched.apply(*args)

    return batched


def _along(operation: Callable[..., Tensor], *axes: int) -> Callable[..., Tensor]:
    """An operation without broadcasting, whose arguments at the positions ``axes`` are axes."""

    def rule(steps: Any, dims: Any, options: Any, *args: Any) -> tuple[Tensor, int]:
        moved = [in_front(steps, d, arg) for d, arg in zip(dims[1:], args, strict=True)]
        for i in axes:
            moved[i] += 1
        return apply(options, *moved), 0  # by this rule again, if there is another vmap

    apply = _with_rule(lambda options, *args: operation(*args, **options), rule)

    def batched(*args: Any, **options: Any) -> Tensor:
        rank, new_args = args[0].dim(), list(args)
        # A scalar, of the values or as the index of a vector; or axes left at a default.
        has_scalar = any(isinstance(arg, Tensor) and arg.dim() == 0 for arg in args)
        if has_scalar or len(args) <= max(axes, default=0):
            return operation(*args, **options)
        for i in axes:
            new_args[i] %= rank
        return apply(options, *new_args)

    return batched


def _solved_over_time(steps: Any, dims: Any, a: Tensor, b: Tensor, options: Any) -> tuple[Any, int]:
    a, b = in_front(steps, dims[0], a), in_front(steps, dims[1], b)
    return _solve_matrices(a, b, options), 0


_solve_matrices = _with_rule(
    lambda a, b, options: aten._linalg_solve_ex.default(a, b, **options), _solved_over_time
)


def _solve(a: Tensor, b: Tensor, **options: Any) -> list[Tensor]:
    """``(a^-1 b, LU of a, ...)``; the matrices have as many axes, see ``decompositions``."""
    return list(_solve_matrices(a, b, options))


def _join_over_time(
    steps: Any, dims: Any, join: Any, dim: int, *tensors: Tensor
) -> tuple[Tensor, int]:
    moved = [in_front(steps, d, t) for d, t in zip(dims[2:], tensors, strict=True)]
    return _join(join, dim + 1, *moved), 0


_join = _with_rule(lambda join, dim, *tensors: join(list(tensors), dim), _join_over_time)


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return _join(torch.cat, dim % tensors[0].dim(), *tensors)


def _stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return _join(torch.stack, dim % (tensors[0].dim() + 1), *tensors)


def _product_over_time(steps: Any, dims: Any, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    a_dim, b_dim = dims
    if b_dim is None:  # [(n,) K, M, D] @ [(n,) D, N]: the steps are rows
        a = a.movedim(a_dim, -3)
        product = matrix_product(a.flatten(-3, -2), b)
        return product.unflatten(-2, (steps, a.shape[-2])), b.dim() - 2
    if a_dim is None:  # [(n,) M, D] @ [(n,) D, K, N]: the steps are columns
        b = b.movedim(b_dim, -2)
        product = matrix_product(a, b.flatten(-2))
        return product.unflatten(-1, (steps, b.shape[-1])), a.dim() - 1
    a, b = a.movedim(a_dim, 0), b.movedim(b_dim, 0)
    return matrix_product(a, b), 0


def _binomial(count: Tensor, p: Tensor, generator: Any = None) -> Tensor:
    """Its ``count`` has K if ``p`` has: torch takes the shape of the result from it (2.13)."""
    return torch.binomial(torch.where(p >= 0, count, count), p, generator)


_BATCHABLE = {
    aten.binomial.default: _binomial,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice_scatter.default: _along(aten.slice_scatter.default, 2),
    aten.diagonal_scatter.default: _along(aten.diagonal_scatter.default, 3, 4),
    aten.gather.default: _along(aten.gather.default, 1),
    aten.scatter.src: _along(aten.scatter.src, 1),
    aten.scatter.value: _along(aten.scatter.value, 1),
    aten.scatter_add.default: _along(aten.scatter_add.default, 1),
    aten.scatter_reduce.two: _along(aten.scatter_reduce.two, 1),
    aten.mm.default: _with_rule(torch.mm, _product_over_time),
    aten.bmm.default: _with_rule(torch.bmm, _product_over_time),
    aten.convolution.default: _with_rule(aten.convolution.default, convolution_over_time),
    input_gradient: _with_rule(input_gradient, input_gradient_over_time),
    weight_gradient: _with_rule(weight_gradient, weight_gradient_over_time),
    aten._linalg_solve_ex.default: _solve,
    **{op: _with_rule(op, partial(images_over_time, op)) for op in image_operations()},
}


def for_any_length(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the block, with the operations above that vmap over time for any K."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        node.target = _BATCHABLE.get(node.target, node.target)
    return GraphModule(module, graph)
