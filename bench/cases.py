"""The cases timed: a recurrent step, a loss and the data of one segment, for each case.

Every peer computes the same thing for a case: the forward pass from a zero state, the mean squared
error, and the gradients of all parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .cells import KINDS, Stack, Tree


@dataclass(frozen=True)
class Case:
    """A step's kind and its sizes: K steps, B rows, D inputs (and outputs), H units, L layers."""

    name: str
    kind: str  # a key of KINDS
    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int = 1
    per_sequence: bool = False  # under vmap, one gradient for each of the B sequences
    models: int = 1  # under vmap, that number of models, each with its own B rows
    unrolled: bool = False  # K is small enough for torch.compile of the unrolled loop
    recompute: bool = False  # also time the engine with recompute=True
    dtype: torch.dtype = torch.float32

    @property
    def title(self) -> str:
        sizes = f"T={self.steps} B={self.batch} D={self.inputs} H={self.hidden}"
        cell = KINDS[self.kind].label
        cell = cell if self.layers == 1 else f"{self.layers}-layer {cell}"
        if self.dtype != torch.float32:
            sizes += f", {str(self.dtype).removeprefix('torch.')}"
        if self.per_sequence:
            return f"vmap over {self.batch} {cell}s, {sizes}"
        return (
            f"vmap over {self.models} {cell} models, {sizes}" if self.apart else f"{cell} {sizes}"
        )

    @property
    def apart(self) -> int:
        """The number of separate gradients; 0 without vmap."""
        return self.batch if self.per_sequence else self.models if self.models > 1 else 0

    @property
    def in_dims(self) -> tuple[int | None, int, int, int]:
        """Of params, state, x and y, for vmap."""
        return (0 if self.models > 1 else None, 0, 0, 0)


class Part(NamedTuple):
    """A model and the data of its gradient."""

    model: Stack
    state: Tree
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Problem:
    """A case with its numbers. Where gradients are apart, their axis comes first: x[apart, K, D]
    for sequences, x[apart, K, B, D] and params[apart, ...] for models.
    """

    case: Case
    models: tuple[Stack, ...]
    state: Tree
    x: Tensor
    y: Tensor

    @property
    def model(self) -> Stack:
        return self.models[0]

    @property
    def params(self) -> dict[str, Tensor]:
        if self.case.models > 1:
            return torch.func.stack_module_state(list(self.models))[0]
        return dict(self.model.named_parameters())

    def parts(self) -> Iterator[Part]:
        """The segments whose gradients are apart, one by one; without vmap, the only one."""
        if not self.case.apart:
            yield Part(self.model, self.state, self.x, self.y)
        for i in range(self.case.apart):
            model = self.models[i if self.case.models > 1 else 0]
            state = pytree.tree_map(lambda leaf, i=i: leaf[i], self.state)
            yield Part(model, state, self.x[i], self.y[i])


def loss(out: Tensor, y: Tensor) -> Tensor:
    """Mean squared error."""
    return (out - y).square().mean()


def build(case: Case, dtype: torch.dtype | None = None) -> Problem:
    """The case's numbers, the same in every process; drawn in float32, then converted to
    ``dtype``, or the case's own.
    """
    dtype = dtype or case.dtype
    torch.manual_seed(0)
    kind = KINDS[case.kind]
    models = [Stack(kind, case.inputs, case.hidden, case.layers) for _ in range(case.models)]
    ensemble = (case.models,) if case.models > 1 else ()
    shape = (*ensemble, case.steps, case.batch, case.inputs)
    x, y = torch.randn(shape), torch.randn(shape)
    if case.per_sequence:
        x, y = x.movedim(1, 0).contiguous(), y.movedim(1, 0).contiguous()

    def zero() -> Tensor:
        return torch.zeros(*ensemble, case.batch, case.hidden, dtype=dtype)

    state = tuple(zero() if kind.leaves == 1 else (zero(), zero()) for _ in range(case.layers))
    return Problem(case, tuple(m.to(dtype) for m in models), state, x.to(dtype), y.to(dtype))
