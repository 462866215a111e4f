"""A run whose reports are looked at."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ftbptt import TrainSegment, make_train_segment
from ftbptt.training import (
    Stream,
    train_stream,
)

from .streams import Tagger, cross_entropy, stream, tagger, zeros


@cache
def made() -> tuple[Tagger, TrainSegment]:
    module = tagger()
    return module, make_train_segment(module, cross_entropy, backend="eager")


def train(data: Any = None, optimizer: Any = None, **options: Any) -> Stream:
    module, segment = made()
    module.load_state_dict(tagger().state_dict())
    params = dict(module.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.5) if optimizer is None else optimizer
    options = {"k1": 4, "progress": False} | options
    return train_stream(segment, params, zeros(), data or stream(22), optimizer, **options)
