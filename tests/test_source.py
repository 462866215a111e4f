"""Where windows come from: whole tensors, arrays on disk, chunks of any lengths, long streams."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ftbptt import TrainSegment, make_train_segment
from ftbptt.training import (
    Chunk,
    ContiguousStreams,
    PackedSequences,
    Source,
    Stream,
    Truncation,
    evaluate_stream,
    train_stream,
)
from ftbptt.training.source import Arrays, Chunks, TimeAxes, as_source

from .streams import cross_entropy, stream, tagger, zeros


def of(data: Any, time_dim: int = 0) -> Source:
    return as_source(data, lambda x: TimeAxes(time_dim, time_dim))


def windows(source: Source, k1: int, k2: int | None = None, epoch: int = 0) -> list[Chunk]:
    """What an epoch reads, windows overlapping by ``k2 - k1``."""
    source.begin(epoch)
    truncation, found, at = Truncation(k1, k2 or k1), [], 0
    while (
        chunk := source.read(truncation.window(at).start, truncation.window(at).end)
    ) is not None:
        found.append(chunk)
        at += 1
        if at > 1000:
            raise AssertionError("a source without an end")
    return found


def assert_same(found: list[Chunk], expected: list[Chunk]) -> None:
    assert len(found) == len(expected) > 0
    for own, other in zip(found, expected, strict=True):
        for name, a, b in zip(own._fields, own, other, strict=True):
            assert (a is None) == (b is None), name
            for leaf, like in zip(tree_leaves(a), tree_leaves(b), strict=True):
                if like is not None:
                    assert torch.equal(leaf, like), name


def cut(chunk: Chunk, lengths: list[int], axis: int = 0) -> list[Chunk]:
    """A whole stream in chunks of these lengths, and what is left."""
    total = tree_leaves(chunk.x)[0].shape[axis]
    ends = [min(sum(lengths[: i + 1]), total) for i in range(len(lengths))]
    axes = TimeAxes(axis, axis)
    return [axes.cut(chunk, a, b) for a, b in zip([0, *ends], [*ends, total], strict=True)]


def everything(steps: int, rows: int = 3) -> Chunk:
    """x and y with leaves, a reset for each row and a mask for all of them."""
    x, y = stream(steps, rows)
    generator = torch.Generator().manual_seed(steps)
    reset = torch.rand(steps, rows, generator=generator) < 0.3
    mask = torch.rand(steps, generator=generator) < 0.7
    return Chunk({"a": x, "b": (y, x[..., 0])}, y, reset, mask)


@cache
def made() -> tuple[nn.Module, TrainSegment]:
    module = tagger()
    return module, make_train_segment(module, cross_entropy, backend="eager")


def train(data: Any, **options: Any) -> Stream:
    module, segment = made()
    module.load_state_dict(tagger().state_dict())
    params = dict(module.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    return train_stream(
        segment, params, zeros(3), data, optimizer, **({"k1": 4, "progress": False} | options)
    )


def losses_of(data: Any, **options: Any) -> list[float]:
    return [update.loss.item() for update in train(data, **options)]


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
    assert isinstance(source, Chunks)
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
        (x[4:5], y[4:5], reset[4:5]),
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
    with pytest.raises(ValueError, match="data: an iterator can be read once only, and another ep"):
        source.begin(1)


def test_training_for_two_epochs_on_a_generator() -> None:
    x, y = stream(8, rows=3)
    updates = train(((x[i : i + 4], y[i : i + 4]) for i in (0, 4)), epochs=2)
    assert [next(updates).epoch, next(updates).epoch] == [0, 0]
    with pytest.raises(ValueError, match="Give what makes it anew each time: a list, a DataLoader"):
        next(updates)


@pytest.mark.parametrize("k2", [4, 7])
def test_training_carries_the_state_over_chunks(k2: int) -> None:
    whole = everything(23)
    whole = whole._replace(x=whole.x["a"])
    expected = losses_of(whole, k2=k2)
    assert losses_of(cut(whole, [1, 9, 0, 3, 3]), k2=k2) == expected
    assert losses_of(iter(cut(whole, [22])), k2=k2) == expected
    assert len(expected) == 6


def test_prepare_is_given_each_window() -> None:
    x, y = stream(10, rows=3)
    shapes = []

    def halve(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        shapes.append(len(x))
        return x / 2, y

    assert losses_of((x, y), prepare=halve) == losses_of((x / 2, y))
    assert shapes == [4, 4, 2]


# -- one long stream in rows --------------------------------------------------------------------


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


# -- bad input ----------------------------------------------------------------------------------

X, Y = stream(10)
FLAGS = torch.zeros(10, dtype=torch.bool)
TUPLES = "expected (x, y), (x, y, reset) or (x, y, reset, mask), found "


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (
            X,
            TypeError,
            "data: expected a tuple (x, y), an iterable of such tuples, or a source, fo",
        ),
        ({"x": X}, TypeError, "found dict. For data without a target: (x, None)."),
        (None, TypeError, "or a source, found NoneType."),
        ("corpus.txt", TypeError, "or a source, found str."),
        ((X,), TypeError, f"data: {TUPLES}a tuple of 1. For data without a target: (x, None)."),
        ((X, Y, None, None, None), TypeError, f"data: {TUPLES}a tuple of 5."),
        ((None, Y), TypeError, "data: x: expected a tensor or an array, found NoneType."),
        (((), Y), TypeError, "data: x: expected at least one tensor or array, found none."),
        (([1, 2], Y), TypeError, "data: x[0]: expected a tensor or an array, found int."),
        ((X, {"a": None}), TypeError, "data: y['a']: expected a tensor or an array, found NoneTyp"),
        ((X, Y, [False] * 10), TypeError, "data: reset: expected a tensor or an array, found list"),
        ((X, Y, None, True), TypeError, "data: mask: expected a tensor or an array, found bool."),
        (
            (X, Y[:7]),
            ValueError,
            "data: y: has 7 steps on axis 0, but x has 10. All parts of the data must have the "
            "same length; nothing is cut silently.",
        ),
        (
            ({"a": X, "b": (X, X[:9])}, Y),
            ValueError,
            "data: x['b'][1]: has 9 steps on axis 0, but x['a'] has 10.",
        ),
        ((X, Y, FLAGS[:4]), ValueError, "data: reset: has 4 steps on axis 0, but x has 10."),
        ((X, Y, None, FLAGS[1:]), ValueError, "data: mask: has 9 steps on axis 0, but x has 10."),
        ((X, Y[0, 0]), ValueError, "data: y: expected time on axis 0, found shape []."),
    ],
)
def test_bad_data(data: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        of(data)


@pytest.mark.parametrize(
    ("chunks", "kind", "words"),
    [
        ([X, Y], TypeError, f"data, chunk 1: {TUPLES}a Tensor. For data without a target: (x, Non"),
        ([X, Y], TypeError, "What is not a tuple is read as chunks, each of them such a tuple."),
        (X.numpy(), TypeError, f"data, chunk 1: {TUPLES}a ndarray."),
        ([(X, Y), {"x": X}], TypeError, f"data, chunk 2: {TUPLES}a dict."),
        ([(X, Y), (X,)], TypeError, f"data, chunk 2: {TUPLES}a tuple of 1."),
        ([(X, Y), (X, Y[:3])], ValueError, "data, chunk 2: y: has 3 steps on axis 0, but x has 10"),
        (
            [(X, [1] * 10)],
            TypeError,
            "data, chunk 1: y[0]: expected a tensor or an array, found in",
        ),
        (
            [(X, Y), (X[:, :1], Y[:, :1])],
            ValueError,
            "data: chunks 1 to 2 do not fit together (Sizes of tensors must match",
        ),
        (
            [(X, None), (X, Y)],
            ValueError,
            "data: chunks 1 to 2 do not fit together (some have y, others have none).",
        ),
        ([(X, Y), (X, None)], ValueError, "(some have y, others have none). All must have the sam"),
        (
            [({"a": X}, Y), ({"b": X}, Y)],
            ValueError,
            "All must have the same structure, rows and features; only their number of steps may d",
        ),
    ],
)
def test_bad_chunks(chunks: Any, kind: type[Exception], words: str) -> None:
    source = of(chunks)
    with pytest.raises(kind, match=re.escape(words)):
        windows(source, 12)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (
            lambda: ContiguousStreams(torch.arange(3), 3),
            ValueError,
            "tokens: 3 are too few for 3 rows of a step and its target. Give more tokens or fewer",
        ),
        (lambda: ContiguousStreams(X, 0), ValueError, "rows: expected at least 1, found 0."),
        (
            lambda: ContiguousStreams(X, 2.0),
            TypeError,
            "rows: expected a number of rows, found 2.0",
        ),
        (
            lambda: ContiguousStreams(X, 2, time_dim=2),
            ValueError,
            "time_dim: expected 0 or 1, found 2.",
        ),
    ],
)
def test_bad_streams(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        make()


@pytest.mark.parametrize(
    ("prepare", "kind", "words"),
    [
        (lambda x, y: x, TypeError, "prepare: expected it to return (x, y), found Tensor."),
        (lambda x, y: (x, y[1:]), ValueError, "prepare: y: has 3 steps on axis 0, but x has 4."),
        (
            lambda x, y: (x[:-1], y[1:]),
            ValueError,
            "prepare: it was given 4 steps and returned 3.",
        ),
        (
            lambda x, y: ([1], y),
            TypeError,
            "prepare: x[0]: expected a tensor or an array, found in",
        ),
    ],
)
def test_bad_prepare(prepare: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        losses_of(stream(10, rows=3), prepare=prepare)


def test_prepare_may_not_move_time() -> None:
    """Tokens [B, T] are time first to a layer that has no features yet, vectors are not."""
    layer = nn.GRU(4, 5, batch_first=True)
    segment = make_train_segment(layer, lambda out, y: out.mean(), backend="eager")
    params = dict(layer.named_parameters())
    tokens = torch.randint(4, (3, 20))

    def vectors(x: Tensor, y: None) -> Any:
        return nn.functional.one_hot(x, 4).float(), y

    words = re.escape(
        "prepare: time is on axis 0 of the x that it is given, but on axis 1 of what it returns. "
        "Say where: make_train_segment(..., time_dim=1)."
    )
    with pytest.raises(ValueError, match=words):
        evaluate_stream(segment, params, None, (tokens, None), prepare=vectors)
    told = make_train_segment(layer, lambda out, y: out.mean(), backend="eager", time_dim=1)
    found = evaluate_stream(told, params, None, (tokens, None), prepare=vectors, k=7)
    assert found.steps == 60
    assert found.state.shape == (1, 3, 5)


def test_time_is_where_the_segment_has_it() -> None:
    layer = nn.GRU(3, 5, batch_first=True)
    segment = make_train_segment(layer, lambda out, y: out.mean(dim=2), backend="eager")
    params = dict(layer.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    vectors = torch.randn(30, 3)
    words = "data: ContiguousStreams has time on axis 0, but train_segment on axis 1. Give both the"
    with pytest.raises(ValueError, match=words):
        evaluate_stream(segment, params, None, ContiguousStreams(vectors, 2))
    packed = PackedSequences([(vectors, None)], 1)
    with pytest.raises(ValueError, match="data: PackedSequences has time on axis 0, but train_seg"):
        next(train_stream(segment, params, None, packed, optimizer, k1=4, progress=False))
    with pytest.raises(ValueError, match=r"time_dim: is what make_train_segment was told\. Give"):
        train_stream(segment, params, None, packed, optimizer, k1=4, time_dim=1)
    streams = ContiguousStreams(vectors, 2, time_dim=1)
    assert evaluate_stream(segment, params, None, streams, k=4).steps == 28


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
