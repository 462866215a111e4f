"""The caller's arguments, checked, with time in front, as a :class:`Call` and a flat list.

Errors name the argument, the path of the leaf in it, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat.modules import has_hooks
from .._trees import (
    in_order_of,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from .._warnings import warn
from ..compiler.signature import Level, Recipe, Specs
from ..contract.layout import Layout, SharedLayout
from ..contract.step import start_of
from .call import GROUPS, SEQUENCES, Call, Counts, InDims, context_of, layout_of

Tree = Any
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
                convert = "" if leaf is None else "torch.as_tensor(value), or "
                if hasattr(leaf, "keys"):
                    convert = "dict(value), or "
                raise TypeError(
                    f"{self.path(i)}: expected a tensor, found {type(leaf).__name__}. Every leaf "
                    f"of {name} must be a tensor: {convert}keep what is not data out of it."
                )

    def path(self, i: int) -> str:
        """The name of the i-th leaf, for a message."""
        return f"{self.name}{keystr(tree_flatten_with_path(self.tree)[0][i][0])}"


def lay_out(
    recipe: Recipe, time_dim: int | None, in_dims: InDims | None, params: Tree, state: Tree,
    x: Tree, y: Tree, reset: Tensor | None, mask: Tensor | None,
) -> tuple[Call, list[Tensor], Layout]:  # fmt: skip
    """lay_out : the caller's arguments -> (Call, flat detached tensors with time in front, Layout)

    Raises TypeError for structure and dtype, ValueError for shapes and lengths.
    """
    _check_flag_types(reset, mask, 2 if in_dims is None else 3)
    _check_parameter_names(recipe, params)
    xs, ys = Argument("x", x), Argument("y", () if y is None else y)
    state_dim, x_dim, y_dim = in_dims[1:] if in_dims is not None else (None, None, None)
    layout = layout_of(recipe.step, time_dim, in_dims, x)
    steps = _check_lengths(xs, ys, layout.time_dim, x_dim, y_dim)
    if steps <= recipe.context:
        raise ValueError(
            f"x: has {steps} steps, all of them context without a loss (context={recipe.context}). "
            "Give more steps."
        )
    shared = None  # the axis of in_dims: after time in sequences, first in the state
    if isinstance(layout, SharedLayout):
        xs.leaves = [layout.sequence_first(leaf, x_dim) for leaf in xs.leaves]
        ys.leaves = [layout.sequence_first(leaf, y_dim) for leaf in ys.leaves]
        shared = Level(xs.leaves[0].shape[1], "different")
        reset = _flags_of_sequences("reset", layout, shared, reset)
        mask = _flags_of_sequences("mask", layout, shared, mask)
        _check_batches(shared, xs, axis=1)
        if y_dim is not None:
            _check_batches(shared, ys, axis=1)
    else:
        xs.leaves, ys.leaves = layout.time_first(xs.leaves), layout.time_first(ys.leaves)
        reset, mask = (None if f is None else layout.flags_first(f) for f in (reset, mask))

    initial, states = _initial_and_state(recipe, params, state, xs, shared, state_dim)
    if state is None:
        if callable(recipe.initial_state):  # a restart before step 0 lets the gradient through
            reset = _restart_at_start(reset, steps, xs.leaves[0], shared)
        state_dim = None
    elif state_dim is not None:
        states.leaves = [leaf.movedim(state_dim, 0) for leaf in states.leaves]
        _check_batches(shared, states, axis=0)
    resets = Argument("reset", () if reset is None else reset)
    masks = Argument("mask", () if mask is None else mask)
    for argument in (resets, masks):
        _check_flags(argument, steps, states, recipe, shared)

    buffers = recipe.step.buffers()
    arguments = [Argument("params", params), Argument("buffers", buffers or ()), initial, states,
                 xs, ys, resets, masks]  # fmt: skip
    _check_devices(arguments)
    with_shared_axis = {"x", "reset", "mask"}
    with_shared_axis |= {"state"} if state_dim is not None else set()
    with_shared_axis |= {"y"} if y_dim is not None else set()
    shapes: list[tuple[int, ...]] = []
    shared_flags: list[bool] = []
    for argument in arguments:
        has_shared = shared is not None and argument.name in with_shared_axis
        first = has_shared + (argument.name in SEQUENCES)
        shapes += [tuple(leaf.shape[first:]) for leaf in argument.leaves]
        shared_flags += [has_shared] * len(argument.leaves)
    call = Call(
        specs=Specs(arguments[0].spec, states.spec, xs.spec, None if y is None else ys.spec),
        counts=Counts(*[len(argument.leaves) for argument in arguments]),
        buffer_names=tuple(buffers),
        shapes=tuple(shapes),
        shared=shared,
        shared_flags=tuple(shared_flags),
        time_dim=layout.time_dim,
        context=context_of(recipe, xs.leaves[0].device.type),
    )
    return call, [leaf.detach() for argument in arguments for leaf in argument.leaves], layout


_GRADIENT_OF_X = (
    "Compute it in the step, or tap it there "
    '(make_train_segment(..., taps=["x"]) and x_t = ftbptt.tap("x", x_t)) and call '
    'x.backward(result.taps["x"].grad); else detach it.'
)


def check_no_gradient_is_lost(params: Tree, x: Tree, y: Tree) -> None:
    """Raises ValueError for data that waits for a gradient; warns of hooks on parameters.

    ``x`` may wait for one in a segment with taps, which has it.
    """
    for name, data, remedy in (("x", x, _GRADIENT_OF_X), ("y", y, "Detach it.")):
        for path, leaf in tree_flatten_with_path(data)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    f"{name}{keystr(path)}: requires a gradient, but a segment returns none for "
                    f"it, so that what computed it would not be trained. {remedy}"
                )
    for path, leaf in tree_flatten_with_path(params)[0]:
        if isinstance(leaf, Tensor) and has_hooks(leaf):
            warn(
                f"ftbptt: params{keystr(path)} has a hook on its gradient, which is not called: "
                "gradients are returned, not accumulated by autograd. Apply it to what is returned "
                "(in train_stream by Events(before_update=...)), and remove it.",
                RuntimeWarning,
            )


def _initial_and_state(
    recipe: Recipe, params: Tree, state: Tree, xs: Argument, shared: Level | None,
    state_dim: int | None,
) -> tuple[Argument, Argument]:  # fmt: skip
    """``initial_state``, if it is given as tensors, and the state, or what None means for it."""
    start = recipe.initial_state
    start = () if start is None or callable(start) else in_order_of(state, start)
    initial = Argument("initial_state", start)
    if state is None:
        first = [leaf[0, 0] if shared else leaf[0] for leaf in xs.leaves]
        x_0 = tree_unflatten(first, xs.spec)
        states = Argument("state", start_of(recipe.step, recipe.initial_state, params, x_0))
        state_dim = None
    else:
        states = Argument("state", state)
        if initial.leaves and states.spec != initial.spec:
            raise TypeError(
                "initial_state: expected the structure of the state, found another one.\n"
                f"  state:         {states.spec}\n  initial_state: {initial.spec}"
            )
    if state_dim is not None:
        for i in range(len(states.leaves)):
            _check_axis(states, i, state_dim)
    _check_initial(initial, states, state_dim)
    return initial, states


def _check_initial(initial: Argument, states: Argument, state_dim: int | None) -> None:
    """``state_dim``: the axis of a state leaf that ``initial_state`` does not have."""
    for i, (start, leaf) in enumerate(zip(initial.leaves, states.leaves, strict=False)):
        if start.dtype != leaf.dtype:
            raise TypeError(
                f"{initial.path(i)}: is {start.dtype}, but {states.path(i)} is {leaf.dtype}. Give "
                "both in one dtype."
            )
        shape = list(leaf.shape)
        if state_dim is not None:
            del shape[state_dim]
        try:
            fits = torch.broadcast_shapes(start.shape, shape) == torch.Size(shape)
        except RuntimeError:
            fits = False
        if not fits:
            of_one = "" if state_dim is None else f" without axis {state_dim}, the sequences"
            raise ValueError(
                f"{initial.path(i)}: has shape {list(start.shape)}, but {states.path(i)} has "
                f"{shape}{of_one}. Give the shape of the state, or one that broadcasts to it."
            )


def _check_axis(argument: Argument, i: int, axis: int) -> None:
    """``in_dims`` names an axis that each leaf of the argument must have."""
    shape = list(argument.leaves[i].shape)
    if axis >= len(shape):
        raise ValueError(
            f"{argument.path(i)}: has shape {shape}, but in_dims names axis {axis} of "
            f"{argument.name}. Name one that every leaf has."
        )


def _check_batches(shared: Level | None, argument: Argument, axis: int) -> None:
    for i, leaf in enumerate(argument.leaves):
        if shared is not None and leaf.shape[axis] != shared.size:
            raise ValueError(
                f"{argument.path(i)}: has {leaf.shape[axis]} sequences on the axis that in_dims "
                f"names, but x has {shared.size}."
            )


def _flags_of_sequences(
    name: str, layout: SharedLayout, shared: Level, flags: Tensor | None
) -> Tensor | None:
    """[K, B, ...]; flags [K] hold for all sequences."""
    if flags is None:
        return None
    if flags.dim() == 1:
        return flags[:, None].expand(-1, shared.size)
    first = layout.flags_first(flags)
    if first.shape[1] != shared.size:
        axis = layout.flag_axes(flags.dim())[1]
        raise ValueError(
            f"{name}: has {first.shape[1]} sequences on axis {axis}, but x has {shared.size}. Time "
            "and sequences are in the order in which x has them."
        )
    return first


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
            length = shape[time_dim]
            if steps is not None and length != steps:
                raise ValueError(
                    f"{argument.path(i)}: has {length} steps on axis {time_dim}, but "
                    f"{xs.path(0)} has {steps}. x and y must have the same length; nothing is cut "
                    "silently. Where only some steps have a target, fill up y and give mask=. "
                    "Expand what a row has at all steps over them, or carry it in the state."
                )
            steps = length
        if steps is None:
            raise TypeError(
                "x: expected at least one tensor, with time on its first axis; found none."
            )
    if steps == 0:
        raise ValueError("x: has 0 steps; a segment needs at least one. Skip an empty segment.")
    assert steps is not None
    return steps


def _check_flag_types(reset: Any, mask: Any, most_axes: int) -> None:
    """``most_axes``: with ``in_dims``, each sequence may have rows of its own."""
    for name, flags in (("reset", reset), ("mask", mask)):
        if flags is None:
            continue
        found = flags.dtype if isinstance(flags, Tensor) else type(flags).__name__
        if found != torch.bool:
            raise TypeError(f"{name}: expected a bool tensor [K] or [K, B], found {found}.")
        if not 1 <= flags.dim() <= most_axes:
            raise ValueError(f"{name}: expected [K] or [K, B], found shape {list(flags.shape)}.")


def _check_flags(
    argument: Argument, steps: int, states: Argument, recipe: Recipe, shared: Level | None
) -> None:
    """The lengths of ``reset`` and ``mask``, with time in front."""
    for flags in argument.leaves:
        name = argument.name
        shape = list(flags.shape) if shared is None else [flags.shape[0], *flags.shape[2:]]
        if shape[0] != steps:
            raise ValueError(f"{name}: has {shape[0]} steps, but x has {steps}.")
        if len(shape) == 1 or shared is not None:
            continue
        for i, leaf in enumerate(states.leaves):
            axis = recipe.step.row_axis(leaf)
            rows = leaf.shape[axis] if leaf.dim() > axis else None
            if rows != shape[1]:
                raise ValueError(
                    f"{name}: has {shape[1]} rows, but {states.path(i)} of shape "
                    f"{list(leaf.shape)} has {rows or 'none'} on axis {axis}. Give one bool per "
                    "row of the batch, or [K] for all rows; if the rows of the state lie on "
                    "another axis, say so with as_step(..., state_batch_dim=)."
                )
            if axis == 1 and recipe.step.may_be_rows_first(leaf, states.leaves):
                raise ValueError(
                    f"{name}: has {shape[1]} rows, and {states.path(i)} of shape "
                    f"{list(leaf.shape)} as many on axis 0 and on axis 1. Say which are the rows "
                    "of the batch with as_step(..., state_batch_dim=). It holds for all leaves: "
                    "where they differ, transpose some, or give [K] for all rows."
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
