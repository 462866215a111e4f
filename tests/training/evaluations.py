"""Evaluations of one model, and the loop that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from ftbptt import TrainSegment, make_train_segment
from ftbptt.training import Chunk, Evaluation, evaluate_stream

from .streams import cross_entropy, tagger, zeros

Loss = Callable[[Any, Any], Tensor]


@cache
def made(loss: Loss = cross_entropy) -> tuple[TrainSegment, dict[str, Tensor]]:
    module = tagger()
    return make_train_segment(module, loss, backend="eager"), dict(module.named_parameters())


def evaluate(data: Any, loss: Loss = cross_entropy, **options: Any) -> Evaluation:
    segment, params = made(loss)
    return evaluate_stream(segment, params, zeros(3), data, **options)


def plain(data: Chunk) -> tuple[Tensor, Tensor, Any]:
    """[T, B, 4] scores, [T, B] losses and the last state, step by step."""
    module, state, outs = tagger(), zeros(3), []
    with torch.no_grad():
        for t in range(len(data.x)):
            if data.reset is not None:
                keep = ~data.reset[t].view(-1, 1)
                state = tuple(leaf * keep for leaf in state)
            out, after = module(data.x[t], state)
            if data.mask is not None:
                keep = data.mask[t].view(-1, 1)
                after = tuple(torch.where(keep, a, b) for a, b in zip(after, state, strict=True))
            state = after
            outs.append(out)
    out = torch.stack(outs)
    return out, cross_entropy(out, data.y), state


def flags(steps: int, rows: int | None, part: float, seed: int = 0) -> Tensor:
    shape = (steps,) if rows is None else (steps, rows)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < part


def accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(4, average="micro")
