"""One long stream in rows."""

from __future__ import annotations

from mmap import ACCESS_READ, mmap
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from ftbptt.training import ContiguousStreams, Source

from .sources import Table, windows


@given(count=st.integers(2, 60), rows=st.integers(1, 7), k=st.integers(1, 9))
def test_contiguous_streams(count: int, rows: int, k: int) -> None:
    """Each token is read once as x, y is one ahead; what is left is fewer tokens than rows."""
    if count <= rows:
        return
    tokens = torch.arange(count)
    streams = ContiguousStreams(tokens, rows)
    assert isinstance(streams, Source)
    found = windows(streams, k)
    x, y = torch.cat([c.x for c in found]), torch.cat([c.y for c in found])
    assert x.shape == y.shape == (streams.total, rows)
    assert torch.equal(x.t().flatten(), tokens[: x.numel()])
    assert torch.equal(y, x + 1)
    assert streams.left_out == count - 1 - x.numel() < rows
    turned = windows(ContiguousStreams(tokens.numpy(), rows, time_dim=1), k)
    assert torch.equal(torch.cat([c.x for c in turned], 1), x.t())
    assert torch.equal(torch.cat([c.y for c in turned], 1), y.t())


def test_contiguous_streams_of_vectors() -> None:
    tokens = torch.randn(12, 3)
    (chunk,) = windows(ContiguousStreams(tokens, 2), 10)
    assert chunk.x.shape == (5, 2, 3)
    assert torch.equal(chunk.y[:, 1], tokens[6:11])


def test_bytes_are_numbers(tmp_path: Path) -> None:
    """Of a file, read or mapped; NumPy would make one string of them."""
    (tmp_path / "text").write_bytes(b"hello, text")
    with (
        (tmp_path / "text").open("rb") as file,
        mmap(file.fileno(), 0, access=ACCESS_READ) as mapped,
    ):
        for tokens in (text := file.read(), bytearray(text), mapped):
            (chunk,) = windows(ContiguousStreams(tokens, 2), 10)
            assert chunk.x.dtype == torch.uint8
            assert bytes(chunk.y[:, 0].tolist()) == b"ello,"


def test_contiguous_streams_of_a_table() -> None:
    tokens = torch.arange(12)
    (chunk,) = windows(ContiguousStreams(Table(tokens), 2), 10)
    (expected,) = windows(ContiguousStreams(tokens, 2), 10)
    assert torch.equal(chunk.x, expected.x)
