"""Shares of the data, one for each rank."""

from __future__ import annotations

import pytest
import torch

from ftbptt.training import ContiguousStreams, PackedSequences

from .rank_runs import ROWS, sequences


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
