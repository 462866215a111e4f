"""The caller's arguments, checked, with time in front, as a :class:`Call` and a flat list."""

from __future__ import annotations

import torch
from torch import Tensor

from .._trees import Tree, in_order_of, tree_unflatten
from ..compiler.signature import Level, Recipe, Specs
from ..contract.layout import InDimsLayout, Layout
from ..contract.step import start_of
from .argument_checks import (
    Argument,
    check_axis,
    check_batches,
    check_devices,
    check_flag_rows,
    check_flag_types,
    check_initial,
    check_lengths,
    check_parameter_names,
    if_not_mapped,
)
from .call import SEQUENCES, Arguments, Call, Counts, settings_of


def lay_out(recipe: Recipe, given: Arguments) -> tuple[Call, list[Tensor], Layout]:
    """lay_out : the caller's arguments -> (Call, flat detached tensors with time in front, Layout)

    The axis of ``in_dims`` comes right behind time, and first in the state. Raises TypeError for
    structure and dtype, ValueError for shapes and lengths.
    """
    params, state, x, y, reset, mask = given
    in_dims = recipe.in_dims
    check_flag_types(reset, mask, 2 if in_dims is None else 3)
    check_parameter_names(recipe, params)
    xs, ys = Argument("x", x), Argument("y", () if y is None else y)
    layout = recipe.layout(x)
    state_dim, x_dim, y_dim = (None, None, None) if in_dims is None else in_dims[1:]
    steps = check_lengths(xs, ys, layout.time_dim, x_dim, y_dim)
    if steps <= recipe.context:
        raise ValueError(
            f"x: has {steps} steps, all of them context without a loss (context={recipe.context}). "
            "Give more steps."
        )
    mean_axis = _move_time_first(xs, ys, layout)
    reset = _flags_first("reset", reset, steps, layout, mean_axis)
    mask = _flags_first("mask", mask, steps, layout, mean_axis)
    initial, states = _initial_and_state(recipe, params, state, xs, mean_axis, state_dim)
    if state is None and callable(recipe.initial_state):
        # A restart before step 0 lets the gradient through to what computes the state.
        reset = _restart_at_start(reset, steps, xs.leaves[0], mean_axis)
    resets = Argument("reset", () if reset is None else reset, mean_axis is not None)
    masks = Argument("mask", () if mask is None else mask, mean_axis is not None)
    for flags in (resets, masks):
        check_flag_rows(flags, states, recipe)

    buffers = recipe.step.buffers()
    arguments = [Argument("params", params), Argument("buffers", buffers or ()), initial, states,
                 xs, ys, resets, masks]  # fmt: skip
    check_devices(arguments)
    call = Call(
        specs=Specs(arguments[0].spec, states.spec, xs.spec, None if y is None else ys.spec),
        counts=Counts(*[len(argument.leaves) for argument in arguments]),
        buffer_names=tuple(buffers),
        shapes=tuple(shape for argument in arguments for shape in _shapes_of_one(argument)),
        mean_axis=mean_axis,
        mean_axis_flags=tuple(
            argument.has_mean_axis for argument in arguments for _ in argument.leaves
        ),
        time_dim=layout.time_dim,
        settings=settings_of(recipe, xs.leaves[0].device.type),
    )
    return call, [leaf.detach() for argument in arguments for leaf in argument.leaves], layout


def _move_time_first(xs: Argument, ys: Argument, layout: Layout) -> Level | None:
    """Leaves as [K, ...], or [K, B, ...] with the axis of ``in_dims``, which is returned."""
    if not isinstance(layout, InDimsLayout):
        xs.leaves, ys.leaves = layout.time_first(xs.leaves), layout.time_first(ys.leaves)
        return None
    for argument, dim in ((xs, layout.x_dim), (ys, layout.y_dim)):
        argument.leaves = [layout.sequence_first(leaf, dim) for leaf in argument.leaves]
        argument.has_mean_axis = dim is not None
    mean_axis = Level(xs.leaves[0].shape[1], "different")
    for argument in (xs, ys):
        if argument.has_mean_axis:
            check_batches(argument, mean_axis, axis=1)
    return mean_axis


def _flags_first(
    name: str, flags: Tensor | None, steps: int, layout: Layout, mean_axis: Level | None
) -> Tensor | None:
    """``reset`` or ``mask`` as [K] or [K, B]; as [K, B, ...] with the axis of ``in_dims``."""
    if flags is None:
        return None
    first = layout.flags_first(flags)
    if first.shape[0] != steps:
        where = "" if flags.dim() < 2 else f" on axis {layout.flag_axes(flags.dim())[0]}"
        is_swapped = flags.dim() == 2 and first.shape[1] == steps
        raise ValueError(
            f"{name}: has {first.shape[0]} steps{where}, but x has {steps}."
            f"{f' Its other axis has: pass {name}.T.' if is_swapped else ''}"
            + if_not_mapped(name, flags)
        )
    if mean_axis is None:
        return first
    if first.dim() == 1:  # for all sequences
        return first[:, None].expand(-1, mean_axis.size)
    if first.shape[1] != mean_axis.size:
        axis = layout.flag_axes(flags.dim())[1]
        raise ValueError(
            f"{name}: has {first.shape[1]} sequences on axis {axis}, but x has {mean_axis.size}. "
            "Time and sequences are in the order in which x has them."
        )
    return first


def _initial_and_state(
    recipe: Recipe, params: Tree, state: Tree, xs: Argument, mean_axis: Level | None,
    state_dim: int | None,
) -> tuple[Argument, Argument]:  # fmt: skip
    """``initial_state``, if it is given as tensors, and the state, or what None means for it."""
    start = recipe.initial_state
    start = () if start is None or callable(start) else in_order_of(state, start)
    initial = Argument("initial_state", start)
    if state is None:  # all sequences start from the same
        x_0 = tree_unflatten([leaf[0, 0] if mean_axis else leaf[0] for leaf in xs.leaves], xs.spec)
        name = "state" if recipe.initial_state is None else "initial_state"
        states = Argument(name, start_of(recipe.step, recipe.initial_state, params, x_0))
        state_dim = None
    else:
        states = Argument("state", state, has_mean_axis=state_dim is not None)
        if initial.leaves and states.spec != initial.spec:
            raise TypeError(
                "initial_state: expected the structure of the state, found another one.\n"
                f"  state:         {states.spec}\n  initial_state: {initial.spec}"
            )
    if mean_axis is None or state_dim is None:
        check_initial(initial, states, None)
        return initial, states
    for i in range(len(states.leaves)):
        check_axis(states, i, state_dim)
    check_initial(initial, states, state_dim)
    states.leaves = [leaf.movedim(state_dim, 0) for leaf in states.leaves]
    check_batches(states, mean_axis, axis=0)
    return initial, states


def _restart_at_start(
    reset: Tensor | None, steps: int, x: Tensor, mean_axis: Level | None
) -> Tensor:
    first = torch.arange(steps, device=x.device) == 0
    rank = max(1 if mean_axis is None else 2, 0 if reset is None else reset.dim())
    first = first.reshape(-1, *(1,) * (rank - 1))
    if reset is not None:
        return reset | first
    return first if mean_axis is None else first.expand(steps, mean_axis.size)


def _shapes_of_one(argument: Argument) -> list[tuple[int, ...]]:
    """The shapes of the leaves without the axes of time and of ``in_dims``."""
    outer = argument.has_mean_axis + (argument.name in SEQUENCES)
    return [tuple(leaf.shape[outer:]) for leaf in argument.leaves]
