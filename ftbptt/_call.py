"""One call of a segment: its arguments checked, laid out with time in front, and flattened.

Errors name the argument, the path of the leaf in it, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._compat import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_leaves
from ._step import Step
from .compiler.signature import Leaf, Level, Signature

Tree = Any
GROUPS = ("params", "buffers", "initial_state", "state", "x", "y", "reset", "mask")
SEQUENCES = ("x", "y", "reset", "mask")


@dataclass(frozen=True)
class Call:
    """The static part of a call: what the tensors are. The tensors travel beside it, flat.

    ``counts`` are the numbers of leaves in each of ``GROUPS``, ``shapes`` the leaves' shapes
    without any batch axis, ``batched`` which levels of vmap each leaf has.
    """

    specs: tuple[TreeSpec, TreeSpec, TreeSpec, TreeSpec | None]
    counts: tuple[int, ...]
    buffer_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shared: Level | None
    shared_flags: tuple[bool, ...]
    time_dim: int
    levels: tuple[Level, ...] = ()
    batched: tuple[tuple[bool, ...], ...] = ()
    context: tuple[Any, ...] = ()

    def under_vmap(self, level: Level, flags: Sequence[bool]) -> Call:
        before = self.batched or ((),) * len(flags)
        batched = tuple((*b, f) for b, f in zip(before, flags, strict=True))
        return replace(self, levels=(*self.levels, level), batched=batched)

    def is_sequence(self) -> list[bool]:
        """For each tensor, whether its axis 0 is time."""
        return [g in SEQUENCES for g, n in zip(GROUPS, self.counts, strict=True) for _ in range(n)]

    def groups(self, tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        found, start = {}, 0
        for name, count in zip(GROUPS, self.counts, strict=True):
            found[name] = list(tensors[start : start + count])
            start += count
        return found

    def signature(self, tensors: Sequence[Tensor]) -> Signature:
        unbatched = (False,) * len(self.levels)
        leaves = [
            Leaf(shape, t.dtype, t.device, self.batched[i] if self.levels else unbatched, shared)
            for i, (shape, t, shared) in enumerate(
                zip(self.shapes, tensors, self.shared_flags, strict=True)
            )
        ]
        g: dict[str, Any] = self.groups(leaves)  # type: ignore[arg-type]
        return Signature(
            self.specs, tuple(g["params"]), tuple(g["buffers"]), tuple(g["initial_state"]),
            tuple(g["state"]), tuple(g["x"]), tuple(g["y"]),
            g["reset"][0] if g["reset"] else None, g["mask"][0] if g["mask"] else None,
            self.levels, self.shared, self.time_dim, self.context,
        )  # fmt: skip


def check_tensors(argument: str, tree: Tree) -> None:
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{argument}{keystr(path)}: expected a tensor, found {type(leaf).__name__}. "
                f"Every leaf of {argument} must be a tensor: torch.as_tensor(value), or keep what "
                "is not data out of it."
            )


def check_params(step: Step, params: Tree) -> None:
    check_tensors("params", params)
    names = step.parameter_names()
    if names is None:
        return
    if not isinstance(params, dict):
        raise TypeError(
            f"params: expected a dict of {step.name}'s parameters by name, found "
            f"{type(params).__name__}. Pass dict(module.named_parameters())."
        )
    known = {*names, *step.buffers()}
    if missing := [name for name in names if name not in params]:
        raise TypeError(
            f"params: {missing[0]!r} is missing, a parameter of {step.name}. Pass "
            "dict(module.named_parameters()); to freeze one, pass it and leave it out of the "
            "optimizer."
        )
    if unknown := [name for name in params if name not in known]:
        raise TypeError(
            f"params: {unknown[0]!r} is not a parameter of {step.name}, which has "
            f"{', '.join(map(repr, names))}."
        )


def check_lengths(
    x: Tree, y: Tree, time_dim: int, x_dim: int | None = None, y_dim: int | None = None
) -> int:
    """The number of steps K, the same in every leaf of x and y.

    ``x_dim`` and ``y_dim`` are axes that ``time_dim`` does not count (``in_dims``).
    """
    steps: int | None = None
    first = ""
    for argument, tree, dim in (("x", x, x_dim), ("y", y, y_dim)):
        for path, leaf in tree_flatten_with_path(tree)[0]:
            name = f"{argument}{keystr(path)}"
            shape = list(leaf.shape)
            if dim is not None and -len(shape) <= dim < len(shape):
                del shape[dim]
            if len(shape) <= time_dim:
                raise ValueError(
                    f"{name}: expected time on axis {time_dim}, found shape {list(leaf.shape)}."
                )
            own = shape[time_dim]
            if steps is None:
                steps, first = own, name
            elif own != steps:
                raise ValueError(
                    f"{name}: has {own} steps on axis {time_dim}, but {first} has {steps}. x and y "
                    "must have the same length; nothing is cut silently."
                )
    if steps is None:
        raise TypeError("x: expected at least one tensor, with time on its first axis; found none.")
    if steps == 0:
        raise ValueError("x: has 0 steps; a segment needs at least one. Skip an empty segment.")
    return steps


def check_rows(
    argument: str, rows: Tensor, steps: int, state: Tree, row_axis: Callable[[Tensor], int]
) -> None:
    """``reset`` and ``mask``, with time in front: bool, [K] or [K, B]."""
    if not isinstance(rows, Tensor) or rows.dtype != torch.bool:
        found = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"{argument}: expected a bool tensor [K] or [K, B], found {found}.")
    if rows.dim() not in (1, 2):
        raise ValueError(f"{argument}: expected [K] or [K, B], found shape {list(rows.shape)}.")
    if rows.shape[0] != steps:
        raise ValueError(f"{argument}: has {rows.shape[0]} steps, but x has {steps}.")
    if rows.dim() == 2:
        for path, leaf in tree_flatten_with_path(state)[0]:
            axis = row_axis(leaf)
            found = leaf.shape[axis] if leaf.dim() > axis else None
            if found != rows.shape[1]:
                raise ValueError(
                    f"{argument}: has {rows.shape[1]} rows, but state{keystr(path)} of shape "
                    f"{list(leaf.shape)} has {found or 'none'} on axis {axis}. Give one bool per "
                    f"row of the batch, or [K] for all rows; if the rows of the state lie on "
                    "another axis, say so with as_step(..., state_batch_dim=)."
                )


def check_devices(groups: Sequence[tuple[str, Tree]]) -> None:
    first: tuple[str, torch.device] | None = None
    for argument, tree in groups:
        for path, leaf in tree_flatten_with_path(tree)[0]:
            if first is None:
                first = f"{argument}{keystr(path)}", leaf.device
            elif leaf.device != first[1]:
                raise ValueError(
                    f"{argument}{keystr(path)}: is on {leaf.device}, but {first[0]} is on "
                    f"{first[1]}. Move everything to one device."
                )


def check_same_structure(argument: str, tree: Tree, state: Tree) -> None:
    check_tensors(argument, tree)
    if tree_flatten(tree)[1] != tree_flatten(state)[1]:
        raise TypeError(
            f"{argument}: expected the structure of the state, found another one.\n"
            f"  state: {tree_flatten(state)[1]}\n  {argument}: {tree_flatten(tree)[1]}"
        )


def autocast_context(x: Tree) -> tuple[Any, ...]:
    """What else a trace depends on: autocast on the device of the data."""
    kind = tree_leaves(x)[0].device.type
    if not torch.is_autocast_enabled(kind):
        return ()
    return ("autocast", kind, torch.get_autocast_dtype(kind))
