"""What a plan depends on: the caller's functions, and the structure and leaves of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._reach import modules_read_by
from .._trees import Tree, TreeSpec
from ..contract.layout import InDims, InDimsLayout, Layout
from ..contract.loss import Loss
from ..contract.step import Step


@dataclass(frozen=True)
class Level:
    """One level of ``vmap`` around the segment; its axis is the first of a batched tensor."""

    size: int
    randomness: str


Autocast = tuple[str, torch.dtype]  # the arguments of torch.autocast: device type and dtype


def with_autocast(autocast: Autocast | None) -> AbstractContextManager[Any]:
    """The caller's autocast, for around the caller's functions."""
    return nullcontext() if autocast is None else torch.autocast(*autocast)


def without_autocast(autocast: Autocast | None) -> AbstractContextManager[Any]:
    """No autocast, for around everything else: the graphs already contain the casts."""
    return nullcontext() if autocast is None else torch.autocast(autocast[0], enabled=False)


@dataclass(frozen=True)
class Leaf:
    """A tensor of a call, without its vmap axes and, for a sequence, without its time axis.

    ``batched`` says for each level of vmap, innermost first, whether the leaf has its axis;
    ``has_mean_axis`` whether it has that of ``in_dims``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    batched: tuple[bool, ...]
    has_mean_axis: bool = False

    @property
    def is_differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

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
    initial: tuple[Leaf, ...]  # of an initial state that is not computed from the parameters
    state: tuple[Leaf, ...]
    x: tuple[Leaf, ...]
    y: tuple[Leaf, ...]
    reset: Leaf | None
    mask: Leaf | None
    levels: tuple[Level, ...]
    mean_axis: Level | None  # the batch axis of in_dims, over which the loss is averaged
    time_dim: int
    autocast: Autocast | None

    @property
    def batch_axes(self) -> int:
        """How many axes the levels of vmap and ``in_dims`` add."""
        return len(self.levels) + (self.mean_axis is not None)

    def flags(self, leaves: Sequence[Leaf]) -> list[list[bool]]:
        """For each level of vmap, whether each leaf has its axis."""
        return [[leaf.batched[i] for leaf in leaves] for i in range(len(self.levels))]

    def axes(self, leaves: Sequence[Leaf]) -> list[tuple[Level, list[bool]]]:
        """The axes that these and ``in_dims`` add, innermost first, and which leaves have each."""
        axes = list(zip(self.levels, self.flags(leaves), strict=True))
        if self.mean_axis is not None:
            axes.insert(0, (self.mean_axis, [leaf.has_mean_axis for leaf in leaves]))
        return axes

    def axes_of(self, leaf: Leaf) -> Iterator[tuple[Level, bool]]:
        """The same, as they follow each other in a tensor, each with whether the leaf has it."""
        for level, (has_axis,) in reversed(self.axes([leaf])):
            yield level, has_axis


@dataclass
class Recipe:
    """What the caller asked for, apart from the data: the arguments of make_train_segment."""

    step: Step
    loss: Loss
    initial_state: Tree | Callable[[Tree], Tree] | None
    recompute: bool
    context: int = 0
    window: int | None = None  # steps that each loss reaches back, for a sliding window
    stride: int = 1  # steps between windows
    probes: int = 0  # how many of the last leaves of x get a gradient at every step
    time_dim: int | None = None
    in_dims: InDims | None = None
    traces_loss: bool = True  # else it runs as it is written

    def layout(self, x: Tree) -> Layout:
        """Where time, rows and the axis of ``in_dims`` lie in a call with such an ``x``."""
        batch_axes = 0 if self.in_dims is None else 1
        layout = Layout.of(self.step, self.time_dim, x, batch_axes)
        return layout if self.in_dims is None else InDimsLayout(layout.time_dim, *self.in_dims[1:])

    @cached_property
    def _modules(self) -> list[nn.Module]:
        read = (module for function in self.functions() for module in modules_read_by(function))
        return list(dict.fromkeys(read))

    def find_modules_again(self) -> None:
        """After a change of what the functions read."""
        self.__dict__.pop("_modules", None)

    def functions(self) -> list[Any]:
        """The caller's."""
        start = [self.initial_state] if callable(self.initial_state) else []
        return [self.step.root, self.loss, *start]

    def traced_functions(self) -> list[Any]:
        """Those of them that are traced."""
        return [f for f in self.functions() if f is not self.loss or self.traces_loss]

    def modes(self) -> tuple[bool, ...]:
        """Which modules that the functions read are in train mode: it changes what they do."""
        return tuple([module.training for module in self._modules])


def vmapped(
    function: Callable[..., Any],
    levels: Sequence[Level],
    batched: Sequence[Sequence[bool]],
    dim: int = 0,
    out_dims: Sequence[int] | None = None,
) -> Callable[..., Any]:
    """``function`` under each level of vmap, innermost first; ``batched`` flags its arguments.

    ``dim`` is the axis in the arguments, ``out_dims`` that in each result (default: the first).
    """
    for level, flags in zip(levels, batched, strict=True):
        dims = tuple(dim if flag else None for flag in flags)
        function = torch.func.vmap(function, dims, randomness=level.randomness)
        if out_dims is not None:
            function = _moved(function, out_dims)
    return function


def _moved(function: Callable[..., Any], out_dims: Sequence[int]) -> Callable[..., Any]:
    """Moves the axis by hand: vmap ignores ``out_dims`` for a result that is not batched."""

    def run(*args: Tensor) -> list[Tensor]:
        return [t.movedim(0, dim) for t, dim in zip(function(*args), out_dims, strict=True)]

    return run


def with_level_axes(
    values: Sequence[Tensor], levels: Sequence[Level], batched: Sequence[Sequence[bool]]
) -> list[Tensor]:
    """Fake examples with the axes that the levels of vmap add, the outermost first."""
    values = list(values)
    for level, flags in zip(levels, batched, strict=True):
        for i, flag in enumerate(flags):
            if flag:
                values[i] = values[i].new_empty((level.size, *values[i].shape))
    return values
