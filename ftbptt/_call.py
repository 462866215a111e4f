"""One call of a segment: its arguments checked, laid out with time in front, and flattened.

Errors name the argument, the path of the leaf in it, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._layout import Layout, SharedLayout
from ._step import Step, start_of
from ._trees import (
    TreeSpec,
    in_order_of,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from .compiler.signature import Leaf, Level, Recipe, Signature

Tree = Any
InDims = tuple[None, int | None, int, int | None]
GROUPS = ("params", "buffers", "initial_state", "state", "x", "y", "reset", "mask")
IS_SEQUENCE = (False, False, False, False, True, True, True, True)


@dataclass(frozen=True)
class Call:
    """The static part of a call: what the tensors are. The tensors travel beside it, flat.

    ``counts`` are the numbers of leaves in each of ``GROUPS``, ``shapes`` the leaves' shapes
    without any batch axis, ``batched`` which levels of vmap each leaf has.
    """

    specs: tuple[TreeSpec, TreeSpec, TreeSpec, TreeSpec | None]  # params, state, x, y
    counts: tuple[int, ...]
    buffer_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shared: Level | None
    shared_flags: tuple[bool, ...]
    time_dim: int
    context: tuple[Any, ...] = ()
    levels: tuple[Level, ...] = ()
    batched: tuple[tuple[bool, ...], ...] = ()
    probes: int = 0  # the last leaves of x are zeros, by which there is a gradient at every step

    def under_vmap(self, level: Level, flags: Sequence[bool]) -> Call:
        before = self.batched or ((),) * len(flags)
        batched = tuple((*b, f) for b, f in zip(before, flags, strict=True))
        return replace(self, levels=(*self.levels, level), batched=batched)

    def is_sequence(self) -> list[bool]:
        """For each tensor, whether its axis 0 is time."""
        return [own for own, n in zip(IS_SEQUENCE, self.counts, strict=True) for _ in range(n)]

    def groups(self, values: Sequence[Any]) -> dict[str, list[Any]]:
        found, start = {}, 0
        for name, count in zip(GROUPS, self.counts, strict=True):
            found[name] = list(values[start : start + count])
            start += count
        return found

    def key(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """What a plan is cached by; as the signature, but quick to make."""
        kinds = tuple((t.dtype, t.device) for t in tensors)
        return (self.specs, self.counts, self.shapes, kinds, self.shared, self.shared_flags,
                self.time_dim, self.context, self.levels, self.batched)  # fmt: skip

    def signature(self, tensors: Sequence[Tensor]) -> Signature:
        batched = self.batched or ((),) * len(tensors)
        leaves = map(Leaf, self.shapes, *zip(*((t.dtype, t.device) for t in tensors), strict=True),
                     batched, self.shared_flags)  # fmt: skip
        g = self.groups(list(leaves))
        return Signature(
            self.specs, tuple(g["params"]), tuple(g["buffers"]), tuple(g["initial_state"]),
            tuple(g["state"]), tuple(g["x"]), tuple(g["y"]),
            g["reset"][0] if g["reset"] else None, g["mask"][0] if g["mask"] else None,
            self.levels, self.shared, self.time_dim, self.autocast,
        )  # fmt: skip

    @property
    def autocast(self) -> tuple[str, torch.dtype] | None:
        """The device type and dtype of the caller's autocast, if there is one."""
        return self.context[-1] if self.context else None


_LEAF, _EMPTY = tree_flatten(0)[1], tree_flatten(())[1]


class Argument:
    """One argument of the caller, flattened; every leaf of it a tensor."""

    def __init__(self, name: str, tree: Tree) -> None:
        self.name, self.tree = name, tree
        if isinstance(tree, Tensor):  # the most frequent tree, and the slowest to ask pytree for
            self.leaves, self.spec = [tree], _LEAF
        elif type(tree) is tuple and not tree:
            self.leaves, self.spec = [], _EMPTY
        else:
            self.leaves, self.spec = tree_flatten(tree)
        for i, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"{self.path(i)}: expected a tensor, found {type(leaf).__name__}. Every leaf "
                    f"of {name} must be a tensor: "
                    + ("dict(value)" if hasattr(leaf, "keys") else "torch.as_tensor(value)")
                    + ", or keep what is not data out of it."
                )

    def path(self, i: int) -> str:
        """The name of the i-th leaf, for a message."""
        return f"{self.name}{keystr(tree_flatten_with_path(self.tree)[0][i][0])}"


