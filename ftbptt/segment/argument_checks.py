"""What a call's arguments must be. Errors name the leaf, what was found and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._checks import warn_of_lost_training
from .._compat.modules import has_hooks
from .._compat.running import VmapLevel
from .._messages import registering
from .._trees import Tree, keystr, tree_flatten, tree_flatten_with_path, tree_leaves
from .._warnings import warn
from ..compiler.signature import Level, Recipe
from ..contract.step import Step, own_names
from .call import GROUPS

_LEAF, _EMPTY = tree_flatten(0)[1], tree_flatten(())[1]
_PADDED = (
    "and give mask=, or let sequences follow each other in fewer rows with reset= "
    "(ftbptt.training.PackedSequences)."
)
_WITHOUT_INPUT = "For a step without an input give torch.zeros(K), which says how many steps."


class Argument:
    """One argument of the caller, flattened; every leaf of it a tensor.

    ``has_mean_axis``: its leaves have the batch axis of ``in_dims``.
    """

    def __init__(self, name: str, tree: Tree, has_mean_axis: bool = False) -> None:
        self.name, self.tree, self.has_mean_axis = name, tree, has_mean_axis
        if isinstance(tree, Tensor):  # the most frequent tree, and the slowest to ask pytree for
            self.leaves, self.spec = [tree], _LEAF
        elif type(tree) is tuple and not tree:
            self.leaves, self.spec = [], _EMPTY
        elif isinstance(tree, PackedSequence):
            raise TypeError(
                f"{name}: a PackedSequence has another number of rows at each step. Pad it "
                f"(torch.nn.utils.rnn.pad_packed_sequence) {_PADDED}"
            )
        else:
            self.leaves, self.spec = tree_flatten(tree)
        for i, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                if name == "x" and tree is None:
                    raise TypeError(f"x: expected tensors, found None. {_WITHOUT_INPUT}")
                convert = "" if leaf is None else "torch.as_tensor(value), or "
                if name in ("x", "y") and isinstance(leaf, (int, float)):
                    convert = "torch.full((K,), value), or "
                if hasattr(leaf, "to_numpy"):  # a table, which has keys() too
                    convert = "torch.from_numpy(value.to_numpy()), or "
                elif hasattr(leaf, "keys"):
                    convert = "dict(value), or "
                elif registered := registering(leaf):
                    convert = f"{registered}, or "
                raise TypeError(
                    f"{self.path(i)}: expected a tensor, found {type(leaf).__name__}. Every leaf "
                    f"of {name} must be a tensor: {convert}keep what is not data out of it."
                )
            if leaf.is_nested:
                raise TypeError(
                    f"{self.path(i)}: a nested tensor has rows of different lengths. Pad it "
                    f"(torch.nested.to_padded_tensor(value, 0)) {_PADDED}"
                )
            if leaf.layout is not torch.strided:
                raise TypeError(
                    f"{self.path(i)}: expected a dense tensor, found one of layout {leaf.layout}. "
                    "Give value.to_dense(); a weight keeps its zeros as weight * mask in the step."
                )

    def path(self, i: int) -> str:
        """The name of the i-th leaf, for a message."""
        return f"{self.name}{keystr(tree_flatten_with_path(self.tree)[0][i][0])}"


_GRADIENT_OF_X = (
    "Compute it in the step, or tap it there "
    '(make_train_segment(..., taps=["x"]) and x_t = ftbptt.tap("x", x_t)) and call '
    'x.backward(result.taps["x"].grad); else detach it.'
)


def check_no_gradient_is_lost(step: Step, params: Tree, state: Tree, x: Tree, y: Tree) -> None:
    """Raises ValueError for data or buffers that wait for a gradient; warns of parameters' hooks.

    Warns also of a state that is to be trained; one that was computed may have a history, which is
    cut. ``x`` may wait for a gradient in a segment with taps, which has it.
    """
    for name, buffer in step.buffers().items():
        if buffer.requires_grad and not (isinstance(params, dict) and name in own_names(params)):
            raise ValueError(
                f"step {step.name}: its buffer {name!r} requires a gradient, but buffers get none, "
                "so that it, or what computed it, would not be trained. Give it among params, "
                f"{{**params, {name!r}: buffer}}; else detach it."
            )
    for name, data, remedy in (("x", x, _GRADIENT_OF_X), ("y", y, "Detach it.")):
        for path, leaf in tree_flatten_with_path(data)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    f"{name}{keystr(path)}: requires a gradient, but a segment returns none for "
                    f"it, so that what computed it would not be trained. {remedy}"
                )
    warn_of_lost_training(state)
    for path, leaf in tree_flatten_with_path(params)[0]:
        if isinstance(leaf, Tensor) and has_hooks(leaf):
            warn(
                f"ftbptt: params{keystr(path)} has a hook on its gradient, which is not called: "
                "gradients are returned, not accumulated by autograd. Apply it to what is returned "
                "(in train_stream by Events(before_update=...)), and remove it.",
                RuntimeWarning,
            )


def has_history(state: Tree) -> bool:
    """Whether the caller computed it with a gradient."""
    return any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in tree_leaves(state))


def warn_of_lost_memory(state: Tree, kept: Sequence[int]) -> None:
    """Warns of a leaf with a history, of those that the step keeps as they are.

    That is no state that is carried on, whose history TBPTT cuts.
    """
    for i, (path, leaf) in enumerate(tree_flatten_with_path(state)[0]):
        if i in kept and not leaf.is_leaf:
            warn(
                f"ftbptt: state{keystr(path)} requires a gradient, and the step returns it as it "
                "is, as the output of an encoder that all steps read; but a segment detaches the "
                "state that it is given, so that what computed it would not be trained. Mark it "
                "in the step, memory = ftbptt.tap('memory', memory), and call "
                "memory.backward(result.taps['memory'].grad[0]); else detach it.",
                RuntimeWarning,
            )


def check_parameter_names(recipe: Recipe, params: Tree) -> None:
    step = recipe.step
    names = step.parameter_names
    if names is None:
        return
    if not isinstance(params, dict):
        raise TypeError(
            f"params: expected a dict of {step.name}'s parameters by name, found "
            f"{type(params).__name__}. Pass dict(module.named_parameters())."
        )
    params = own_names(params)
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


def check_lengths(
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
                check_axis(argument, i, dim)
                del shape[dim]
            if len(shape) <= time_dim:
                raise ValueError(
                    f"{argument.path(i)}: expected time on axis {time_dim}, found shape "
                    f"{list(leaf.shape)}. Expand what holds for all steps over them."
                )
            length = shape[time_dim]
            if steps is not None and length != steps:
                if isinstance(xs.tree, list) and len(xs.tree) == len(xs.leaves) == length:
                    raise ValueError(
                        f"x: is a list of {length} tensors of {steps} steps on axis {time_dim}, "
                        f"but {argument.path(i)} has {length} steps. If each of these tensors is a "
                        f"step, stack them: torch.stack(x, {time_dim})."
                    )
                raise ValueError(
                    f"{argument.path(i)}: has {length} steps on axis {time_dim}, but "
                    f"{xs.path(0)} has {steps}. x and y must have the same length; nothing is cut "
                    "silently. Where only some steps have a target, fill up y and leave the others "
                    "out in the loss; mask= is for padding, where the state stays as it was. "
                    "Expand what a row has at all steps over them, or carry it in the state."
                )
            steps = length
        if steps is None:
            raise TypeError(
                "x: expected at least one tensor, with time on its first axis; found none. "
                + _WITHOUT_INPUT
            )
    if steps == 0:
        raise ValueError("x: has 0 steps; a segment needs at least one. Skip an empty segment.")
    assert steps is not None
    return steps


def check_axis(argument: Argument, i: int, axis: int) -> None:
    """``in_dims`` names an axis that each leaf of the argument must have."""
    shape = list(argument.leaves[i].shape)
    if axis >= len(shape):
        raise ValueError(
            f"{argument.path(i)}: has shape {shape}, but in_dims names axis {axis} of "
            f"{argument.name}. Name one that every leaf has."
        )


def check_batches(argument: Argument, mean_axis: Level, axis: int) -> None:
    for i, leaf in enumerate(argument.leaves):
        if leaf.shape[axis] != mean_axis.size:
            raise ValueError(
                f"{argument.path(i)}: has {leaf.shape[axis]} sequences on the axis that in_dims "
                f"names, but x has {mean_axis.size}."
            )


def check_initial(initial: Argument, states: Argument, state_dim: int | None) -> None:
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


def check_flag_types(reset: Any, mask: Any, most_axes: int) -> None:
    """``most_axes``: with ``in_dims``, each sequence may have rows of its own."""
    for name, flags in (("reset", reset), ("mask", mask)):
        if flags is None:
            continue
        found = flags.dtype if isinstance(flags, Tensor) else type(flags).__name__
        if found != torch.bool:
            raise TypeError(f"{name}: expected a bool tensor [K] or [K, B], found {found}.")
        if not 1 <= flags.dim() <= most_axes:
            raise ValueError(
                f"{name}: expected [K] or [K, B], found shape {list(flags.shape)}."
                + if_not_mapped(name, flags)
            )


def if_not_mapped(name: str, flags: Tensor) -> str:
    """What to add to an error of ``reset`` or ``mask`` that came through vmap as it was given."""
    level = VmapLevel.innermost()
    if level is None or level.unwrapped(flags)[1] is not None:
        return ""
    return (
        " torch.func.vmap maps only what is given by position. To give each entry its own: "
        f"vmap(lambda p, s, x, y, f: train_segment(p, s, x, y, {name}=f))(params, state, x, y, "
        f"{name})."
    )


def check_flag_rows(argument: Argument, states: Argument, recipe: Recipe) -> None:
    """The rows of ``reset`` and ``mask``, with time in front."""
    name = argument.name
    for flags in argument.leaves:
        shape = list(flags.shape)
        if len(shape) == 1 or argument.has_mean_axis:
            continue
        if states.leaves and recipe.step.has_no_rows(states.leaves):
            raise ValueError(
                f"{name}: has {shape[1]} rows, but {states.path(0)} of shape "
                f"{list(states.leaves[0].shape)} has none: it is of one sequence. Give [K], or a "
                f"batch.{if_not_mapped(name, flags)}"
            )
        for i, leaf in enumerate(states.leaves):
            axis = recipe.step.row_axis(leaf)
            rows = leaf.shape[axis] if leaf.dim() > axis else None
            if rows != shape[1]:
                raise ValueError(
                    f"{name}: has {shape[1]} rows, but {states.path(i)} of shape "
                    f"{list(leaf.shape)} has {rows or 'none'} on axis {axis}. Give a state of as "
                    "many rows as the data has, and one bool per row, or [K] for all; if the rows "
                    "of the state lie on another axis, as_step(..., state_batch_dim=) says so."
                    + if_not_mapped(name, flags)
                )
            if axis == 1 and recipe.step.may_be_rows_first(leaf, states.leaves):
                raise ValueError(
                    f"{name}: has {shape[1]} rows, and {states.path(i)} of shape "
                    f"{list(leaf.shape)} as many on axis 0 and on axis 1. Say which are the rows "
                    "of the batch with as_step(..., state_batch_dim=). It holds for all leaves: "
                    "where they differ, transpose some, or give [K] for all rows."
                )


def check_devices(arguments: Sequence[Argument]) -> None:
    device = arguments[GROUPS.index("x")].leaves[0].device
    for argument in arguments:
        for i, leaf in enumerate(argument.leaves):
            if leaf.device != device:
                x = arguments[GROUPS.index("x")].path(0)
                raise ValueError(
                    f"{argument.path(i)}: is on {leaf.device}, but {x} is on {device}. Move "
                    "everything to one device."
                )
