"""A warning where a state is carried through chunks in a random order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ftbptt import make_train_segment
from ftbptt.training import Chunk, evaluate_stream, train_stream

from .streams import mean_cross_entropy, stream, tagger, zeros

PIECES = [stream(4, seed=i) for i in range(3)]


def _loader(sampler: Sampler | None = None, data: list[Any] = PIECES, **options: Any) -> DataLoader:
    return DataLoader(data, batch_size=None, sampler=sampler, **options)


def _by_batches(sampler: Sampler) -> DataLoader:
    return DataLoader(
        PIECES, batch_sampler=BatchSampler(sampler, 1, False), collate_fn=lambda items: items[0]
    )


def _with_resets() -> list[Chunk]:
    return [Chunk(x, y, torch.arange(len(x)) == 0) for x, y in PIECES]


def _train(data: Any, *, fresh: bool = False, epochs: int = 1) -> int:
    model = tagger()
    segment = make_train_segment(model, mean_cross_entropy, backend="eager")
    params, state = dict(model.named_parameters()), zeros()
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    run = train_stream(
        segment, params, state, data, optimizer, k1=4, fresh=fresh, epochs=epochs, progress=False
    )
    return sum(1 for _ in run)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _loader(shuffle=True),
        lambda: _loader(SubsetRandomSampler(range(3))),
        lambda: _loader(WeightedRandomSampler([1.0, 2.0, 3.0], 3)),
        lambda: _loader(DistributedSampler(PIECES, num_replicas=1, rank=0)),
        lambda: _by_batches(SubsetRandomSampler(range(3))),
    ],
)
def test_warned_of_once(make: Callable[[], DataLoader]) -> None:
    with pytest.warns(RuntimeWarning, match="data: the chunks come in a random order") as told:
        assert _train(make(), epochs=2) == 6
    assert len(told) == 1
    assert "begin each with a reset, Chunk(x, y, reset)" in str(told[0].message)
    assert told[0].filename == __file__


def test_warned_of_in_an_evaluation() -> None:
    model = tagger()
    segment = make_train_segment(model, mean_cross_entropy, backend="eager")
    params, state = dict(model.named_parameters()), zeros()
    with pytest.warns(RuntimeWarning, match="random order, by a RandomSampler"):
        evaluate_stream(segment, params, state, _loader(shuffle=True))


@pytest.mark.parametrize(
    ("make", "fresh"),
    [
        (_loader, False),
        (lambda: _loader(DistributedSampler(PIECES, 1, 0, shuffle=False)), False),
        (lambda: _loader(data=_with_resets(), shuffle=True), False),
        (lambda: _loader(shuffle=True), True),
    ],
)
def test_in_order_or_anew(make: Callable[[], DataLoader], fresh: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _train(make(), fresh=fresh) == 3