def layout_of(step: Step, time_dim: int | None, in_dims: InDims | None, x: Tree) -> Layout:
    """Where time, rows and a shared batch axis lie in a call with such an ``x``."""
    layout = Layout.of(step, time_dim, x, batch_axes=0 if in_dims is None else 1)
    return layout if in_dims is None else SharedLayout(layout.time_dim, *in_dims[1:])


def lay_out(
    recipe: Recipe, time_dim: int | None, in_dims: InDims | None, params: Tree, state: Tree,
    x: Tree, y: Tree, reset: Tensor | None, mask: Tensor | None,
) -> tuple[Call, list[Tensor], Layout]:  # fmt: skip
    """lay_out : the caller's arguments -> (Call, flat detached tensors with time in front, Layout)

    Raises TypeError for structure and dtype, ValueError for shapes and lengths.
    """
    step = recipe.step
    for name, rows_of in (("reset", reset), ("mask", mask)):
        if rows_of is not None and not isinstance(rows_of, Tensor):
            kind = type(rows_of).__name__
            raise TypeError(f"{name}: expected a bool tensor [K] or [K, B], found {kind}.")
    _check_parameter_names(recipe, params)
    given = Argument("params", params)
    xs, ys = Argument("x", x), Argument("y", () if y is None else y)
    state_dim, x_dim, y_dim = in_dims[1:] if in_dims is not None else (None, None, None)
    layout = layout_of(step, time_dim, in_dims, x)
    steps = _check_lengths(xs, ys, layout.time_dim, x_dim, y_dim)
    if steps <= recipe.context:
        raise ValueError(
            f"x: has {steps} steps, all of them context without a loss (context={recipe.context}). "
            "Give more steps."
        )
    shared = None
    if isinstance(layout, SharedLayout):
        x_leaves = [layout.sequence_first(leaf, x_dim) for leaf in xs.leaves]
        y_leaves = [layout.sequence_first(leaf, y_dim) for leaf in ys.leaves]
        reset, mask = (r if r is None else layout.rows_first(r) for r in (reset, mask))
        shared = Level(x_leaves[0].shape[1], "different")
    else:
        x_leaves, y_leaves = layout.time_first(xs.leaves), layout.time_first(ys.leaves)
        reset, mask = layout.rows_time_first(reset), layout.rows_time_first(mask)

    start = recipe.initial_state
    start = () if start is None or callable(start) else in_order_of(state, start)
    initial = Argument("initial_state", start)
    if state is None:
        first = tree_unflatten([leaf[0, 0] if shared else leaf[0] for leaf in x_leaves], xs.spec)
        state = start_of(recipe.step, recipe.initial_state, params, first)
        if callable(recipe.initial_state):  # a restart before step 0 lets the gradient through
            reset = _restart_at_start(reset, steps, x_leaves[0], shared)
        state_dim = None
    elif initial.leaves and Argument("state", state).spec != initial.spec:
        raise TypeError(
            "initial_state: expected the structure of the state, found another one.\n"
            f"  state:         {Argument('state', state).spec}\n  initial_state: {initial.spec}"
        )
    states = Argument("state", state)
    if state_dim is not None:
        for i in range(len(states.leaves)):
            _check_axis(states, i, state_dim)
    _check_initial(initial, states, state_dim)
    if state_dim is not None:
        states.leaves = [leaf.movedim(state_dim, 0) for leaf in states.leaves]
        _check_batches(shared, states, [leaf.shape[0] for leaf in states.leaves])
    if shared is not None:
        _check_batches(shared, xs, [leaf.shape[1] for leaf in x_leaves])
        if y_dim is not None:
            _check_batches(shared, ys, [leaf.shape[1] for leaf in y_leaves])
    buffers = step.buffers()
    rows = [Argument("reset", () if reset is None else reset),
            Argument("mask", () if mask is None else mask)]  # fmt: skip
    for flags in rows:
        _check_rows(flags, steps, states, recipe, shared)
    args = [given, Argument("buffers", buffers or ()), initial, states, xs, ys, *rows]
    _check_devices(args)

    groups = [*(a.leaves for a in args[:4]), x_leaves, y_leaves, *(a.leaves for a in rows)]
    has_axis = (False, False, False, state_dim is not None, True, y_dim is not None, True, True)
    tensors, shapes, flags_of = [], [], []
    for leaves, is_sequence, axis in zip(groups, IS_SEQUENCE, has_axis, strict=True):
        axis = axis and shared is not None
        for leaf in leaves:
            tensors.append(leaf.detach())
            shapes.append(tuple(leaf.shape[is_sequence + axis :]))
            flags_of.append(axis)
    call = Call(
        specs=(given.spec, states.spec, xs.spec, None if y is None else ys.spec),
        counts=tuple(map(len, groups)),
        buffer_names=tuple(buffers),
        shapes=tuple(shapes),
        shared=shared,
        shared_flags=tuple(flags_of),
        time_dim=layout.time_dim,
        context=context_of(recipe, x_leaves[0].device.type),
    )
    return call, tensors, layout


