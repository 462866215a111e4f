"""Segments on a GPU as CUDA graphs: a call is copies in, one replay, copies out.

A graph holds the addresses of everything it works on, so the caller's tensors are copied into
tensors of the graph, and its results out of them. One graph serves one number of steps.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from .._compat.running import clear_cublas_workspaces, copy_all, end_recording
from .._garbage import without_garbage_collection
from .._warnings import warn
from ..backends import Backend
from ..compiler.blocks import ScanBlock
from ..compiler.plan import Plan
from ..contract.output import EarlyGradients
from .call import without_inference_mode
from .early_gradients import hand_over
from .execute import Executable
from .programs import Count

Groups = dict[str, list[Tensor]]

# Graphs kept per plan. The number of steps rarely takes more values.
_MOST_GRAPHS = 8
_CAPTURED_ON = {"cuda"}
_one_at_a_time = Lock()  # all graphs share memory
_last_stream: dict[torch.device, torch.cuda.Stream] = {}  # on which the last graph was launched


def make_executable(
    plan: Plan, backend: Backend, compiled: Count, *, reuse_output: bool
) -> Executable:
    """make_executable : Plan, Backend -> Executable, which captures graphs where it can"""
    if backend.captured and plan.loss.is_traced and plan.signature.x[0].device.type in _CAPTURED_ON:
        return CapturedExecutable(plan, backend, compiled, reuse_output)
    return Executable(plan, backend, compiled)


class CapturedExecutable(Executable):
    """Captures a segment when its number of steps is seen for the second time.

    The first call compiles; and a length that comes only once, such as that of the end of a
    sequence, is not worth a graph.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        compiled: Count,
        reuse_output: bool,
    ) -> None:
        super().__init__(plan, backend, compiled)
        self.reuse_output = reuse_output
        # The least recently used first. None: seen once, to be captured the next time.
        self.graphs: OrderedDict[Any, SegmentGraph | None] = OrderedDict()
        self.failed = False  # to capture one
        self.evicted: deque[Any] = deque(maxlen=8 * _MOST_GRAPHS)
        self.warned = False

    def run(
        self, groups: Groups, *, with_grad: bool, early: EarlyGradients | None = None
    ) -> list[Tensor]:
        device = groups["x"][0].device
        is_early = early is not None and self._runs_in_parts
        if is_early or self.failed or _is_capturing(device):
            return super().run(groups, with_grad=with_grad, early=early)
        steps = groups["x"][0].shape[0]
        by_loss = self.plan.loss.graphs_for(steps).program(with_grad).captured
        captures = [*self.plan.captures, *by_loss]
        closed_over = tuple(_as_captured(tensor, device) for tensor in captures)
        key = (with_grad, steps, *_numerics(), closed_over)
        with _one_at_a_time:
            if key in self.graphs:
                self.graphs.move_to_end(key)
                _wait_for_last(device)
                graph = self.graphs[key] or self._captured(groups, with_grad)
                self.graphs[key] = graph
                if graph is not None:
                    outputs = graph(groups)
                    outputs = outputs if self.reuse_output else _copies(outputs)
            else:
                graph = None
                self._make_room_for(key)
        if graph is None:
            return super().run(groups, with_grad=with_grad, early=early)
        if early is not None:
            loss = outputs[len(groups["params"]) + len(groups["state"])]
            hand_over(early, loss, outputs)
        return outputs

    @cached_property
    def _runs_in_parts(self) -> bool:
        """Whether gradients that are handed over early gain more than a graph does.

        A graph saves K launches, except of loops in one kernel.
        """
        loops = (self.forward, self.split_reverse.recurrences)
        scans = [b for loop in loops for b in loop.blocks if isinstance(b, ScanBlock)]
        return self.hands_over and all(map(self.backend.in_one_kernel, scans))

    def _make_room_for(self, key: Any) -> None:
        """Notes that the key was seen, and evicts the least recently used if there are too many."""
        self.graphs[key] = None
        if key in self.evicted and not self.warned:
            self.warned = True
            warn(
                f"ftbptt: more than {_MOST_GRAPHS} CUDA graphs are in use, one for each number of "
                f"steps (now {key[1]}) with gradients or without, and no more are kept: kernels "
                "are launched one by one, or captured again, which is slower. Give segments of "
                "fewer lengths.",
                RuntimeWarning,
            )
        if len(self.graphs) > _MOST_GRAPHS:
            self.evicted.append(self.graphs.popitem(last=False)[0])

    def _captured(self, groups: Groups, with_grad: bool) -> SegmentGraph | None:
        run = super().run
        try:
            with without_inference_mode():  # other calls write to the graph's tensors too
                return SegmentGraph(
                    lambda inputs: run(inputs, with_grad=with_grad),
                    groups,
                    separate_memory=self.reuse_output,
                )
        except RuntimeError as error:  # out of memory too: a graph needs more of it
            self.failed = True
            self.graphs.clear()
            warn(
                f"ftbptt: a segment could not be captured as a CUDA graph ({error}). Its kernels "
                "are launched one by one instead, slower.",
                RuntimeWarning,
            )
            return None


