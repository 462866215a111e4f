"""The contract: ``make_train_segment``, ``TrainSegment``, and how it meets ``torch.func.vmap``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._call import (
    GROUPS,
    SEQUENCES,
    Call,
    autocast_context,
    check_devices,
    check_lengths,
    check_params,
    check_rows,
    check_same_structure,
    check_tensors,
)
from ._compat import inside_functorch, tree_flatten, tree_leaves, tree_map, tree_unflatten
from ._execute import Executable
from ._layout import Layout, SharedLayout
from ._loss import Loss
from ._output import SegmentOutput
from ._step import Step, StepFunction, as_step
from .backends import BACKENDS, BUILD_ERRORS, choose
from .compiler.plan import make_plan
from .compiler.signature import Level, Recipe, Signature

Tree = Any
_IS_SEQUENCE = [name in SEQUENCES for name in GROUPS]
InDims = tuple[None, int | None, int | None, int | None]


def make_train_segment(
    step: nn.Module | StepFunction | Step,
    loss: Loss,
    *,
    backend: str = "auto",
    time_dim: int | None = None,
    initial_state: Tree | Callable[[Tree], Tree] | None = None,
    recompute: bool = False,
    in_dims: InDims | None = None,
) -> TrainSegment:
    """make_train_segment : step, loss -> TrainSegment"""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, found {backend!r}.")
    if not callable(loss):
        raise TypeError(f"loss: expected a function loss(out, y), found {type(loss).__name__}.")
    if in_dims is not None:
        _check_in_dims(in_dims)
    recipe = Recipe(as_step(step), loss, initial_state, recompute)
    return TrainSegment(recipe, backend, time_dim, in_dims)


def _check_in_dims(in_dims: Any) -> None:
    if not (isinstance(in_dims, tuple) and len(in_dims) == 4):
        raise TypeError(
            f"in_dims: expected (None, state, x, y), the batch axis of each, found {in_dims!r}."
        )
    if in_dims[0] is not None:
        raise ValueError(
            f"in_dims: the parameters are shared, so in_dims[0] is None, found {in_dims[0]!r}. For "
            "a model per row use torch.func.vmap(train_segment, in_dims=(0, ...))."
        )
    if in_dims[2] is None:
        raise ValueError("in_dims: x must have a batch axis, found None for it.")


class TrainSegment:
    """One TBPTT segment as a pure function; made by :func:`make_train_segment`."""

    def __init__(
        self, recipe: Recipe, backend: str, time_dim: int | None, in_dims: InDims | None
    ) -> None:
        self._recipe, self._backend = recipe, backend
        self._time_dim, self._in_dims = time_dim, in_dims
        self._executables: dict[Signature, Executable] = {}
        self.trace_count = 0
        self.compile_count = 0

    def __call__(
        self,
        params: Tree,
        state: Tree,
        x: Tree,
        y: Tree,
        *,
        reset: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> SegmentOutput:
        return self._segment(params, state, x, y, reset, mask, graded=True)

    def evaluate(
        self,
        params: Tree,
        state: Tree,
        x: Tree,
        y: Tree,
        *,
        reset: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> SegmentOutput:
        """evaluate : as the segment itself, without gradients (``grads`` is None)."""
        return self._segment(params, state, x, y, reset, mask, graded=False)

    def __repr__(self) -> str:
        return f"TrainSegment({self._recipe.step.name}, backend={self._backend!r})"

    # -- one call -------------------------------------------------------------------------------

    def _segment(
        self,
        params: Tree,
        state: Tree,
        x: Tree,
        y: Tree,
        reset: Tensor | None,
        mask: Tensor | None,
        *,
        graded: bool,
    ) -> SegmentOutput:
        call, tensors, layout = self._lay_out(params, state, x, y, reset, mask)
        out_spec: list[Any] = []  # known once the step was traced
        if inside_functorch():
            flat = _SegmentFunction.apply(self, call, graded, out_spec, *tensors)
        else:
            flat = tuple(self._run(call, graded, out_spec, tensors))
        flat = list(flat)
        grads = tree_unflatten(flat[: call.counts[0]], call.specs[0]) if graded else None
        rest = flat[call.counts[0] :] if graded else flat
        n_state = call.counts[3]
        after, value, out = rest[:n_state], rest[n_state], rest[n_state + 1 :]
        if isinstance(layout, SharedLayout):
            after = [layout.state_back(leaf) for leaf in after]
            out = [layout.sequence_back(leaf) for leaf in out]
        else:
            out = layout.time_back(out)
        return SegmentOutput(
            grads, tree_unflatten(after, call.specs[1]), value, tree_unflatten(out, out_spec[0])
        )

    def _lay_out(
        self, params: Tree, state: Tree, x: Tree, y: Tree, reset: Any, mask: Any
    ) -> tuple[Call, list[Tensor], Layout]:
        """The call checked, its tensors flat, detached and with time in front."""
        step, in_dims = self._recipe.step, self._in_dims
        check_params(step, params)
        check_tensors("x", x)
        if y is not None:
            check_tensors("y", y)
        dims = in_dims[1:] if in_dims is not None else (None, None, None)
        layout = Layout.of(step, self._time_dim, x, batch_axes=0 if in_dims is None else 1)
        steps = check_lengths(x, () if y is None else y, layout.time_dim, *dims[1:])
        shared = None
        if in_dims is not None:
            layout = SharedLayout(layout.time_dim, *in_dims[1:])
            x = tree_map(lambda leaf: layout.sequence_first(leaf, layout.x_dim), x)
            y = y if y is None else tree_map(lambda t: layout.sequence_first(t, layout.y_dim), y)
            reset, mask = (r if r is None else layout.rows_first(r) for r in (reset, mask))
            shared = Level(tree_leaves(x)[0].shape[1], "different")
        else:
            x, y = layout.time_first(x), y if y is None else layout.time_first(y)
            reset, mask = layout.rows_time_first(reset), layout.rows_time_first(mask)
        state, reset = self._initial(params, state, x, reset, steps, shared)
        if in_dims is not None and in_dims[1] is not None:
            state = tree_map(lambda leaf: leaf.movedim(in_dims[1], 0), state)
        rows = () if shared is not None else (("reset", reset), ("mask", mask))
        for argument, flags in rows:
            if flags is not None:
                check_rows(argument, flags, steps, state, step.row_axis)
        buffers = step.buffers()
        initial = self._recipe.initial_state
        initial = () if initial is None or callable(initial) else initial
        trees = (params, buffers, initial, state, x, () if y is None else y)
        named = list(
            zip(("params", "buffers", "initial_state", "state", "x", "y"), trees, strict=True)
        )
        check_devices(
            [
                *named,
                ("reset", reset if reset is not None else ()),
                ("mask", mask if mask is not None else ()),
            ]
        )
        flat = [tree_flatten(tree) for tree in trees]
        groups = [leaves for leaves, _ in flat]
        groups += [[] if r is None else [r] for r in (reset, mask)]
        has_axis = (False, False, False, dims[0] is not None, True, dims[2] is not None, True, True)
        tensors, shapes, flags = [], [], []
        for leaves, is_sequence, axis in zip(groups, _IS_SEQUENCE, has_axis, strict=True):
            axis = axis and shared is not None
            for leaf in leaves:
                tensors.append(leaf.detach())
                shapes.append(tuple(leaf.shape[is_sequence + axis :]))
                flags.append(axis)
        call = Call(
            specs=(flat[0][1], flat[3][1], flat[4][1], None if y is None else flat[5][1]),
            counts=tuple(len(leaves) for leaves in groups),
            buffer_names=tuple(buffers),
            shapes=tuple(shapes),
            shared=shared,
            shared_flags=tuple(flags),
            time_dim=layout.time_dim,
            context=autocast_context(x),
        )
        return call, tensors, layout

    def _initial(
        self, params: Tree, state: Tree, x: Tree, reset: Any, steps: int, shared: Level | None
    ) -> tuple[Tree, Any]:
        """``state=None`` starts from the initial state; a learned one then gets its gradient."""
        initial, step = self._recipe.initial_state, self._recipe.step
        if state is not None:
            check_tensors("state", state)
            if initial is not None and not callable(initial):
                check_same_structure("initial_state", initial, state)
            return state, reset
        if initial is None:
            if step.zero_state is None:
                raise TypeError(
                    f"state: None is known only for torch's own cells and layers, but the step is "
                    f"{step.name}. Pass the state, or make_train_segment(initial_state=...)."
                )
            return tree_map(torch.Tensor.detach, step.zero_state(tree_leaves(x)[0][0])), reset
        if not callable(initial):
            check_tensors("initial_state", initial)
            return initial, reset
        start = tree_map(torch.Tensor.detach, initial(params))
        first = torch.arange(steps, device=tree_leaves(x)[0].device) == 0
        if shared is not None:
            first = first.unsqueeze(1).expand(steps, shared.size)
        if reset is not None:
            first = reset | first.reshape(first.shape + (1,) * (reset.dim() - first.dim()))
        return start, first

    def _run(
        self, call: Call, graded: bool, out_spec: list[Any], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """The segment on plain tensors: finds or makes the plan, and runs it on its backend."""
        signature = call.signature(tensors)
        with torch.no_grad():
            executable = self._executables.get(signature)
            if executable is None:
                executable = self._make_executable(call, signature)
            out_spec.append(executable.plan.out_spec)
            groups = call.groups(tensors)
            if self._backend != "auto" or executable.backend.name == "eager":
                return executable.run(groups, graded=graded)
            try:
                return executable.run(groups, graded=graded)
            except BUILD_ERRORS as error:
                warnings.warn(
                    f"ftbptt: the {executable.backend.name} backend failed for "
                    f"{self._recipe.step.name} ({_first_line(error)}); this segment runs on the "
                    "eager backend instead, slower. backend='compile' shows the whole error.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                executable = Executable(executable.plan, choose("eager"), self._count_compile)
                self._executables[signature] = executable
                return executable.run(groups, graded=graded)

    def _make_executable(self, call: Call, signature: Signature) -> Executable:
        self.trace_count += 1
        plan = make_plan(self._recipe, signature, call.buffer_names)
        executable = Executable(plan, choose(self._backend), self._count_compile)
        self._executables[signature] = executable
        return executable

    def _count_compile(self) -> None:
        self.compile_count += 1


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _SegmentFunction(torch.autograd.Function):
    """Where ``torch.func.vmap`` meets a segment: each level adds its axis, the last one runs."""

    generate_vmap_rule = False

    @staticmethod
    def forward(
        segment: TrainSegment, call: Call, graded: bool, out_spec: list[Any], *tensors: Tensor
    ) -> Any:
        return tuple(segment._run(call, graded, out_spec, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("ftbptt: a segment is not differentiable; it returns the gradients.")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        segment: TrainSegment,
        call: Call,
        graded: bool,
        out_spec: list[Any],
        *tensors: Tensor,
    ) -> Any:
        dims = in_dims[4:]
        moved = [
            t if d is None else t.movedim(d, 1 if is_sequence else 0)
            for t, d, is_sequence in zip(tensors, dims, call.is_sequence(), strict=True)
        ]
        level = Level(info.batch_size, info.randomness)
        call = call.under_vmap(level, [d is not None for d in dims])
        flat = _SegmentFunction.apply(segment, call, graded, out_spec, *moved)
        before_out = (call.counts[0] if graded else 0) + call.counts[3] + 1
        return flat, tuple(0 if i < before_out else 1 for i in range(len(flat)))
