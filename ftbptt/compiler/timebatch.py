"""One step of a map block -> all steps at once: ``vmap`` over time, with rules of our own.

functorch's rules for ``cat``, for writes into a slice and for convolutions read the batch size as
a number, which would pin a program to one K. Its rule for products with a shared weight repeats
the weight K times if the other operand lies in memory in another order; here the steps always
become rows of one GEMM.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .convolution import (
    convolution_over_time,
    input_gradient,
    input_gradient_over_time,
    weight_gradient,
    weight_gradient_over_time,
)
from .graphs import aten


def _with_rule(run: Callable[..., Tensor], rule: Callable[..., Any]) -> Callable[..., Tensor]:
    """``run(*args)``, which vmap batches by ``rule(steps, dims, *args) -> (value, dim)``."""

    class Batched(torch.autograd.Function):
        generate_vmap_rule = False

        @staticmethod
        def forward(*args: Any) -> Tensor:
            return run(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Nothing is differentiated through a program."""

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return rule(info.batch_size, in_dims, *args)

    def batched(*args: Any) -> Tensor:  # a graph needs a function, with a name
        return Batched.apply(*args)

    return batched


def _in_front(steps: Any, dims: Any, tensors: Any) -> list[Tensor]:
    return [
        t.expand(steps, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip(tensors, dims, strict=True)
    ]


def _join_over_time(
    steps: Any, dims: Any, join: Any, dim: int, *tensors: Tensor
) -> tuple[Tensor, int]:
    return join(_in_front(steps, dims[2:], tensors), dim + 1), 0


_join = _with_rule(lambda join, dim, *tensors: join(list(tensors), dim), _join_over_time)


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return _join(torch.cat, dim % tensors[0].dim(), *tensors)


def _stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return _join(torch.stack, dim % (tensors[0].dim() + 1), *tensors)


def _scatter_over_time(
    steps: Any, dims: Any, scatter: Any, whole: Tensor, part: Tensor, dim: int, *where: Any
) -> tuple[Tensor, int]:
    whole, part = _in_front(steps, dims[1:3], (whole, part))
    return scatter(whole, part, dim + 1, *where), 0


_scatter = _with_rule(lambda scatter, *args: scatter(*args), _scatter_over_time)


def _slice_scatter(whole: Tensor, part: Tensor, dim: int = 0, *where: Any) -> Tensor:
    return _scatter(aten.slice_scatter.default, whole, part, dim % whole.dim(), *where)


def _select_scatter(whole: Tensor, part: Tensor, dim: int, index: int) -> Tensor:
    return _scatter(aten.select_scatter.default, whole, part, dim % whole.dim(), index)


def _product_over_time(steps: Any, dims: Any, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    a_dim, b_dim = dims
    if b_dim is None:  # [(n,) K, M, D] @ [(n,) D, N]: the steps are rows
        a = a.movedim(a_dim, -3)
        product = torch.matmul(a.flatten(-3, -2), b)
        return product.unflatten(-2, (steps, a.shape[-2])), b.dim() - 2
    if a_dim is None:  # [(n,) M, D] @ [(n,) D, K, N]: the steps are columns
        b = b.movedim(b_dim, -2)
        product = torch.matmul(a, b.flatten(-2))
        return product.unflatten(-1, (steps, b.shape[-1])), a.dim() - 1
    a, b = a.movedim(a_dim, 0), b.movedim(b_dim, 0)
    return torch.matmul(a, b), 0


_OURS = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.mm.default: _with_rule(torch.mm, _product_over_time),
    aten.bmm.default: _with_rule(torch.bmm, _product_over_time),
    aten.convolution.default: _with_rule(aten.convolution.default, convolution_over_time),
    input_gradient: _with_rule(input_gradient, input_gradient_over_time),
    weight_gradient: _with_rule(weight_gradient, weight_gradient_over_time),
}


def for_any_length(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the block with operations that batch over time as above, along one axis."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        node.target = _OURS.get(node.target, node.target)
    return fx.GraphModule(module, graph)