def _check_initial(initial: Argument, states: Argument, state_dim: int | None) -> None:
    """``state_dim``: the axis of a state leaf that ``initial_state`` does not have."""
    for i, (own, leaf) in enumerate(zip(initial.leaves, states.leaves, strict=False)):
        if own.dtype != leaf.dtype:
            raise TypeError(
                f"{initial.path(i)}: is {own.dtype}, but {states.path(i)} is {leaf.dtype}. Give "
                "both in one dtype."
            )
        shape = list(leaf.shape)
        if state_dim is not None:
            del shape[state_dim]
        try:
            fits = torch.broadcast_shapes(own.shape, shape) == torch.Size(shape)
        except RuntimeError:
            fits = False
        if not fits:
            of_one = "" if state_dim is None else f" without axis {state_dim}, the sequences"
            raise ValueError(
                f"{initial.path(i)}: has shape {list(own.shape)}, but {states.path(i)} has "
                f"{shape}{of_one}. Give the shape of the state, or one that broadcasts to it."
            )


def _check_axis(argument: Argument, i: int, axis: int) -> None:
    """``in_dims`` names an axis that each leaf of the argument must have."""
    shape = list(argument.leaves[i].shape)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"{argument.path(i)}: has shape {shape}, but in_dims names axis {axis} of "
            f"{argument.name}. Name one that every leaf has."
        )


def _check_batches(shared: Level | None, argument: Argument, sizes: Sequence[int]) -> None:
    for i, size in enumerate(sizes):
        if shared is not None and size != shared.size:
            raise ValueError(
                f"{argument.path(i)}: has {size} sequences on the axis that in_dims names, but x "
                f"has {shared.size}."
            )


def _restart_at_start(reset: Tensor | None, steps: int, x: Tensor, shared: Level | None) -> Tensor:
    first = torch.arange(steps, device=x.device) == 0
    rank = max(1 if shared is None else 2, 0 if reset is None else reset.dim())
    first = first.reshape(-1, *(1,) * (rank - 1))
    if reset is not None:
        return reset | first
    return first if shared is None else first.expand(steps, shared.size)


def _check_parameter_names(recipe: Recipe, params: Tree) -> None:
    step = recipe.step
    names = step.parameter_names()
    if names is None:
        return
    if not isinstance(params, dict):
        raise TypeError(
            f"params: expected a dict of {step.name}'s parameters by name, found "
            f"{type(params).__name__}. Pass dict(module.named_parameters())."
        )
    params = step.own_names(params)
    if missing := [name for name in names if name not in params]:
        raise TypeError(
            f"params: {missing[0]!r} is missing, a parameter of {step.name}. Pass "
            "dict(module.named_parameters()); to freeze one, pass it and leave it out of the "
            "optimizer."
        )
    if len(params) > len(names):
        known = {*names, *step.buffers()}
        if unknown := [name for name in params if name not in known]:
            if twin := step.other_name(unknown[0]):
                raise TypeError(
                    f"params: {unknown[0]!r} is the parameter that stands there as {twin!r} "
                    "already, tied to it. Pass dict(module.named_parameters()), which has it once."
                )
            raise TypeError(
                f"params: {unknown[0]!r} is not a parameter of {step.name}, which has "
                f"{', '.join(map(repr, names))}."
            )


