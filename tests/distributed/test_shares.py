"""Shares of the data, one for each rank."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch.distributed import DeviceMesh

from ftbptt.training import ContiguousStreams, PackedSequences, train_stream

from ..training.streams import stream, tagger
from .rank_runs import ROWS, new_run, segment_of, sequences
from .ranks import Ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_sequence_is_in_one_share(size: int) -> None:
    packed = PackedSequences(sequences(), rows=ROWS)
    shares = [packed.share(rank, size) for rank in range(size)]
    assert sum(share.rows for share in shares) == ROWS
    for epoch in (0, 1):
        packed.begin(epoch)
        for share in shares:
            share.begin(epoch)
        dealt = [order for share in shares for order in share._order]
        assert dealt == packed._order
    steps = [sum(packed._lengths[i] for own in share._order for i in own) for share in shares]
    per_row = [n / share.rows for n, share in zip(steps, shares, strict=True)]
    assert max(per_row) < 1.2 * min(per_row)


def test_too_few_rows() -> None:
    with pytest.raises(ValueError, match="mesh: 6 ranks share the rows of the data, but there are"):
        PackedSequences(sequences(), rows=ROWS).share(0, 6)
    with pytest.raises(ValueError, match="mesh: 6 ranks share the rows"):
        ContiguousStreams(torch.arange(100), rows=ROWS).share(0, 6)


def _shared_out(mesh: DeviceMesh, options: dict[str, Any]) -> str:
    try:
        next(new_run(mesh, **options))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"state": (numpy.zeros((ROWS, 5)),) * 2},
            "TypeError: state[0]: expected a tensor, found ndarray. None is the state that ",
        ),
        (
            {"state": (torch.zeros(ROWS, 5).double(), torch.zeros(()))},
            "ValueError: mesh: state[1] has shape [], without the axis of rows, which the ranks "
            "share. Give each row its own.",
        ),
        (  # features were taken for rows
            {"data": (stream(8, 1)[0][:, 0], None), "state": (torch.zeros(5).double(),) * 2},
            "ValueError: mesh: x of shape [4, 3], y and the state have no rows in common, which ",
        ),
        (
            {"state": (torch.zeros(ROWS + 1, 5).double(),) * 2},
            "ValueError: mesh: x of shape [4, 5, 3], y and the state have no rows in common, wh",
        ),
    ],
)
def test_what_has_no_rows_to_share(options: dict[str, Any], words: str, two: Ranks) -> None:
    for said in two.call(_shared_out, options):
        assert said.startswith(words)


def _under_vmap(mesh: DeviceMesh) -> None:
    module = tagger()
    segment = torch.func.vmap(segment_of(type(module)), in_dims=(0, None, None, None))
    params = {name: p.detach().expand(2, *p.shape) for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    expected = "mesh: train_segment is under vmap, so that it .*An ensemble needs no mesh: each"
    with pytest.raises(ValueError, match=expected):
        train_stream(segment, params, None, stream(8), optimizer, k1=4, time_dim=0, mesh=mesh)


def test_models_are_not_shared_out_as_rows(two: Ranks) -> None:
    two.call(_under_vmap)
