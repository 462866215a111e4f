"""The static part of a segment's call: what its tensors are, and how flat lists of them divide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._trees import Tree, in_groups
from ..compiler.signature import Autocast, Leaf, Level, Recipe, Signature, Specs
from ..contract.output import EarlyGradients

T = TypeVar("T")


class Arguments(NamedTuple):
    """The caller's."""

    params: Tree
    state: Tree
    x: Tree
    y: Tree
    reset: Tensor | None = None
    mask: Tensor | None = None


class Counts(NamedTuple):
    """How many leaves each group of arguments has, in the order of the flat list."""

    params: int
    buffers: int
    initial_state: int
    state: int
    x: int
    y: int
    reset: int
    mask: int


GROUPS = Counts._fields
SEQUENCES = {"x", "y", "reset", "mask"}  # whose leaves have time on axis 0


class Results(NamedTuple, Generic[T]):
    """What a segment returns, as flat lists. ``out`` also holds the gradients of the taps."""

    grads: list[T]
    state: list[T]
    loss: T
    out: list[T]


class Settings(NamedTuple):
    """What a trace, and what is made of it, depends on besides the arguments of a call.

    ``modes``: which modules are in train mode. ``autocast``: the caller's for the data, if any.
    ``fp32_precision``: of products on a GPU, by which tiles are chosen; elsewhere None.
    """

    modes: tuple[bool, ...]
    default_dtype: torch.dtype
    autocast: Autocast | None
    fp32_precision: str | None


@dataclass(frozen=True)
class Call:
    """What the tensors of a call are. The tensors travel beside it, in one flat list.

    ``shapes`` are those of the leaves without any batch axis, ``batched`` says for each leaf which
    levels of vmap it has, ``mean_axis_flags`` whether it has the axis of ``in_dims``.
    """

    specs: Specs
    counts: Counts
    buffer_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    mean_axis: Level | None
    mean_axis_flags: tuple[bool, ...]
    time_dim: int
    settings: Settings
    levels: tuple[Level, ...] = ()
    batched: tuple[tuple[bool, ...], ...] = ()
    probes: int = 0  # the last leaves of x are zeros, by which there is a gradient at every step

    def under_vmap(self, level: Level, flags: Sequence[bool]) -> Call:
        """The call with one more level of vmap; ``flags`` says which tensors have its axis."""
        before = self.batched or ((),) * len(flags)
        batched = tuple((*b, f) for b, f in zip(before, flags, strict=True))
        return replace(self, levels=(*self.levels, level), batched=batched)

    def is_sequence(self) -> list[bool]:
        """For each tensor, whether its axis 0 is time."""
        counts = zip(GROUPS, self.counts, strict=True)
        return [group in SEQUENCES for group, count in counts for _ in range(count)]

    def groups(self, values: Sequence[Any]) -> dict[str, list[Any]]:
        """One value for each tensor, by group."""
        return dict(zip(GROUPS, in_groups(values, self.counts), strict=True))

    def results(self, flat: Sequence[T], with_grad: bool) -> Results[T]:
        """What a segment returns, divided; ``grads`` is empty if they were not asked for."""
        n_grads = self.counts.params if with_grad else 0
        loss = n_grads + self.counts.state
        return Results(
            list(flat[:n_grads]), list(flat[n_grads:loss]), flat[loss], list(flat[loss + 1 :])
        )

    def key(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """What a plan is cached by; as the signature, but quick to make."""
        kinds = tuple((t.dtype, t.device) for t in tensors)
        return (self.specs, self.counts, self.buffer_names, self.shapes, kinds, self.mean_axis,
                self.mean_axis_flags, self.time_dim, self.settings, self.levels,
                self.batched)  # fmt: skip

    def signature(self, tensors: Sequence[Tensor]) -> Signature:
        batched = self.batched or ((),) * len(tensors)
        leaves = map(Leaf, self.shapes, *zip(*((t.dtype, t.device) for t in tensors), strict=True),
                     batched, self.mean_axis_flags)  # fmt: skip
        g = self.groups(list(leaves))
        return Signature(
            self.specs, tuple(g["params"]), tuple(g["buffers"]), tuple(g["initial_state"]),
            tuple(g["state"]), tuple(g["x"]), tuple(g["y"]),
            g["reset"][0] if g["reset"] else None, g["mask"][0] if g["mask"] else None,
            self.levels, self.mean_axis, self.time_dim, self.settings.autocast,
        )  # fmt: skip


@dataclass
class CallInfo:
    """What is asked of a call, and, once it has run, the structure of its outputs.

    ``early``: who is handed gradients while others are still being computed.
    """

    with_grad: bool = True
    early: EarlyGradients | None = None
    out_spec: Any = None


@contextmanager
def without_inference_mode() -> Iterator[None]:
    """For tensors that other calls write to: those of inference mode can be written in it only."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def settings_of(recipe: Recipe, device_type: str) -> Settings:
    """The settings of a call on data of a device."""
    autocast = None
    if torch.is_autocast_enabled(device_type):
        autocast = device_type, torch.get_autocast_dtype(device_type)
    precision = torch.backends.cuda.matmul.fp32_precision if device_type == "cuda" else None
    return Settings(recipe.modes(), torch.get_default_dtype(), autocast, precision)
