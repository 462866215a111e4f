"""``compare_speed``: how much faster a segment is than the eager loop."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.benchmark import timer  # waits for a GPU

from .._checks import check_positive
from .._trees import Tree, tree_leaves
from ..segment.train_segment import TrainSegment
from .compare import compare_to_reference
from .eager_loop import EagerLoop, check_defined

_LEAST_ROUNDS = 3  # however long they take
_MOST_CALLS = 50  # of the segment, for one run of the eager loop


@dataclass(frozen=True)
class SpeedComparison:
    """The times of a segment and of the eager loop, in turns; ``print`` shows them as a table.

    - ``segment``: the segment's ``repr``; ``backend``: what it runs on.
    - ``steps``: the number of time steps K; ``device``, ``threads``: where it ran.
    - ``seconds``, ``eager_seconds``: of a call, for each round. Of the segment it is the median of
      as many calls as take about as long as the loop.
    - ``first_seconds``: of the first call, which compiles; None if there was such a call before.

    >>> found = SpeedComparison(
    ...     "TrainSegment(GRUCell)", "fused", 64, "cpu", 2, [0.002, 0.002, 0.004], [0.02] * 3, 9.0
    ... )
    >>> found.ratio, found.pays_off_after
    (10.0, 500)
    >>> print(found)
    TrainSegment(GRUCell), 64 steps, backend fused, cpu, 2 threads: 10x the speed of the eager loop
                 median   fastest   slowest
    segment     2.00 ms   2.00 ms   4.00 ms
    eager loop  20.0 ms   20.0 ms   20.0 ms
    The first call took 9.0 s, which is made up for after 500 calls.
    """

    segment: str
    backend: str
    steps: int
    device: str
    threads: int
    seconds: list[float]
    eager_seconds: list[float]
    first_seconds: float | None

    @property
    def ratio(self) -> float:
        """How many times longer the eager loop takes: the median over the rounds."""
        pairs = zip(self.eager_seconds, self.seconds, strict=True)
        return statistics.median(eager / own for eager, own in pairs)

    @property
    def pays_off_after(self) -> int | None:
        """The number of calls after which the first one is made up for; None if it never is."""
        if self.first_seconds is None or self.ratio <= 1:
            return None
        saved = statistics.median(self.eager_seconds) - statistics.median(self.seconds)
        return math.ceil(self.first_seconds / saved) if saved > 0 else None

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        lines = [
            f"{self.segment}, {self.steps} steps, backend {self.backend}, {self.device}, "
            f"{threads}: {self.ratio:.3g}x the speed of the eager loop",
            f"{'':10}  {'median':>8}  {'fastest':>8}  {'slowest':>8}",
        ]
        for name, times in (("segment", self.seconds), ("eager loop", self.eager_seconds)):
            found = (statistics.median(times), min(times), max(times))
            lines.append(f"{name:10}  " + "  ".join(f"{_in_words(each):>8}" for each in found))
        if self.first_seconds is not None:
            after = self.pays_off_after
            lines.append(
                f"The first call took {self.first_seconds:.1f} s, which is "
                + ("never made up for." if after is None else f"made up for after {after} calls.")
            )
        return "\n".join(lines)


def compare_speed(
    train_segment: TrainSegment,
    params: Tree,
    state: Tree,
    x: Tree,
    y: Tree,
    *,
    reset: Tensor | None = None,
    mask: Tensor | None = None,
    seconds: float = 5.0,
) -> SpeedComparison:
    """compare_speed : train_segment, params, state, x[K, ...], y[K, ...] -> SpeedComparison

    Measures what compiling buys for your step, on your data and machine: calls of the segment and
    of the eager loop that defines it, with autograd, in turns for about ``seconds``. First it
    checks the result, as :func:`compare_to_reference` does. Other work on the machine makes the
    times longer, and the ratio wrong.

    Arguments are those of the segment; ``y`` may be None. Raises what :func:`compare_to_reference`
    raises, and RuntimeError, with its table, if the result differs.

    >>> import torch, ftbptt
    >>> cell = torch.nn.GRUCell(3, 5)
    >>> train_segment = ftbptt.make_train_segment(cell, lambda out, y: (out - y).square().mean())
    >>> params, x, y = dict(cell.named_parameters()), torch.randn(60, 2, 3), torch.randn(60, 2, 5)
    >>> speed = compare_speed(train_segment, params, None, x, y, seconds=0.1)
    >>> speed.steps, speed.backend, speed.ratio > 1
    (60, 'fused', True)
    """
    check_defined(train_segment)
    check_positive("seconds", seconds)

    def run() -> object:
        return train_segment(params, state, x, y, reset=reset, mask=mask)

    def run_eagerly() -> object:
        return loop.run(loop.recipe.step, params, start, x, y)

    traced_before, first_seconds = train_segment.trace_count, _seconds(run)
    is_first = train_segment.trace_count > traced_before
    loop, start = EagerLoop.of(train_segment, params, state, x, y, reset, mask)
    comparison = compare_to_reference(train_segment, params, state, x, y, reset=reset, mask=mask)
    if not comparison.agrees:
        raise RuntimeError(
            f"train_segment: its result is wrong, so its speed is not measured.\n{comparison}"
        )
    calls = max(1, min(_MOST_CALLS, int(_seconds(run_eagerly) / _seconds(run))))
    times: list[float] = []
    eager_times: list[float] = []
    ends = timer() + seconds
    while len(times) < _LEAST_ROUNDS or timer() < ends:
        times.append(statistics.median(_seconds(run) for _ in range(calls)))
        eager_times.append(_seconds(run_eagerly))
    backend = train_segment.explain(params, state, x, y, reset=reset, mask=mask).backend
    device = tree_leaves(x)[0].device.type
    return SpeedComparison(
        repr(train_segment), backend, loop.steps(x), device, torch.get_num_threads(),
        times, eager_times, first_seconds if is_first else None,
    )  # fmt: skip


def _seconds(run: Callable[[], object]) -> float:
    began = timer()
    run()
    return timer() - began


def _in_words(seconds: float) -> str:
    """In milliseconds, to three figures."""
    milliseconds = seconds * 1e3
    digits = max(0, 2 - math.floor(math.log10(milliseconds))) if milliseconds > 0 else 0
    return f"{milliseconds:.{digits}f} ms"
