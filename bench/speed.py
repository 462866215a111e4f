"""The main job's own segment, timed several ways side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftbptt import as_step, reference_segment

from .charmodel import CharLM
from .turns import in_turns

ROUNDS, LONGEST = 15, 8.0  # on a slow machine fewer rounds, about 8 seconds


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

    def wait() -> None:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)

    times = in_turns(
        {
            "compiled train_segment": lambda: train_segment(params, state, x, y),
            "eager loop with autograd": lambda: reference_segment(step, loss, params, state, x, y),
            "nn.LSTM on the chunk, autograd": whole_chunk,
        },
        ROUNDS, 1, wait=wait, longest=LONGEST,
    )  # fmt: skip
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    base = next(iter(medians.values()))
    return {name: f"{1e3 * s:8.2f} ms   {s / base:5.2f}x" for name, s in medians.items()}
