"""One step of a map block -> all steps at once: ``vmap`` over time, with rules of our own.

functorch's rule for ``cat`` reads the batch size as a number, which would pin a program to one K.
Its rule for products with a shared weight repeats the weight K times if the other operand lies
in memory in another order; here the steps always become rows of one GEMM.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .graphs import aten


class _Join(torch.autograd.Function):
    """``torch.cat`` or ``torch.stack``."""

    generate_vmap_rule = False

    @staticmethod
    def forward(join: Callable[..., Tensor], dim: int, *tensors: Tensor) -> Tensor:
        return join(list(tensors), dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is differentiated through a program."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, join: Any, dim: int, *tensors: Tensor) -> tuple[Tensor, int]:
        whole = [
            t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(tensors, in_dims[2:], strict=True)
        ]
        return join(whole, dim + 1), 0


class _Product(torch.autograd.Function):
    """``torch.mm`` or ``torch.bmm``."""

    generate_vmap_rule = False

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is differentiated through a program."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
        steps, (a_dim, b_dim) = info.batch_size, in_dims
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


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return _Join.apply(torch.cat, dim % tensors[0].dim(), *tensors)


def _stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return _Join.apply(torch.stack, dim % (tensors[0].dim() + 1), *tensors)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _Product.apply(a, b)


_OURS = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.mm.default: _product,
    aten.bmm.default: _product,
}


def for_any_length(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the block with operations that batch over time as above, along one axis."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        node.target = _OURS.get(node.target, node.target)
    return fx.GraphModule(module, graph)
