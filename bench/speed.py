"""The main job's own segment, timed several ways side by side."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftbptt import as_step, reference_segment

from .charmodel import CharLM

ROUNDS, LEAST_ROUNDS, LONGEST = 15, 3, 8.0  # on a slow machine fewer rounds, about 8 seconds


def compare_speed(
    model: CharLM,
    train_segment: Any,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
) -> dict[str, str]:
    """Median milliseconds of one segment by name, and the ratios to the compiled one."""
    step = as_step(model, sequence=True)
    params, state = dict(model.named_parameters()), model.zero_state(x.shape[1])

    def whole_chunk() -> None:
        torch.autograd.grad(loss(model(x, state)[0], y), list(model.parameters()))

    medians = interleaved(
        {
            "compiled train_segment": lambda: train_segment(params, state, x, y),
            "eager loop with autograd": lambda: reference_segment(step, loss, params, state, x, y),
            "nn.LSTM on the chunk, autograd": whole_chunk,
        },
        x.device,
    )
    base = next(iter(medians.values()))
    return {name: f"{1e3 * s:8.2f} ms   {s / base:5.2f}x" for name, s in medians.items()}


def interleaved(
    calls: dict[str, Callable[[], object]], device: torch.device, rounds: int = ROUNDS
) -> dict[str, float]:
    """Median seconds of each call; the calls take turns, garbage collection is off."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    ends = time.perf_counter() + LONGEST
    try:
        for turn in range(rounds):
            if turn >= LEAST_ROUNDS and time.perf_counter() > ends:
                break
            for name, call in calls.items():
                _wait(device)
                start = time.perf_counter()
                call()
                _wait(device)
                times[name].append(time.perf_counter() - start)
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
