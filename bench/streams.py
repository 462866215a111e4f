"""Benchmark of training on streams: the driver's overhead, its memory, and what it enables.

    python -m bench.streams                 everything, about five minutes; writes bench/results/
    python -m bench.streams --quick         smaller sizes; writes runs/bench/

The driver takes turns with bare calls of the segment and the optimizer. Memory is measured in
a fresh process for each length.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftbptt import make_train_segment
from ftbptt.training import Chunk, PackedSequences, Stream, train_stream

from . import frames
from .cases import Case, Problem, build, loss
from .parts import Part, run_parts
from .targets import row
from .turns import in_turns, ratio
from .worker import memory_of_process

CASE = Case("lstm", "lstm", 64, 32, 64, 128)
TINY = Case("tiny", "lstm", 4, 1, 3, 4)
MEMORY_TIMEOUT = 3600.0  # seconds for a run whose memory is measured


def long_data(problem: Problem, windows: int) -> tuple[Tensor, Tensor]:
    """The case's data, repeated, as one stream."""
    return problem.x.repeat(windows, 1, 1), problem.y.repeat(windows, 1, 1)


def streamed(problem: Problem, **options: Any) -> Stream:
    """An endless run on the case's data."""
    params = problem.params
    segment = make_train_segment(problem.model, loss)
    optimizer = torch.optim.SGD(params.values(), lr=1e-5)
    options = {"epochs": None, "progress": False} | options
    return train_stream(segment, params, problem.state, long_data(problem, 8), optimizer, **options)


def bare_calls(problem: Problem) -> Iterator[None]:
    """The loop one writes without the driver: slices, the segment, the optimizer."""
    params, k = problem.params, problem.case.steps
    segment = make_train_segment(problem.model, loss)
    optimizer = torch.optim.SGD(params.values(), lr=1e-5)
    (x, y), state = long_data(problem, 8), problem.state
    while True:
        state = problem.state
        for start in range(0, len(x), k):
            part = slice(start, start + k)
            grads, state, _, _ = segment(params, state, x[part], y[part])
            for name, p in params.items():
                p.grad = grads[name]
            optimizer.step()
            yield


def overhead(rounds: int) -> list[dict[str, Any]]:
    """The driver's overhead: in per cent at a usual size, in microseconds at a tiny one."""
    rows = []
    for case, each in ((CASE, 25), (TINY, 400)):
        driver = streamed(build(case), k1=case.steps)
        bare = bare_calls(build(case))
        calls = {"driver": lambda: next(driver), "bare": lambda: next(bare)}  # noqa: B023
        times = in_turns(calls, rounds, each)
        if case is CASE:
            extra = 100 * (ratio(times, "driver", "bare") - 1)
            rows.append(row("driver over bare calls, T=64 B=32 H=128", extra, "<=", 3, "%"))
        else:
            pairs = zip(times["driver"], times["bare"], strict=True)
            extra = 1e6 * statistics.median(a - b for a, b in pairs)
            rows.append(row("driver over bare calls, an update of nothing", extra, "<=", 20, " µs"))
    return rows


def overlapping(rounds: int) -> list[dict[str, Any]]:
    """TBPTT(16, 64): an update against one segment of 64 steps and its optimizer."""
    problem = build(CASE)
    overlap = streamed(problem, k1=16, k2=64)
    for _ in range(4):  # the first windows are shorter
        next(overlap)
    segment = streamed(build(CASE), k1=64)
    calls = {"overlap": lambda: next(overlap), "segment": lambda: next(segment)}
    times = in_turns(calls, rounds, 24)
    what = "an update of TBPTT(16, 64) over one of 64 steps"
    return [row(what, ratio(times, "overlap", "segment"), "<=", 1.1)]


class _Endless:
    """Chunks of 1000 random frames, generated on demand."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Chunk]:
        for start in range(0, self.steps, 1000):
            n = min(1000, self.steps - start)
            yield Chunk(torch.randn(n, 4, 3), torch.randn(n, 4, 3))


def _send_peak_memory(steps: int, pipe: Connection) -> None:
    """Runs in a fresh process: sends the peak resident bytes of a run over ``steps`` steps."""
    problem = build(Case("memory", "lstm", 100, 4, 3, 4))
    params = problem.params
    segment = make_train_segment(problem.model, loss)
    optimizer = torch.optim.SGD(params.values(), lr=1e-5)
    run = train_stream(
        segment, params, problem.state, _Endless(steps), optimizer, k1=100, k2=150,
        progress=False,
    )  # fmt: skip
    for _ in run:
        pass
    pipe.send(memory_of_process("VmHWM"))


def memory(short: int, long: int) -> list[dict[str, Any]]:
    """Peak memory of a long stream relative to that of a short one."""
    what = f"memory of a stream of {long:.0e} steps over one of {short:.0e}"
    short_peak, long_peak = peak_memory(short), peak_memory(long)
    return [row(what, long_peak / short_peak, "<=", 1.02)]


def peak_memory(steps: int) -> int:
    """Peak resident bytes of a fresh process that runs a stream of ``steps`` steps.

    Raises RuntimeError if the process ends without an answer, or takes too long.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak_memory, args=(steps, sender))
    process.start()
    sender.close()  # now held by the process alone, so that its end ends the wait
    what = f"streams: the process that measures memory over {steps:,} steps"
    try:
        if not receiver.poll(MEMORY_TIMEOUT):
            raise RuntimeError(f"{what} has not answered within {MEMORY_TIMEOUT:.0f} seconds.")
        peak: int = receiver.recv()
        process.join(MEMORY_TIMEOUT)  # it cleans up
    except EOFError as error:
        process.join()
        raise RuntimeError(
            f"{what} ended with exit code {process.exitcode}, unanswered."
        ) from error
    finally:
        process.kill()
        process.join()
        receiver.close()
    return peak


def packing() -> list[dict[str, Any]]:
    """The share of valid steps in packed rows; lengths are log-normal with a heavy tail."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(2000).log_normal_(4.0, 1.2, generator=generator).long().clamp(min=1)
    data = [(torch.zeros(n, 1), torch.zeros(n, 1)) for n in lengths.tolist()]
    share = 100 * PackedSequences(data, rows=32).utilisation
    return [row("valid steps of 2,000 packed sequences in 32 rows", share, ">=", 95, "%")]


def long_frames(count: int, between: int, hidden: int, rate: float) -> list[dict[str, Any]]:
    """Accuracy on a sequence of ``count`` frames with rare events, the state carried or not."""
    rows = []
    for fresh, sign, target in ((False, ">=", 95), (True, "<=", 65)):
        accuracy = 100 * frames.learn(count, between, hidden, k=50, fresh=fresh, rate=rate)
        what = f"frames labelled rightly after {count:.0e}, "
        what += "each chunk from zero" if fresh else "the state carried"
        rows.append(row(what, accuracy, sign, target, "%"))
    return rows


def parts(quick: bool, rounds: int, folder: Path) -> list[Part]:
    return [
        lambda: overhead(rounds),
        lambda: overlapping(rounds),
        lambda: memory(10**4, 10**5) if quick else memory(10**5, 10**7),
        packing,
        lambda: long_frames(10**5, 40, 16, 1e-2) if quick else long_frames(10**6, 100, 50, 3e-3),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return run_parts("streams", __doc__, 15, parts, arguments)


if __name__ == "__main__":
    sys.exit(main())
