"""One step of a map block -> all steps at once: ``vmap`` over time, for a symbolic number of steps.

functorch's rule for ``cat`` reads the batch size as a number, which would pin a program to one K
(its other rules keep the symbol). These two stand in for ``cat`` and ``stack`` inside map blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .graphs import aten


class _Cat(torch.autograd.Function):
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
        return _Cat.apply(join, dim + 1, *whole), 0


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return _Cat.apply(torch.cat, dim % tensors[0].dim(), *tensors)


def _stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return _Cat.apply(torch.stack, dim % (tensors[0].dim() + 1), *tensors)


def for_any_length(module: fx.GraphModule) -> fx.GraphModule:
    """The block with operations that can be batched over a symbolic number of steps."""
    for node in module.graph.nodes:
        node.target = {aten.cat.default: _cat, aten.stack.default: _stack}.get(
            node.target, node.target
        )
    module.recompile()
    return module
