"""Interleaved timings: calls take turns round by round, so that machine noise hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

Call = Callable[[], object]


def in_turns(calls: dict[str, Call], rounds: int, each: int) -> dict[str, list[float]]:
    """Seconds of one call, the median of ``each`` calls, for every round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            seconds = []
            for _ in range(each):
                began = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - began)
            if turn:  # the first is for warming up
                times[name].append(statistics.median(seconds))
    return times


def ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    """How many times longer ``a`` takes than ``b``: the median over the rounds."""
    return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))
