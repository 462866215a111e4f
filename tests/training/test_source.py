"""Where windows come from: whole tensors, arrays on disk, chunks of any lengths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ftbptt.training import Chunk, ContiguousStreams, Source
from ftbptt.training.data.chunk_stream import ChunkStream
from ftbptt.training.data.source import Arrays

from .sources import Frame, Table, assert_same, cut, everything, losses_of, of, train, windows
from .streams import stream

# -- whole streams ------------------------------------------------------------------------------


def test_arrays_are_cut_and_the_last_window_is_shorter() -> None:
    x, y = stream(11)
    source = of((x, y))
    assert isinstance(source, Arrays)
    assert source.total == 11
    found = windows(source, 4)
    assert [len(chunk.x) for chunk in found] == [4, 4, 3]
    assert torch.equal(torch.cat([chunk.x for chunk in found]), x)
    assert torch.equal(torch.cat([chunk.y for chunk in found]), y)
    assert source.read(11, 15) is None


def test_tensors_are_not_copied() -> None:
    x, y = stream(9)
    chunk = of((x, y)).read(2, 5)
    assert chunk is not None
    assert chunk.x.data_ptr() == x[2:].data_ptr()


def test_time_behind_the_rows() -> None:
    """[B, T, ...]; a reset or mask of one axis is for time."""
    whole = everything(10)
    turned = tree_map(lambda leaf: leaf.transpose(0, 1) if leaf.dim() > 1 else leaf, whole)
    found = windows(of(turned, time_dim=1), 3)
    back = [
        Chunk(*tree_map(lambda leaf: leaf.transpose(0, 1) if leaf.dim() > 1 else leaf, chunk))
        for chunk in found
    ]
    assert_same(back, windows(of(whole), 3))
    chunks = cut(turned, [1, 4, 0, 2], axis=1)
    assert_same(windows(of(chunks, time_dim=1), 3, 5), windows(of(turned, time_dim=1), 3, 5))


def test_arrays_of_numpy() -> None:
    x, y = stream(11)
    found = windows(of(({"a": x.numpy()}, y.numpy())), 4)
    assert_same(found, windows(of(({"a": x}, y)), 4))


@pytest.mark.parametrize("kind", [Table, Frame])
def test_tables(kind: type[Table]) -> None:
    x, y = torch.arange(33).reshape(11, 3), torch.arange(11)
    found = windows(of(({"a": kind(x)}, kind(y))), 4)
    assert_same(found, windows(of(({"a": x}, y)), 4))
    assert_same(windows(of([(kind(x), kind(y))]), 4), windows(of((x, y)), 4))


def test_a_table_with_time_in_its_columns() -> None:
    x = torch.arange(33).reshape(3, 11)
    assert_same(windows(of((Table(x), None), time_dim=1), 4), windows(of((x, None), 1), 4))


def test_masked_arrays_without_masked_values() -> None:
    x, y = stream(11)
    masked = numpy.ma.masked_array(x.numpy())
    assert_same(windows(of((masked, y)), 4), windows(of((x, y)), 4))
    masked = numpy.ma.masked_array(x.numpy(), numpy.zeros(x.shape, bool))
    assert_same(windows(of((masked, y)), 4), windows(of((x, y)), 4))


def test_an_array_on_disk_of_which_slices_are_masked() -> None:
    """As variables of netCDF4."""

    class Variable:
        shape, ndim = (11, 2), 2

        def __getitem__(self, place: Any) -> Any:
            return numpy.ma.masked_equal(numpy.arange(22).reshape(11, 2), 17)[place]

    source = of((Variable(), None))
    assert source.read(0, 4) is not None
    with pytest.raises(ValueError, match="data: is a masked array, with 1 values masked, but"):
        source.read(4, 11)


def test_an_array_in_the_other_byte_order() -> None:
    x, y = stream(11)
    swapped = x.numpy().astype(x.numpy().dtype.newbyteorder())
    assert_same(windows(of((swapped, y)), 4), windows(of((x, y)), 4))


def test_an_array_of_objects() -> None:
    objects = numpy.array([[None] * 3] * 11)
    with pytest.raises(TypeError, match="data: has an array of object, of which torch makes no"):
        windows(of((objects, stream(11)[1])), 4)


def test_an_array_on_disk(tmp_path: Path) -> None:
    """Only what a window needs is read, and nothing of the file is ever written."""
    tokens = numpy.arange(2 * 23, dtype=numpy.uint16).reshape(23, 2)
    tokens.tofile(tmp_path / "tokens")
    on_disk = numpy.memmap(tmp_path / "tokens", numpy.uint16, "r", shape=(23, 2))

    class Watched:
        """An array that notes what was asked of it."""

        shape, ndim, read = on_disk.shape, 2, []

        def __getitem__(self, place: tuple[slice, ...]) -> Any:
            self.read.append(len(on_disk[place]))
            return on_disk[place]

    x = Watched()
    found = windows(of((x, on_disk)), 5)
    assert x.read == [5, 5, 5, 5, 3]
    assert found[0].x.dtype == torch.uint16
    assert torch.equal(torch.cat([chunk.x for chunk in found]), torch.from_numpy(tokens))
    found[0].x.zero_()
    assert on_disk[1, 1] == 3


def test_training_from_disk_is_training_from_memory(tmp_path: Path) -> None:
    """Tokens uint16 on disk, made into what the model wants window by window."""
    tokens = torch.randint(3, (38,))
    tokens.numpy().astype(numpy.uint16).tofile(tmp_path / "tokens")
    on_disk = numpy.memmap(tmp_path / "tokens", numpy.uint16, "r")

    def vectors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.one_hot(x.long(), 3).double(), y.long()

    found = losses_of(ContiguousStreams(on_disk, 3), prepare=vectors)
    x, y = vectors(tokens[:36].view(3, 12).t(), tokens[1:37].view(3, 12).t())
    assert found == losses_of((x, y))
    assert len(found) == 3


# -- chunks -------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 9), max_size=8),
    k1=st.integers(1, 7),
    overlap=st.integers(0, 9),
    steps=st.integers(1, 24),
)
def test_chunks_of_any_lengths_are_the_whole(
    lengths: list[int], k1: int, overlap: int, steps: int
) -> None:
    whole = everything(steps)
    chunks = of(iter(cut(whole, lengths)))
    assert_same(windows(chunks, k1, k1 + overlap), windows(of(whole), k1, k1 + overlap))


def test_chunks_with_gaps_between_windows() -> None:
    whole = everything(23)
    chunks, arrays = of(cut(whole, [3, 8, 1, 2])), of(whole)
    chunks.begin(0)
    for start, stop in ((2, 4), (7, 9), (9, 9), (12, 19), (22, 30)):
        assert_same([chunks.read(start, stop)], [arrays.read(start, stop)])
    assert chunks.read(23, 30) is None


def test_no_more_chunks_are_held_than_a_window_needs() -> None:
    source = of(cut(everything(60), [5] * 11))
    assert isinstance(source, ChunkStream)
    source.begin(0)
    for start in range(0, 60, 4):
        source.read(max(0, start - 3), start + 4)
        assert len(source._held) <= 3
        assert source.pulled == -(-(start + 4) // 5)


def test_what_a_chunk_may_be() -> None:
    x, y = stream(9)
    reset, mask = torch.zeros(9, 2, dtype=torch.bool), torch.ones(9, 2, dtype=torch.bool)
    reset[4] = True
    mask[6] = False
    expected = windows(of((x, y, reset, mask)), 4)
    mixed = [
        (x[:2], y[:2]),
        [x[2:4], y[2:4]],
        (x[4:5], y[4:5], reset[4:5], None),
        Chunk(x[5:8], y[5:8], None, mask[5:8]),
        Chunk(x[8:].numpy(), y[8:].numpy(), reset[8:].numpy(), mask[8:].numpy()),
    ]
    found = windows(of(mixed), 4)
    assert [chunk.reset is None for chunk in found] == [True, False, False]
    assert [chunk.mask is None for chunk in found] == [True, False, False]
    filled = [
        chunk._replace(
            reset=torch.zeros(len(chunk.x), 2, dtype=torch.bool)
            if chunk.reset is None
            else chunk.reset,
            mask=torch.ones(len(chunk.x), 2, dtype=torch.bool)
            if chunk.mask is None
            else chunk.mask,
        )
        for chunk in found
    ]
    assert_same(filled, expected)


def test_chunks_without_a_target() -> None:
    x, _ = stream(7)
    found = windows(of([(x[:3], None), (x[3:], None)]), 2)
    assert all(chunk.y is None for chunk in found)
    assert torch.equal(torch.cat([chunk.x for chunk in found]), x)


def test_a_data_loader_of_steps() -> None:
    """One that was made for samples: in order, its batches are consecutive steps."""
    x, y = stream(23)
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    assert_same(windows(of(loader), 5, 8), windows(of((x, y)), 5, 8))


def test_a_data_loader_of_chunks() -> None:
    whole = stream(23)

    class Recordings(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(chunk[:2] for chunk in cut(Chunk(*whole), [4, 9, 1]))

    source = of(DataLoader(Recordings(), batch_size=None))
    for epoch in range(2):
        assert_same(windows(source, 5, epoch=epoch), windows(of(whole), 5))


def test_a_generator_is_read_once() -> None:
    source = of(chunk for chunk in cut(everything(10), [4, 4]))
    assert len(windows(source, 3)) == 4
    with pytest.raises(ValueError, match="data: an iterator can be read only once, but another ep"):
        source.begin(1)


def test_training_for_two_epochs_on_a_generator() -> None:
    x, y = stream(8, rows=3)
    updates = train(((x[i : i + 4], y[i : i + 4]) for i in (0, 4)), epochs=2)
    assert [next(updates).epoch, next(updates).epoch] == [0, 0]
    with pytest.raises(
        ValueError, match="makes a new one each time: a list, a DataLoader, or a class"
    ):
        next(updates)


@pytest.mark.parametrize("k2", [4, 7])
def test_training_carries_the_state_over_chunks(k2: int) -> None:
    whole = everything(23)
    whole = whole._replace(x=whole.x["a"])
    expected = losses_of(whole, k2=k2)
    assert losses_of(cut(whole, [1, 9, 0, 3, 3]), k2=k2) == expected
    assert losses_of(iter(cut(whole, [22])), k2=k2) == expected
    assert len(expected) == 6


def test_prepare_may_return_arrays() -> None:
    """As its error messages say."""
    x, y = stream(10, rows=3)
    found = losses_of((x, y), prepare=lambda x, y: (x.numpy() / 2, y))
    assert found == losses_of((x / 2, y))


def test_prepare_is_given_each_window() -> None:
    x, y = stream(10, rows=3)
    shapes = []

    def halve(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        shapes.append(len(x))
        return x / 2, y

    assert losses_of((x, y), prepare=halve) == losses_of((x / 2, y))
    assert shapes == [4, 4, 2]


def test_a_source_of_ones_own() -> None:
    """Whatever has ``total``, ``begin`` and ``read``."""

    class Endless:
        total = None

        def begin(self, epoch: int) -> None:
            self.generator = torch.Generator().manual_seed(epoch)

        def read(self, start: int, stop: int) -> Chunk:
            x = torch.randn(stop - start, 3, 3, generator=self.generator).double()
            return Chunk(x, torch.zeros(stop - start, 3, dtype=torch.int64))

    assert isinstance(Endless(), Source)
    assert len(losses_of(Endless(), updates=5, epochs=None)) == 5


def test_a_source_that_leaves_steps_out() -> None:
    """They would be skipped without a word."""

    class Short:
        total = 12

        def begin(self, epoch: int) -> None:
            pass

        def read(self, start: int, stop: int) -> Chunk | None:
            steps = min(stop, start + 3, self.total) - start
            if not steps:
                return None
            return Chunk(torch.ones(steps, 3, 3).double(), torch.zeros(steps, 3, dtype=torch.int64))

    assert len(losses_of(Short(), k1=3)) == 4
    with pytest.raises(ValueError, match=re.escape("data: read(0, 4) returned 3 steps, but total")):
        losses_of(Short(), k1=4)


def test_a_loader_that_writes_over_what_it_gave() -> None:
    """Where a window needs both chunks; not if each is done with, or lies beside the other."""
    x, y = stream(12, 3)

    def reusing(x: Tensor, y: Tensor) -> Iterator[Any]:
        buffers = torch.empty_like(x[:3]), torch.empty_like(y[:3])
        for start in range(0, 12, 3):
            for buffer, whole in zip(buffers, (x, y), strict=True):
                buffer.copy_(whole[start : start + 3])
            yield buffers

    def filling(x: Tensor, y: Tensor) -> Iterator[Any]:
        buffer = torch.empty_like(x)
        for start in range(0, 12, 3):
            buffer[start : start + 3] = x[start : start + 3]
            yield buffer[start : start + 3], y[start : start + 3]

    expected = losses_of((x, y), k1=3)
    assert losses_of(reusing(x, y), k1=3) == expected
    assert losses_of(filling(x, y), k1=6) == losses_of((x, y), k1=6)
    with pytest.raises(ValueError, match=r"data, chunk 2: is in the memory of a chunk before it"):
        losses_of(reusing(x, y), k1=6)
