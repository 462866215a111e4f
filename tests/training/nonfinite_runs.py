"""Runs whose losses are not finite, and what is said of them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ftbptt import make_train_segment
from ftbptt.training import Stream, train_stream

from .resuming import segment
from .streams import Tagger, mean_cross_entropy, stream, tagger, zeros

MODES = ["stop", "raise", "skip"]
STOPS = "The run stops before that update; the parameters are those before it."
MASKED = (
    "loss is finite, as with a NaN in the data that a mask, or torch.where in the loss, leaves "
    "out. Fill it with a number before anything is computed with it."
)
THEN = {"stop": STOPS, "raise": "", "skip": "It is left out."}


def params_of(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def copied(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}


def started(data: Any, module: nn.Module | None = None, **options: Any) -> Stream:
    module = module or tagger()
    loss = options.pop("loss", None)
    state = options.pop("state", zeros(data[0].shape[1]))
    params = params_of(module)
    optimizer = torch.optim.SGD(params.values(), lr=options.pop("lr", 0.5))
    if type(module) is Tagger and loss is None:
        train_segment = segment("tagger")  # traced once for all tests
    else:
        train_segment = make_train_segment(module, loss or mean_cross_entropy, backend="eager")
    options = {"k1": 4, "progress": False} | options
    return train_stream(train_segment, params, state, data, optimizer, **options)


def noted(updates: Stream) -> tuple[list[int], list[str]]:
    """Runs to the end: the positions of the updates that were made, and what was said."""
    said, made = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for update in updates:
                made.append(update.position)
                assert update.loss.isfinite()
        except FloatingPointError as error:
            said.append(str(error))
    said += [str(warning.message) for warning in caught]
    assert all(warning.category is RuntimeWarning for warning in caught)
    return made, said


def bad_stream(steps: int, rows: int, step: int, row: int) -> tuple[Tensor, Tensor]:
    x, y = stream(steps, rows)
    x[step, row, 1] = float("nan")
    return x, y
