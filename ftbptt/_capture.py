"""Segments on a GPU as CUDA graphs: a call is copies in, one replay, copies out.

A graph holds the addresses of everything it works on, so the caller's tensors are copied to its
own and its results are copied from them. One graph serves one number of steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ._compat import clear_cublas_workspaces, copy_all, end_recording
from ._execute import Executable
from ._output import EarlyGradients
from ._warnings import warn
from .backends import Backend
from .compiler.plan import Plan

Groups = dict[str, list[Tensor]]

# Graphs of one plan that are kept: the number of steps seldom takes more values.
_MOST_GRAPHS = 8
_CAPTURED_ON = {"cuda"}
_in_turn = Lock()  # all graphs share their memory, so that only one may run at a time
_last_stream: dict[torch.device, torch.cuda.Stream] = {}  # where the last one was launched


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
        self.forgotten: set[Any] = set()
        self.warned = False

    def run(
        self, groups: Groups, *, with_grad: bool, early: EarlyGradients | None = None
    ) -> list[Tensor]:
        if early is not None or self.failed:
            return super().run(groups, with_grad=with_grad, early=early)
        device = groups["x"][0].device
        closed_over = tuple(_as_captured(tensor, device) for tensor in self.plan.captures)
        key = (with_grad, groups["x"][0].shape[0], *_numerics(), closed_over)
        with _in_turn:
            if key in self.graphs:
                self.graphs.move_to_end(key)
                _wait_for_last(device)
                graph = self.graphs[key] or self._captured(groups, with_grad)
                self.graphs[key] = graph
                if graph is not None:
                    outputs = graph(groups)
                    return outputs if self.reuse_output else [own.clone() for own in outputs]
            else:
                self._make_room_for(key)
        return super().run(groups, with_grad=with_grad)

    def _make_room_for(self, key: Any) -> None:
        """Notes that it was seen; forgets what was seen longest ago, if that is too many."""
        self.graphs[key] = None
        if key in self.forgotten and not self.warned:
            self.warned = True
            warn(
                f"ftbptt: more than {_MOST_GRAPHS} CUDA graphs are wanted in turns, one for each "
                f"number of steps (now {key[1]}) with gradients or without, and no more are kept: "
                "kernels are launched one by one, or captured anew, slower. Give segments of fewer "
                "lengths.",
                RuntimeWarning,
            )
        if len(self.graphs) > _MOST_GRAPHS:
            self.forgotten.add(self.graphs.popitem(last=False)[0])

    def _captured(self, groups: Groups, with_grad: bool) -> SegmentGraph | None:
        run = super().run
        try:
            return SegmentGraph(
                lambda own: run(own, with_grad=with_grad), groups, own_memory=self.reuse_output
            )
        except RuntimeError as error:  # also for want of memory, which it takes more of
            self.failed = True
            self.graphs.clear()
            warn(
                f"ftbptt: a segment could not be captured as a CUDA graph ({error}). Its kernels "
                "are launched one by one instead, slower.",
                RuntimeWarning,
            )
            return None


class SegmentGraph:
    """One captured segment, with tensors of its own for what it reads and writes."""

    def __init__(
        self, run: Callable[[Groups], list[Tensor]], groups: Groups, *, own_memory: bool
    ) -> None:
        own = {name: [tensor.clone() for tensor in group] for name, group in groups.items()}
        self.inputs = [tensor for group in own.values() for tensor in group]
        device = groups["x"][0].device

        def warm_up() -> None:
            """Libraries choose their algorithms and allocate, which a graph may not.

            Random numbers are drawn anew afterwards: a run that is resumed captures at another
            call than the one before it, and must draw the same.
            """
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                run(own)

        self.outputs, self.replay = _capture(warm_up, lambda: run(own), device, own_memory)

    def __call__(self, groups: Groups) -> list[Tensor]:
        """The graph's own results, which the next call overwrites."""
        copy_all(self.inputs, [tensor for group in groups.values() for tensor in group])
        self.replay()
        return list(self.outputs)


def _as_captured(tensor: Tensor, device: torch.device) -> Any:
    """What of a tensor that the step closes over is part of a graph, which reads it where it is."""
    if tensor.device.type != device.type:
        # Numbers, which become arguments of the graph's kernels.
        return tensor.shape, tuple(tensor.flatten().tolist())
    return tensor.data_ptr(), tensor.stride()


def _numerics() -> tuple[Any, ...]:
    """What products and convolutions depend on beside their tensors, which a graph has settled."""
    matmul = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn  # torch's stubs do not know all of it
    return (
        matmul.fp32_precision, matmul.allow_fp16_accumulation,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision,
        cudnn.enabled, cudnn.deterministic, cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def _wait_for_last(device: torch.device) -> None:
    """What this thread launches from now on comes after the last graph, whoever launched it."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        last = _last_stream.get(device, stream)
        if last != stream:
            stream.wait_stream(last)
        _last_stream[device] = stream


@cache
def _memory_pool(device: torch.device) -> tuple[Any, torch.cuda.CUDAGraph]:
    """The memory of all graphs that copy their results, which run in turn.

    With it a graph that holds it: a pool that no graph uses any more cannot be used again.
    """
    pool, holder = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(holder, pool=pool, stream=torch.cuda.Stream(device)):
        torch.zeros(1, device=device)
    return pool, holder


def _capture(
    warm_up: Callable[[], None],
    function: Callable[[], list[Tensor]],
    device: torch.device,
    own_memory: bool,
) -> tuple[list[Tensor], Callable[[], None]]:
    """The tensors that a function returns, and what fills them again.

    ``own_memory``: no other graph works where they lie.
    """
    with torch.cuda.device(device):
        before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            warm_up()
        before.wait_stream(stream)
        pool = torch.cuda.graph_pool_handle() if own_memory else _memory_pool(device)[0]
        graph = torch.cuda.CUDAGraph()
        clear_cublas_workspaces()
        try:
            # Other threads may go on to use the device, such as for the next window.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                outputs = function()
        except BaseException:
            # torch leaves its stream, and goes on allocating in the pool, where a capture ends
            # with an error.
            torch.cuda.set_stream(before)
            with suppress(Exception):
                end_recording(device, pool)
            _memory_pool.cache_clear()
            raise
        finally:
            clear_cublas_workspaces()
    return outputs, graph.replay
