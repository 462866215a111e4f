"""Interleaved timings: calls take turns round by round, so that machine noise hits all alike."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Call = Callable[[], object]

_LEAST_ROUNDS = 3  # however long they take


def in_turns(
    calls: Mapping[str, Call],
    rounds: int,
    each: int,
    *,
    before: Call = lambda: None,
    wait: Call = lambda: None,
    longest: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of one call, the median of ``each`` calls, for every round.

    ``before`` runs before each turn, and is not timed. ``wait`` returns when the device has done
    its work. After ``longest`` seconds no further round begins, on a slow machine.
    """

    def turn(call: Call) -> float:
        before()
        seconds = []
        for _ in range(each):
            wait()
            began = time.perf_counter()
            call()
            wait()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    for call in calls.values():  # for warming up
        turn(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    with gc_off():
        ends = time.perf_counter() + longest
        for done in range(rounds):
            if done >= _LEAST_ROUNDS and time.perf_counter() > ends:
                break
            for name, call in calls.items():
                times[name].append(turn(call))
    return times


@contextmanager
def gc_off() -> Iterator[None]:
    """No garbage is collected within, but all of it before."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    """How many times longer ``a`` takes than ``b``: the median over the rounds."""
    return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))
