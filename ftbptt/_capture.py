"""Segments on a GPU as CUDA graphs: a call is copies in, one replay, copies out.

A graph holds the addresses of everything it works on, so the caller's tensors are copied to its
own and its results are copied from them. One graph serves one number of steps.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ._compat import copy_all
from ._execute import Executable
from ._output import EarlyGradients
from .backends import Backend
from .compiler.plan import Plan

Groups = dict[str, list[Tensor]]

# Graphs of one plan that are kept: the number of steps seldom takes more values.
_MOST_GRAPHS = 8
_CAPTURED_ON = {"cuda"}
_in_turn = Lock()  # all graphs share their memory, so that only one may run at a time
_last_stream: torch.cuda.Stream | None = None  # where the last one was launched


def make_executable(
    plan: Plan, backend: Backend, count_compile: Callable[[], None], *, reuse_output: bool
) -> Executable:
    """make_executable : Plan, Backend -> what runs segments of the plan on it"""
    if backend.captured and plan.signature.x[0].device.type in _CAPTURED_ON:
        return CapturedExecutable(plan, backend, count_compile, reuse_output)
    return Executable(plan, backend, count_compile)


class CapturedExecutable(Executable):
    """Captures a segment when its number of steps is seen for the second time.

    The first time everything is compiled; and what comes once, as the end of a sequence, is not
    worth a graph.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        count_compile: Callable[[], None],
        reuse_output: bool,
    ) -> None:
        super().__init__(plan, backend, count_compile)
        self.reuse_output = reuse_output
        self.graphs: OrderedDict[Any, SegmentGraph | None] = OrderedDict()
        self.failed = False

    def run(
        self, groups: Groups, *, graded: bool, early: EarlyGradients | None = None
    ) -> list[Tensor]:
        if early is not None or self.failed:
            return super().run(groups, graded=graded, early=early)
        precision = torch.get_float32_matmul_precision()
        key = (graded, groups["x"][0].shape[0], precision)
        with _in_turn:
            if key not in self.graphs:
                self.graphs[key] = None
                if len(self.graphs) > _MOST_GRAPHS:
                    self.graphs.popitem(last=False)
                return super().run(groups, graded=graded)
            self.graphs.move_to_end(key)
            _wait_for_last()
            graph = self.graphs[key] or self._captured(groups, graded)
            self.graphs[key] = graph
            if graph is None:
                return super().run(groups, graded=graded)
            outputs = graph(groups)
            return outputs if self.reuse_output else [output.clone() for output in outputs]

    def _captured(self, groups: Groups, graded: bool) -> SegmentGraph | None:
        run = super().run
        try:
            return SegmentGraph(lambda own: run(own, graded=graded), groups)
        except RuntimeError as error:
            self.failed = True
            self.graphs.clear()
            warnings.warn(
                f"ftbptt: a segment could not be captured as a CUDA graph ({error}). Its kernels "
                "are launched one by one instead, slower.",
                RuntimeWarning,
                stacklevel=6,
            )
            return None


class SegmentGraph:
    """One captured segment, with tensors of its own for what it reads and writes."""

    def __init__(self, run: Callable[[Groups], list[Tensor]], groups: Groups) -> None:
        own = {name: [tensor.clone() for tensor in group] for name, group in groups.items()}
        self.inputs = [tensor for group in own.values() for tensor in group]
        self.outputs, self.replay = _capture(lambda: run(own))

    def __call__(self, groups: Groups) -> list[Tensor]:
        """The graph's own results, which the next call overwrites."""
        copy_all(self.inputs, [tensor for group in groups.values() for tensor in group])
        self.replay()
        return list(self.outputs)


def _wait_for_last() -> None:
    """What this thread launches from now on comes after the last graph, whoever launched it."""
    global _last_stream
    stream = torch.cuda.current_stream()
    if _last_stream is not None and _last_stream != stream:
        stream.wait_stream(_last_stream)
    _last_stream = stream


@cache
def _memory_pool() -> Any:
    """One pool for all graphs: they run in turn."""
    return torch.cuda.graph_pool_handle()


def _capture(function: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
    """The tensors that a function returns, and what fills them again."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # libraries choose their algorithms and allocate, which a graph may not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_memory_pool()):
        outputs = function()
    return outputs, graph.replay
