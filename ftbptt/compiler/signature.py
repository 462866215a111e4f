"""What a plan depends on: the caller's functions, and the structure and leaves of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._loss import Loss
from .._modules import modules_read_by
from .._step import Step
from .._trees import TreeSpec

Tree = Any


@dataclass(frozen=True)
class Level:
    """One level of ``vmap`` around the segment; a batched tensor has the new axis in front."""

    size: int
    randomness: str


Autocast = tuple[str, torch.dtype]  # the type of the device, and what is computed in


def under(autocast: Autocast | None) -> AbstractContextManager[Any]:
    """The caller's autocast, around the caller's functions."""
    return nullcontext() if autocast is None else torch.autocast(*autocast)


def as_traced(autocast: Autocast | None) -> AbstractContextManager[Any]:
    """Around everything else: the casts are in the graphs, and what is not cast is to stay so."""
    return nullcontext() if autocast is None else torch.autocast(autocast[0], enabled=False)


@dataclass(frozen=True)
class Leaf:
    """A tensor of a call, without its vmap axes and, for a sequence, without its time axis.

    ``batched`` says for each level of vmap, the innermost first, whether the leaf has its axis.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    batched: tuple[bool, ...]
    shared: bool = False  # has the axis of ``in_dims``

    def example(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Specs(NamedTuple):
    """The structure of the arguments that are trees."""

    params: TreeSpec
    state: TreeSpec
    x: TreeSpec
    y: TreeSpec | None  # None without targets


@dataclass(frozen=True)
class Signature:
    """What a plan depends on: leaves and structure of the arguments. K is not in it."""

    specs: Specs
    params: tuple[Leaf, ...]
    buffers: tuple[Leaf, ...]
    initial: tuple[Leaf, ...]  # a given initial state, not one computed from the parameters
    state: tuple[Leaf, ...]
    x: tuple[Leaf, ...]
    y: tuple[Leaf, ...]
    reset: Leaf | None
    mask: Leaf | None
    levels: tuple[Level, ...]
    shared: Level | None  # the batch axis of in_dims, inside which gradients are averaged
    time_dim: int
    autocast: Autocast | None


@dataclass
class Recipe:
    """What the caller asked for, apart from the data: the arguments of make_train_segment."""

    step: Step
    loss: Loss
    initial_state: Tree | Callable[[Tree], Tree] | None
    recompute: bool
    context: int = 0
    window: int | None = None  # how far each step's loss reaches back, and
    stride: int = 1  # how many steps do so together
    probes: int = 0  # the last leaves of x, by which there is a gradient at every step

    @cached_property
    def _modules_of_loss(self) -> list[nn.Module]:
        return modules_read_by(self.loss)

    def modes(self) -> tuple[bool, ...]:
        """Which modules of the step and of the loss are in train mode."""
        return (*self.step.modes(), *[module.training for module in self._modules_of_loss])


def vmapped(
    function: Callable[..., Any],
    levels: Sequence[Level],
    batched: Sequence[Sequence[bool]],
    dim: int = 0,
    out_dims: Sequence[int] | None = None,
) -> Callable[..., Any]:
    """``function`` under each level of vmap, innermost first; ``batched`` flags its arguments.

    ``out_dims``: where each result gets the axis, if not all in front.
    """
    for level, flags in zip(levels, batched, strict=True):
        dims = tuple(dim if flag else None for flag in flags)
        function = torch.func.vmap(function, dims, randomness=level.randomness)
        if out_dims is not None:
            function = _moved(function, out_dims)
    return function


def _moved(function: Callable[..., Any], out_dims: Sequence[int]) -> Callable[..., Any]:
    """vmap's own ``out_dims`` puts the axis of a result that has none in front all the same."""

    def run(*args: Tensor) -> list[Tensor]:
        return [t.movedim(0, dim) for t, dim in zip(function(*args), out_dims, strict=True)]

    return run


def with_level_axes(
    values: Sequence[Tensor], levels: Sequence[Level], batched: Sequence[Sequence[bool]]
) -> list[Tensor]:
    """Fake examples with the axes that each level of vmap adds in front."""
    values = list(values)
    for level, flags in zip(levels, batched, strict=True):
        for i, flag in enumerate(flags):
            if flag:
                values[i] = values[i].new_empty((level.size, *values[i].shape))
    return values


def differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
