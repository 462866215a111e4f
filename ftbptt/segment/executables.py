"""The executables of a segment: each is made when it is first needed, on a backend that works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._garbage import without_garbage_collection
from .._memory import resolved
from .._warnings import warn
from ..backends import Backend, choose
from ..backends.cache_folder import use_a_folder_that_works
from ..compiler.plan import Plan, make_plan
from ..compiler.signature import Recipe, without_autocast
from ..compiler.tracing.constants import Change
from ..compiler.tracing.errors import needs_values
from ..compiler.tracing.trace import TRACING
from .call import Call, CallInfo, without_inference_mode
from .capture import make_executable
from .execute import Executable
from .fallback import on_first_that_works
from .index_errors import note_whole_numbers
from .programs import Count

_MANY_TRACES = 8
_MOST_TRACES_IN_A_CALL = 4  # other threads may change what the step reads, but not that often


class Executables:
    """By structure, shapes and dtypes of a call's arguments, and what else it depends on."""

    def __init__(self, recipe: Recipe, backend: str, *, reuse_output: bool) -> None:
        self._recipe, self._backend, self._reuse_output = recipe, backend, reuse_output
        self._by_key: dict[Any, Executable] = {}
        self.trace_count = 0
        self._traced_in_vain = 0
        self._warned = False  # that all gradients are zeros
        self._compiled = Count()

    @property
    def compile_count(self) -> int:
        return self._compiled.value

    def run(
        self,
        call: Call,
        info: CallInfo,
        tensors: Sequence[Tensor],
        executable: Executable | None = None,
    ) -> list[Tensor]:
        """The segment on plain tensors: finds or makes the plan, and runs it on its backend."""
        try:
            return self._run(call, info, tensors, executable)
        except (IndexError, RuntimeError) as error:
            note_whole_numbers(error, call, tensors)
            raise

    def _run(
        self,
        call: Call,
        info: CallInfo,
        tensors: Sequence[Tensor],
        executable: Executable | None,
    ) -> list[Tensor]:
        with_grad, early = info.with_grad, info.early
        tensors = [resolved(leaf) for leaf in tensors]
        with torch.no_grad(), without_autocast(call.settings.autocast):
            executable = self._current(call, tensors, executable)
            plan = executable.plan
            info.out_spec = plan.out_spec
            groups = call.groups(tensors)
            if with_grad and not self._warned and plan.is_detached:
                self._warn_of_zero_gradients(plan)
            if self._backend != "auto" or executable.backend.name == "eager":
                return executable.run(groups, with_grad=with_grad, early=early)
            first = executable

            def run(backend: Backend) -> list[Tensor]:
                if backend is first.backend:
                    return first.run(groups, with_grad=with_grad, early=early)
                other = self._on(plan, backend)
                # What was handed over was sent: another backend does not send it once more.
                result = other.run(groups, with_grad=with_grad)
                first.instead = self._by_key[call.key(tensors)] = other
                return result

            device_type = tensors[0].device.type
            return on_first_that_works(run, first.backend, self._recipe.step.name, device_type)

    def current(self, call: Call, tensors: Sequence[Tensor]) -> Executable:
        """What such a call would run now, after a change of what the step or the loss reads too."""
        with torch.no_grad(), without_autocast(call.settings.autocast):
            return self._current(call, tensors, None)

    def _current(
        self, call: Call, tensors: Sequence[Tensor], known: Executable | None
    ) -> Executable:
        """The same, from one that such a call has run before, if any."""
        executable = known = known or self.of(call, tensors)
        while executable.instead is not None:
            executable = executable.instead
        executable = self._up_to_date(call, tensors, executable)
        if executable is not known:
            known.instead = executable
        plan = executable.plan
        for source, copy in (*plan.copied, *plan.loss.copied):  # it may have been written to
            copy.copy_(source)
        return executable

    def of(self, call: Call, tensors: Sequence[Tensor]) -> Executable:
        """The executable for a call, made if it is the first of its kind."""
        key = call.key(tensors)
        if key in self._by_key:
            return self._by_key[key]
        with (
            TRACING,
            without_garbage_collection(),
            without_autocast(call.settings.autocast),
            without_inference_mode(),
        ):
            if key not in self._by_key:  # another thread may have been first
                self.trace_count += 1
                use_a_folder_that_works()
                plan = self._planned(call, tensors)
                self._by_key[key] = self._made(plan, tensors[0].device.type)
        return self._by_key[key]

    def _planned(self, call: Call, tensors: Sequence[Tensor]) -> Plan:
        """The plan of a call. A loss that cannot be traced runs as it is written from now on."""
        recipe, signature = replace(self._recipe, probes=call.probes), call.signature(tensors)
        steps = call.groups(tensors)["x"][0].shape[0]
        try:
            return make_plan(recipe, signature, call.buffer_names, steps)
        except RuntimeError as error:
            if not needs_values("loss", error):
                raise
            reason, _, _ = str(error).rpartition("\n")  # without the remedy
        self._recipe.traces_loss = recipe.traces_loss = False
        plan = make_plan(recipe, signature, call.buffer_names, steps)
        warn(
            f"ftbptt: {reason}\nIt runs as it is written instead, between the compiled loops; "
            "torch.compiler.disable(loss) says that this is meant.",
            RuntimeWarning,
        )
        return plan

    def _made(self, plan: Plan, device_type: str) -> Executable:
        backend = choose(self._backend)
        if self._backend != "auto":
            return self._on(plan, backend)
        return on_first_that_works(
            lambda backend: self._on(plan, backend), backend, self._recipe.step.name, device_type
        )

    def _up_to_date(
        self, call: Call, tensors: Sequence[Tensor], executable: Executable
    ) -> Executable:
        """The executable, or another one if what it has for constants has changed.

        Raises RuntimeError for what changes with each trace.
        """
        traces = 0
        while (change := executable.plan.constants.change()) is not None:
            if traces == _MOST_TRACES_IN_A_CALL:
                raise RuntimeError(
                    f"step {self._recipe.step.name} or its loss changes {change.name}, or "
                    "something that this is computed from, whenever it runs. Both are pure "
                    "functions: read such a value from the state and return it in the next state."
                )
            traces += 1
            executable = self._after(change, call, tensors, executable)
        return executable

    def _after(
        self, change: Change, call: Call, tensors: Sequence[Tensor], before: Executable
    ) -> Executable:
        """The executable for a call after a change outside: made anew, if it computes another."""
        key = call.key(tensors)
        self._by_key.pop(key, None)
        self._recipe.find_modules_again()
        executable = self.of(call, tensors)
        if not change.is_read and executable.plan.computes_as(before.plan):
            before.plan.constants.take_over(executable.plan.constants)
            self._by_key[key] = before
            self._traced_in_vain += 1
            if self._traced_in_vain == _MANY_TRACES:
                warn(
                    f"ftbptt: {self._recipe.step.name} is traced whenever {change.name} changes, "
                    f"for the {_MANY_TRACES}th time, and computes the same as before. That takes "
                    "time: keep the value where the step and the loss do not name it.",
                    RuntimeWarning,
                )
            return before
        warn(
            f"ftbptt: {self._recipe.step.name} is compiled again: {change.name} has changed, which "
            "the step or the loss reads. To change a value without that, write to a tensor in "
            "place, as v.fill_(0.5), and compute with the tensor.",
            RuntimeWarning,
        )
        return executable

    def _warn_of_zero_gradients(self, plan: Plan) -> None:
        self._warned = True
        if plan.loss.is_constant:
            why = (
                "has no gradient with respect to its outputs, so all gradients are zeros: it is "
                "detached, or made of whole numbers (argmax, a comparison)"
            )
        elif not plan.loops.reverse.stacked:
            why = (
                "has no gradient with respect to the parameters, so all gradients are zeros: the "
                "out that the step returns is detached, or comes from operations without one "
                "(sign, round)"
            )
        else:
            return  # what is tapped has gradients too
        warn(
            f"ftbptt: the loss of {self._recipe.step.name} {why}. train_segment.evaluate computes "
            "a loss without gradients.",
            RuntimeWarning,
        )

    def _on(self, plan: Plan, backend: Backend) -> Executable:
        return make_executable(plan, backend, self._compiled, reuse_output=self._reuse_output)