def _check_lengths(
    xs: Argument, ys: Argument, time_dim: int, x_dim: int | None, y_dim: int | None
) -> int:
    """The number of steps K, the same in every leaf of x and y.

    ``x_dim`` and ``y_dim`` are axes that ``time_dim`` does not count (``in_dims``).
    """
    steps: int | None = None
    for argument, dim in ((xs, x_dim), (ys, y_dim)):
        for i, leaf in enumerate(argument.leaves):
            shape = list(leaf.shape)
            if dim is not None:
                _check_axis(argument, i, dim)
                del shape[dim]
            if len(shape) <= time_dim:
                raise ValueError(
                    f"{argument.path(i)}: expected time on axis {time_dim}, found shape "
                    f"{list(leaf.shape)}."
                )
            own = shape[time_dim]
            if steps is not None and own != steps:
                raise ValueError(
                    f"{argument.path(i)}: has {own} steps on axis {time_dim}, but {xs.path(0)} has "
                    f"{steps}. x and y must have the same length; nothing is cut silently. "
                    "Where only some steps have a target, fill up y and give mask=."
                )
            steps = own
        if steps is None:
            raise TypeError(
                "x: expected at least one tensor, with time on its first axis; found none."
            )
    if steps == 0:
        raise ValueError("x: has 0 steps; a segment needs at least one. Skip an empty segment.")
    assert steps is not None
    return steps


def _check_rows(
    argument: Argument, steps: int, states: Argument, recipe: Recipe, shared: Level | None
) -> None:
    """``reset`` and ``mask``, with time in front: bool, [K] or [K, B]."""
    for flags in argument.leaves:
        name = argument.name
        if flags.dtype != torch.bool:
            raise TypeError(f"{name}: expected a bool tensor [K] or [K, B], found {flags.dtype}.")
        own = list(flags.shape) if shared is None else [flags.shape[0], *flags.shape[2:]]
        if len(own) not in (1, 2):
            raise ValueError(f"{name}: expected [K] or [K, B], found shape {list(flags.shape)}.")
        if own[0] != steps:
            raise ValueError(f"{name}: has {own[0]} steps, but x has {steps}.")
        if len(own) == 1 or shared is not None:
            continue
        for i, leaf in enumerate(states.leaves):
            axis = recipe.step.row_axis(leaf)
            found = leaf.shape[axis] if leaf.dim() > axis else None
            if found != own[1]:
                raise ValueError(
                    f"{name}: has {own[1]} rows, but {states.path(i)} of shape "
                    f"{list(leaf.shape)} has {found or 'none'} on axis {axis}. Give one bool per "
                    "row of the batch, or [K] for all rows; if the rows of the state lie on "
                    "another axis, say so with as_step(..., state_batch_dim=)."
                )
            if axis == 1 and recipe.step.may_be_rows_first(leaf, states.leaves):
                raise ValueError(
                    f"{name}: has {own[1]} rows, and {states.path(i)} of shape {list(leaf.shape)} "
                    "as many on axis 0 and on axis 1. Say which are the rows of the batch with "
                    "as_step(..., state_batch_dim=)."
                )


def _check_devices(arguments: Sequence[Argument]) -> None:
    device = arguments[GROUPS.index("x")].leaves[0].device
    for argument in arguments:
        for i, leaf in enumerate(argument.leaves):
            if leaf.device != device:
                x = arguments[GROUPS.index("x")].path(0)
                raise ValueError(
                    f"{argument.path(i)}: is on {leaf.device}, but {x} is on {device}. Move "
                    "everything to one device."
                )


def context_of(recipe: Recipe, device_type: str) -> tuple[Any, ...]:
    """What else a trace depends on: modes of modules, the default dtype, autocast for the data."""
    autocast = None
    if torch.is_autocast_enabled(device_type):
        autocast = device_type, torch.get_autocast_dtype(device_type)
    return recipe.modes(), torch.get_default_dtype(), autocast
