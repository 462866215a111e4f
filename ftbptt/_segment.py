"""The contract: ``make_train_segment``, ``TrainSegment``, and how it meets ``torch.func.vmap``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._call import Call, InDims, lay_out
from ._compat import inside_functorch, tree_unflatten
from ._execute import Executable
from ._explain import Explanation, explain
from ._layout import SharedLayout
from ._loss import Loss
from ._output import SegmentOutput
from ._step import Step, StepFunction, as_step
from .backends import EAGER, NAMES, choose
from .compiler.plan import make_plan
from .compiler.signature import Level, Recipe

Tree = Any


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
    if backend not in NAMES:
        raise ValueError(f"backend: expected one of {', '.join(NAMES)}, found {backend!r}.")
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
        self._executables: dict[Any, Executable] = {}
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

    def explain(
        self,
        params: Tree,
        state: Tree,
        x: Tree,
        y: Tree,
        *,
        reset: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Explanation:
        """explain : as the segment itself -> Explanation, to print

        The plan of such a call: its blocks, what is in each, how it runs and why, the GEMMs, what
        is saved, FLOPs and bytes. Traces the step if such a call was not seen before; runs nothing.
        """
        call, tensors, _ = lay_out(
            self._recipe, self._time_dim, self._in_dims, params, state, x, y, reset, mask
        )
        executable = self._executable(call, tensors)
        steps = next(t for t, time in zip(tensors, call.is_sequence(), strict=True) if time).shape[
            0
        ]
        return explain(executable, self._recipe.step.name, steps)

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
        call, tensors, layout = lay_out(
            self._recipe, self._time_dim, self._in_dims, params, state, x, y, reset, mask
        )
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

    def _run(
        self, call: Call, graded: bool, out_spec: list[Any], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """The segment on plain tensors: finds or makes the plan, and runs it on its backend."""
        with torch.no_grad():
            executable = self._executable(call, tensors)
            out_spec.append(executable.plan.out_spec)
            groups = call.groups(tensors)
            if self._backend != "auto" or executable.backend.name == "eager":
                return executable.run(groups, graded=graded)
            try:
                return executable.run(groups, graded=graded)
            except Exception as error:
                warnings.warn(
                    f"ftbptt: the {executable.backend.name} backend failed for "
                    f"{self._recipe.step.name} ({_first_line(error)}); this segment runs on the "
                    "eager backend instead, slower. backend='compile' shows the whole error.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                executable = Executable(executable.plan, EAGER, self._count_compile)
                self._executables[call.key(tensors)] = executable
                return executable.run(groups, graded=graded)

    def _executable(self, call: Call, tensors: Sequence[Tensor]) -> Executable:
        key = call.key(tensors)
        if key not in self._executables:
            self.trace_count += 1
            plan = make_plan(self._recipe, call.signature(tensors), call.buffer_names)
            self._executables[key] = Executable(plan, choose(self._backend), self._count_compile)
        return self._executables[key]

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