class SegmentGraph:
    """One captured segment, and the tensors that it reads and writes."""

    def __init__(
        self, run: Callable[[Groups], list[Tensor]], groups: Groups, *, separate_memory: bool
    ) -> None:
        copies = {name: [tensor.clone() for tensor in group] for name, group in groups.items()}
        self.inputs = [tensor for group in copies.values() for tensor in group]
        device = groups["x"][0].device

        def warm_up() -> None:
            """Lets libraries choose algorithms and allocate, which they may not within a graph.

            Leaves the random numbers as they were: a run that is resumed captures at another call
            than the original, and must draw the same.
            """
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                run(copies)

        self.outputs, self.replay = _capture(warm_up, lambda: run(copies), device, separate_memory)
        # When it is dropped its last replay may be on another stream, and not over.
        weakref.finalize(self, _keep_until_replayed, self.inputs).atexit = False

    def __call__(self, groups: Groups) -> list[Tensor]:
        """Returns the graph's tensors, which the next call overwrites."""
        copy_all(self.inputs, [tensor for group in groups.values() for tensor in group])
        self.replay()
        return list(self.outputs)


def _keep_until_replayed(inputs: list[Tensor]) -> None:
    """Keeps the memory of a graph's inputs until what was launched last is over."""
    for tensor in inputs:
        if tensor.is_cuda:
            tensor.record_stream(_last_stream[tensor.device])


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(copies, tensors)
    return copies


def _is_capturing(device: torch.device) -> bool:
    """Whether the caller captures a graph, of which the segment's kernels become a part."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _as_captured(tensor: Tensor, device: torch.device) -> Any:
    """What a graph depends on of a tensor that the step closes over: it reads that in place."""
    if tensor.device.type != device.type:
        # Its values become arguments of the graph's kernels.
        return tensor.shape, tuple(tensor.flatten().tolist())
    return tensor.data_ptr(), tensor.stride()


def _numerics() -> tuple[Any, ...]:
    """Settings that products and convolutions depend on, which a graph has fixed."""
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
    """Makes this thread's stream wait for the last graph, whichever thread launched it."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        last = _last_stream.get(device, stream)
        if last != stream:
            stream.wait_stream(last)
        _last_stream[device] = stream


@cache
def _memory_pool(device: torch.device) -> tuple[Any, torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """The memory that all graphs share whose results are copied, and the stream to capture on.

    What was allocated for one stream is not used again for another. With a graph that keeps the
    pool alive: one that no graph uses cannot be used again.
    """
    pool, holder = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    with (
        without_garbage_collection(),
        torch.cuda.graph(holder, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        torch.zeros(1, device=device)
    return pool, stream, holder


def _capture(
    warm_up: Callable[[], None],
    function: Callable[[], list[Tensor]],
    device: torch.device,
    separate_memory: bool,
) -> tuple[list[Tensor], Callable[[], None]]:
    """The tensors that a function returns, and a call that computes them again.

    ``separate_memory``: no other graph uses the memory of these tensors.
    """
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        pool, stream, _ = _memory_pool(device)
        if separate_memory:
            pool = torch.cuda.graph_pool_handle()
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                warm_up()
        finally:  # after an error too: what it reads is freed, for what ``before`` runs next
            before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        clear_cublas_workspaces()
        try:
            # Other threads may use the device meanwhile, for example to send the next window. Of
            # garbage, graphs and kernels are freed by calls that would end the capture.
            with (
                without_garbage_collection(),
                torch.cuda.graph(
                    graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                outputs = function()
        except BaseException:
            # After an error torch stays on the capture's stream and allocates from its pool.
            torch.cuda.set_stream(before)
            with suppress(Exception):
                end_recording(device, pool)
            # And random numbers stay those of a graph until one is captured without an error.
            _memory_pool.cache_clear()
            with suppress(Exception):
                _memory_pool(device)
            raise
        finally:
            clear_cublas_workspaces()
    return outputs, graph.replay
