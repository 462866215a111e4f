"""``TrainSegment``: what the caller calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._compat.running import inside_derivative, inside_dual_level, inside_functorch
from .._memory import with_strides_of
from .._trees import Tree, in_order_of, tree_leaves, tree_unflatten
from ..compiler.plan import Plan
from ..compiler.signature import Recipe
from ..compiler.tracing.constants import Constants
from ..contract.layout import InDimsLayout, Layout
from ..contract.loss import Loss, of_first
from ..contract.output import EarlyGradients, SegmentOutput, TappedOutput
from .argument_checks import check_no_gradient_is_lost, has_history, warn_of_lost_memory
from .arguments import lay_out
from .call import Arguments, Call, CallInfo, Results, settings_of
from .call_cache import CallCache, CheckedCall, FlatArguments, like
from .chunk_check import check_steps_are_alone
from .executables import Executables
from .explain import Explanation, explain
from .probes import find_taps, taps_of, with_probes
from .vmap import run_mapped


class TrainSegment:
    """train_segment : params, state, x[K, ...], y[K, ...] -> SegmentOutput

    One TBPTT segment as a pure function; made by :func:`make_train_segment`. Nothing given is
    changed, the state comes back detached, and the call can be put under ``torch.func.vmap``:
    ``in_dims=(None, 0, 0, 0)`` for a gradient per sequence, ``(0, 0, 0, 0)`` for an ensemble.

    ``reset``: bool, ``[K]`` or ``[K, B]``; where true, the state restarts before the step, and no
    gradient crosses. ``mask``: the same; where false, the step leaves the state as it was (after
    the reset, if any) and adds no loss. ``vmap`` does not map keyword arguments: given to a vmapped
    segment both hold for every sequence; for one each, vmap a function that takes them by position
    (``lambda state, x, y, reset: train_segment(params, state, x, y, reset=reset)``).

    The step is traced once for each structure, shape and dtype of the arguments, whatever K is.
    ``trace_count`` and ``compile_count`` show a loop that recompiles.

    Raises TypeError for structure and dtype, ValueError for shapes and lengths, each with the
    argument and the leaf; RuntimeError for a step that cannot be traced. Whatever else the step
    raises while it is traced is passed on, with its line and the shapes that it was given.

    Truncated BPTT: Williams and Peng, An efficient gradient-based algorithm for on-line training of
    recurrent network trajectories, 1990.

    >>> import torch, ftbptt
    >>> cell = torch.nn.GRUCell(3, 5)
    >>> train_segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: (out - y).square().mean(), backend="eager"
    ... )
    >>> params, h = dict(cell.named_parameters()), torch.zeros(2, 5)
    >>> grads, h, loss, out = train_segment(params, h, torch.randn(7, 2, 3), torch.zeros(7, 2, 5))
    >>> grads["weight_hh"].shape, h.requires_grad, out.shape, train_segment.trace_count
    (torch.Size([15, 5]), False, torch.Size([7, 2, 5]), 1)
    """

    def __init__(
        self,
        recipe: Recipe,
        backend: str,
        *,
        tapped: bool = False,
        reuse_output: bool = False,
    ) -> None:
        self.recipe, self._backend, self.tapped = recipe, backend, tapped
        self.reuses_output = reuse_output
        self._executables = Executables(recipe, backend, reuse_output=reuse_output)
        # By the key of a call: what its step taps, and what it has for constants.
        self._taps: dict[Any, tuple[Constants, dict[str, Tensor]]] = {}
        self._call_cache = CallCache()
        self._steps_checked = False  # see check_steps_are_alone

    def __getstate__(self) -> dict[str, Any]:
        """What is compiled is neither copied nor pickled, but made again."""
        new = Executables(self.recipe, self._backend, reuse_output=self.reuses_output)
        return {**self.__dict__, "_executables": new, "_taps": {}, "_call_cache": CallCache()}

    @property
    def trace_count(self) -> int:
        """How often the step was traced."""
        return self._executables.trace_count

    @property
    def compile_count(self) -> int:
        """How many programs were built."""
        return self._executables.compile_count

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
        return self._segment(Arguments(params, state, x, y, reset, mask), CallInfo())

    def with_early_gradients(
        self,
        early: EarlyGradients,
        params: Tree,
        state: Tree,
        x: Tree,
        y: Tree,
        *,
        reset: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> SegmentOutput:
        """The segment, with gradients handed over while others are still being computed.

        All are returned as well. Not under ``torch.func.vmap``. Where ``backend="auto"`` falls back
        to another backend, gradients that were not handed over by then are only returned.
        """
        given = Arguments(params, state, x, y, reset, mask)
        return self._segment(given, CallInfo(early=early))

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
        """evaluate : params, state, x[K, ...], y[K, ...] -> SegmentOutput with ``grads=None``

        As the segment itself, in the same compiled form, without gradients; raises the same. A
        module runs in the mode that it is in: call ``model.eval()`` before, if it has dropout.
        Under ``torch.func.vmap``, which returns nothing but tensors, ``grads`` is an empty tuple.

        >>> import torch, ftbptt
        >>> cell = torch.nn.GRUCell(3, 5)
        >>> train_segment = ftbptt.make_train_segment(
        ...     cell, lambda out, y: (out - y).square().mean(), backend="eager"
        ... )
        >>> params, x = dict(cell.named_parameters()), torch.randn(7, 2, 3)
        >>> train_segment.evaluate(params, None, x, torch.zeros(7, 2, 5)).grads is None
        True
        """
        given = Arguments(params, state, x, y, reset, mask)
        return self._segment(given, CallInfo(with_grad=False))

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

        The plan of such a call: its blocks, how each runs and why, the GEMMs, what is saved, FLOPs
        and bytes. Traces the step if there was no such call before; runs nothing. Raises what the
        segment does.

        >>> import torch, ftbptt
        >>> cell = torch.nn.GRUCell(3, 5)
        >>> train_segment = ftbptt.make_train_segment(
        ...     cell, lambda out, y: (out - y).square().mean(), backend="eager"
        ... )
        >>> params, x = dict(cell.named_parameters()), torch.randn(7, 2, 3)
        >>> print(train_segment.explain(params, None, x, torch.zeros(7, 2, 5)))
        GRUCell: ...
        """
        call, tensors, _ = self._laid_out(Arguments(params, state, x, y, reset, mask))
        executable = self._executables.current(call, tensors)
        steps = call.groups(tensors)["x"][0].shape[0]
        return explain(executable, self.recipe.step.name, steps)

    def plan(
        self,
        params: Tree,
        state: Tree,
        x: Tree,
        y: Tree,
        *,
        reset: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Plan, dict[str, list[Tensor]]]:
        """The plan of such a call, and its arguments, flat and with time in front, by group."""
        call, tensors, _ = self._laid_out(Arguments(params, state, x, y, reset, mask))
        return self._executables.current(call, tensors).plan, call.groups(tensors)

    def layout(self, x: Tree) -> Layout:
        """Where time and rows lie in data like ``x``."""
        return self.recipe.layout(x)

    def row_axis(self, leaf: Tensor) -> int:
        """The axis of the rows in a leaf of the state."""
        if self.recipe.in_dims is not None:
            return self.recipe.in_dims[1] or 0
        return self.recipe.step.row_axis(leaf)

    @property
    def batched_axes(self) -> int:
        """The fewest axes of ``x`` with rows."""
        return self.recipe.step.batched_axes

    def variant(
        self,
        *,
        states: bool = False,
        factors: bool = False,
        loss: Callable[[Loss], Loss] | None = None,
        context: int | None = None,
        time_dim: int | None = None,
    ) -> TrainSegment:
        """The same segment with another input, output or loss.

        ``states``: ``out`` becomes ``(out, states)``, where ``states`` has the state before each
        step. ``factors``: ``x`` becomes ``(x, factors)``; the gradient that goes back from a step
        is multiplied by its factor. ``loss``: called with the loss, returns the one to use.
        ``context``, ``time_dim``: as in :func:`make_train_segment`; None keeps the segment's. The
        variant's results are never overwritten, whatever ``reuse_output`` was.
        """
        step, new_loss = self.recipe.step, self.recipe.loss
        if factors:
            step = step.with_gradient_factors()
        if states:
            step, new_loss = step.with_states(self.tapped), of_first(new_loss)
        if loss is not None:
            new_loss = loss(new_loss)
        given = {"context": context, "time_dim": time_dim}
        others: Any = {name: value for name, value in given.items() if value is not None}
        recipe = replace(self.recipe, step=step, loss=new_loss, **others)
        return TrainSegment(recipe, self._backend, tapped=self.tapped)

    @property
    def context(self) -> int:
        """The steps at the start of a segment that have no loss."""
        return self.recipe.context

    def __repr__(self) -> str:
        return f"TrainSegment({self.recipe.step.name}, backend={self._backend!r})"

    # -- one call -------------------------------------------------------------------------------

    def _segment(self, given: Arguments, info: CallInfo) -> SegmentOutput:
        if torch.compiler.is_compiling():  # around the caller's code: a segment is compiled already
            from .dynamo import outside  # which imports torch's compiler

            return outside(self._segment, given, info)
        params, state, x, y, _, _ = given
        mapped, in_dims, with_grad = inside_functorch(), self.recipe.in_dims, info.with_grad
        is_plain = not (mapped or inside_dual_level())
        key = arguments = None
        if is_plain and in_dims is None and state is not None and not self.tapped:
            arguments = FlatArguments.of(given)
        if arguments is not None:
            key = (arguments.key, with_grad, *self.surroundings(arguments.device_type))
            checked = self._call_cache.find(key)
            # A gradient that they wait for is refused, or told of in the case of a state.
            may_lose_gradient = with_grad and any(
                t.requires_grad for leaves in arguments.leaves[1:4] for t in leaves
            )
            if checked is not None and not may_lose_gradient:
                return self.run_checked(checked, arguments.leaves, params, state, info)
        if with_grad:
            x_without = () if self.tapped else x
            check_no_gradient_is_lost(self.recipe.step, params, state, x_without, y)
        call, tensors, layout = self._laid_out(given)
        if not is_plain and (inside_dual_level() or inside_derivative()):
            raise RuntimeError(
                "a segment is not differentiable: it returns the gradients itself, as .grads, and "
                "everything detached. Call it outside of torch.func.grad, vjp, jvp and linearize."
            )
        if mapped:
            info = CallInfo(with_grad)  # nothing is handed over early
            flat = tuple(run_mapped(self._executables, call, info, tensors))
        else:
            flat = tuple(self._executables.run(call, info, tensors))
            if not self._steps_checked and in_dims is None:
                start = tree_unflatten(call.groups(tensors)["state"], call.specs.state)
                self._steps_checked = check_steps_are_alone(
                    self.recipe.step, params, start, layout.time_first(x)
                )
            if with_grad and not self.tapped and has_history(state):
                warn_of_lost_memory(state, self._executables.of(call, tensors).plan.kept_state)
            # One step shows nothing of other lengths, which have keys of their own.
            is_checked = self._steps_checked or call.groups(tensors)["x"][0].shape[0] == 1
            if key is not None and layout.time_dim == 0 and is_checked:
                executable = self._executables.of(call, tensors)
                self._call_cache.keep(key, CheckedCall(call, executable))
        results = call.results(flat, with_grad)
        if with_grad and not mapped:
            results = _with_strides_of(call.groups(tensors)["params"], results)
        return self._output(call, layout, results, info, mapped)

    def _output(
        self, call: Call, layout: Layout, results: Results[Tensor], info: CallInfo, mapped: bool
    ) -> SegmentOutput:
        """What the caller gets: in the structure and the layout of the arguments."""
        grads: Tree = () if mapped else None  # vmap returns nothing but tensors
        if info.with_grad:
            grads = tree_unflatten(results.grads, call.specs.params)
        leaves, out_leaves = results.state, results.out
        if isinstance(layout, InDimsLayout):
            leaves = [layout.state_back(leaf) for leaf in leaves]
            out_leaves = [layout.sequence_back(leaf) for leaf in out_leaves]
        else:
            out_leaves = layout.time_back(out_leaves)
        state = tree_unflatten(leaves, call.specs.state)
        n_out = info.out_spec.num_leaves
        out = tree_unflatten(out_leaves[:n_out], info.out_spec)
        if self.tapped:
            out, values = out
            taps = taps_of(values, out_leaves[n_out:], mapped)
            tapped: Any = TappedOutput(grads, state, results.loss, out, taps)
            return tapped  # a fifth part, for those who asked for it
        return SegmentOutput(grads, state, results.loss, out)

    def _laid_out(self, given: Arguments) -> tuple[Call, list[Tensor], Layout]:
        """A call, checked, as flat tensors with time in front."""
        call, tensors, layout = lay_out(self.recipe, given)
        if self.tapped:
            key = call.key(tensors)
            if key not in self._taps or self._taps[key][0].change() is not None:
                constants = Constants([self.recipe.step.root], given=self.recipe.step.module)
                tapped = find_taps(self.recipe.step, call, tensors, constants)
                self._taps[key] = constants, tapped
            call, tensors = with_probes(call, tensors, self._taps[key][1])
        return call, tensors, layout

    def surroundings(self, device_type: str) -> tuple[Any, ...]:
        """What a call depends on besides its arguments: buffers, initial state and settings."""
        buffers = self.recipe.step.buffers()
        tensors = (*buffers.values(), *self._initial_leaves())
        return (
            *buffers,
            *[(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors],
            *settings_of(self.recipe, device_type),
        )

    def _initial_leaves(self, like_state: Tree = None) -> list[Tensor]:
        """The leaves of an ``initial_state`` that is given as tensors, in the order of a state."""
        initial = self.recipe.initial_state
        if initial is None or callable(initial):
            return []
        return tree_leaves(initial if like_state is None else in_order_of(like_state, initial))

    def checked_call(self, params: Tree, state: Tree, x: Tree, y: Tree) -> CheckedCall | None:
        """What a call with such arguments runs; None if it has to be checked first."""
        arguments = FlatArguments.of(Arguments(params, state, x, y))
        if arguments is None:
            return None
        surroundings = self.surroundings(arguments.device_type)
        return self._call_cache.find((arguments.key, True, *surroundings))

    def run_checked(
        self,
        checked: CheckedCall,
        leaves: list[list[Tensor]],
        params: Tree,
        state: Tree,
        info: CallInfo,
    ) -> SegmentOutput:
        """A call that was checked before. ``leaves`` are those of each argument, not moved."""
        param_leaves, *others = leaves
        before = [*param_leaves, *self.recipe.step.buffers().values()]
        before += self._initial_leaves(state)
        tensors = [leaf.detach() for leaf in (*before, *(t for group in others for t in group))]
        flat = self._executables.run(checked.call, info, tensors, checked.executable)
        results = checked.call.results(flat, info.with_grad)
        if info.with_grad:
            results = _with_strides_of(param_leaves, results)
        return SegmentOutput(
            like(params, results.grads) if info.with_grad else None,
            like(state, results.state),
            results.loss,
            tree_unflatten(results.out, info.out_spec),
        )


def _with_strides_of(params: Sequence[Tensor], results: Results[Tensor]) -> Results[Tensor]:
    pairs = zip(params, results.grads, strict=True)
    return results._replace(grads=[with_strides_of(p, grad) for p, grad in pairs])
