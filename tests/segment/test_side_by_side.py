"""Segments in several threads, and with worker processes that load data."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader, Dataset

from ftbptt import make_train_segment
from ftbptt._compat.graph_modules import GraphModule
from ftbptt.training import train_stream

from ..cells.problems import mse, named
from ..oracle import assert_close

STEPS, ROWS = 6, 3


def problems() -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """Cells of several kinds and sizes, with their arguments."""
    made: list[tuple[nn.Module, tuple[Any, ...]]] = []
    for hidden, kind in zip(
        (3, 4, 5, 6), (nn.GRUCell, nn.RNNCell, nn.GRUCell, nn.LSTMCell), strict=True
    ):
        torch.manual_seed(hidden)
        cell = kind(2, hidden).double()
        x, y = torch.randn(STEPS, ROWS, 2).double(), torch.randn(STEPS, ROWS, hidden).double()
        made.append((cell, (named(cell), None, x, y)))
    return made


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Runs each call in its own thread, all starting together."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(b, marks=pytest.mark.slow) for b in ("auto", "cudagraph"))]
)
def test_one_segment_per_thread(backend: str) -> None:
    """Each thread traces, compiles and runs another segment."""
    made = problems()
    expected = [make_train_segment(c, mse, backend="eager")(*arguments) for c, arguments in made]
    segments = [make_train_segment(cell, mse, backend=backend) for cell, _ in made]
    for _ in range(3):
        results = at_once([
            lambda s=segment, arguments=arguments: s(*arguments)
            for segment, (_, arguments) in zip(segments, made, strict=True)
        ])  # fmt: skip
        for result, like in zip(results, expected, strict=True):
            assert_close(result, like)


@pytest.fixture
def threads_in_turns() -> Iterator[None]:
    """Within it, threads take turns at every few lines."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_in_turns")
def test_one_graph_whose_python_several_threads_want() -> None:
    """It is written by one of them; torch changes how nodes print while it writes."""
    traced = make_fx(lambda x: [(x * i + 1).tanh() for i in range(20)])(torch.ones(2))
    for _ in range(10):
        graph = GraphModule(traced, copy.deepcopy(traced.graph))
        results = at_once([lambda own=graph: own(torch.ones(2))] * 4)
        assert_close(results, [[(torch.ones(2) * i + 1).tanh() for i in range(20)]] * 4)


@pytest.mark.usefixtures("threads_in_turns")
def test_one_segment_for_all_threads() -> None:
    """All threads make the first call of its kind at once."""
    cell, arguments = problems()[0]
    expected = make_train_segment(cell, mse, backend="eager")(*arguments)
    for _ in range(5):
        segment = make_train_segment(cell, mse, backend="eager")
        for result in at_once([lambda s=segment: s(*arguments)] * 4):
            assert_close(result, expected)


class Scaled(nn.Module):
    """With a buffer, and a parameter of two names: in their places are others during a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 3)
        self.bias = self.cell.bias_hh
        self.scale: Tensor
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x_t, h) * self.scale
        return h, h


@pytest.mark.usefixtures("threads_in_turns")
def test_calls_while_another_thread_traces() -> None:
    """They took the buffers that the trace had put into the module, and both failed.

    And took its parameters for changed, after which they were traced again.
    """
    torch.manual_seed(0)
    module = Scaled()
    segment, params = make_train_segment(module, mse, backend="eager"), named(module)

    def call(rows: int) -> Any:
        x, y, h = (torch.ones(STEPS, rows, 2), torch.zeros(STEPS, rows, 3), torch.zeros(rows, 3))
        return segment(params, h, x, y)

    expected, done = call(ROWS), threading.Event()

    def trace_others() -> None:
        try:
            for rows in range(ROWS + 1, ROWS + 4):
                call(rows)
        finally:
            done.set()

    def call_again() -> list[Any]:
        results = []
        while not done.is_set():
            results.append(call(ROWS))
        return results

    _, results = at_once([trace_others, call_again])
    for result in results:
        assert_close(result, expected)
    assert segment.trace_count == 4


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """A stream in pieces, in order."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(7, ROWS, 2, generator=generator)
        return x.double(), torch.zeros(7, ROWS, 3).double()


@pytest.mark.parametrize("start", [None, "fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader(start: str | None) -> None:
    def trained(loader: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        cell = nn.GRUCell(2, 3).double()
        params = named(cell)
        segment = make_train_segment(cell, mse, backend="eager")
        optimizer = torch.optim.SGD(params.values(), lr=0.1)
        for _ in train_stream(
            segment, params, None, loader, optimizer, k1=4, epochs=2, progress=False
        ):
            pass
        return params

    workers: dict[str, Any] = {}
    if start is not None:
        workers = {"num_workers": 2, "multiprocessing_context": start}
    params = trained(DataLoader(Pieces(), batch_size=None, **workers))
    assert_close(params, trained([Pieces()[i] for i in range(len(Pieces()))]))
