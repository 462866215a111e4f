"""Data that cannot be meant: what is said of it."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment
from ftbptt.training import ContiguousStreams, PackedSequences, evaluate_stream, train_stream

from .sources import losses_of, made, of, windows
from .streams import stream, zeros

X, Y = stream(10)
FLAGS = torch.zeros(10, dtype=torch.bool)
MASKED = numpy.ma.masked_array(numpy.arange(10), numpy.arange(10) > 7)
TUPLES = "expected (x, y) or (x, y, reset, mask), found "


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
        (
            (nn.utils.rnn.pack_sequence([torch.zeros(n, 3) for n in (5, 3)]), None),
            TypeError,
            "data: x: is a PackedSequence, whose rows drop out as it goes on, but a state is carr",
        ),
        (
            ({"a": MASKED}, Y),
            ValueError,
            "data: x['a']: is a masked array, with 2 values masked, but a tensor has no such mask. "
            "Fill it (value.filled(0)), and leave out gaps of a target in the loss; mask= is for "
            "padding, where the state stays as it was.",
        ),
        ((X, Y, FLAGS), TypeError, "data: expected (x, y), found three parts: the third may be me"),
        (
            (X, Y, [False] * 10, None),
            TypeError,
            "data: reset: expected a tensor or an array, found list",
        ),
        ((X, Y, None, True), TypeError, "data: mask: expected a tensor or an array, found bool."),
        (
            (X, Y[:7]),
            ValueError,
            "data: y: has 7 steps on axis 0, but x has 10. All parts of the data must have the "
            "same length; nothing is cut silently. Expand what a row has at all steps over them.",
        ),
        (
            ({"a": X, "b": (X, X[:9])}, Y),
            ValueError,
            "data: x['b'][1]: has 9 steps on axis 0, but x['a'] has 10.",
        ),
        ((X, Y, FLAGS[:4], None), ValueError, "data: reset: has 4 steps on axis 0, but x has 10."),
        ((X, Y, None, FLAGS[1:]), ValueError, "data: mask: has 9 steps on axis 0, but x has 10."),
        ((X, Y[0, 0]), ValueError, "data: y: expected time on axis 0, found shape []. Exp"),
        ((list(X), Y), ValueError, "If each tensor in x is a step, use torch.stack(x, 0)."),
    ],
)
def test_bad_data(data: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        of(data)


@pytest.mark.parametrize(
    ("chunks", "kind", "words"),
    [
        ([X, Y], TypeError, f"data, chunk 1: {TUPLES}a Tensor. For data without a target: (x, Non"),
        (
            [X, Y],
            TypeError,
            "Anything but a tuple is read as an iterable of chunks, each of them su",
        ),
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
            "tokens: 3 are too few for 3 rows, each of which needs a step and its target. Give mor",
        ),
        (
            lambda: ContiguousStreams([1, 2, 3, 4, 5], 2),
            TypeError,
            "tokens: expected one tensor or array [N, ...], found list. Convert it: torch.tensor(",
        ),
        (
            lambda: ContiguousStreams("a text", 2),
            TypeError,
            "found str. Give a text as bytes, tokens.encode(), or the numbers of its tokens. Targ",
        ),
        (
            lambda: ContiguousStreams((X, Y), 2),
            TypeError,
            "tokens: expected one tensor or array [N, ...], found a tuple of Tensor. Targets are "
            "the tokens themselves, one step ahead. Pass data that has targets, (x, y), to train_s",
        ),
        (
            lambda: ContiguousStreams(MASKED, 2),
            ValueError,
            "tokens: is a masked array, with 2 values masked, but a tensor has no such mask. Fill",
        ),
        (
            lambda: PackedSequences([(X, None), (MASKED, None)], 2),
            ValueError,
            "sequences[1]: x: is a masked array, with 2 values masked, but a tensor has no such m",
        ),
        (lambda: ContiguousStreams([X, Y], 2), TypeError, "found a list of Tensor."),
        (lambda: ContiguousStreams({"x": X}, 1), TypeError, "tokens: expected one tensor or ar"),
        (lambda: ContiguousStreams(X[0, 0, 0], 1), TypeError, "found Tensor of shape []."),
        (lambda: ContiguousStreams(X, 0), ValueError, "rows: expected at least 1, found 0."),
        (
            lambda: ContiguousStreams(X, 2.0),
            TypeError,
            "rows: expected a whole number, found 2.0",
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


@pytest.mark.parametrize("part", [0, 1])
def test_prepare_may_not_write_to_the_data(part: int) -> None:
    """It would be halved once more in the next epoch. Of arrays it is given copies."""
    x, y = stream(10, rows=3)

    def halve(*given: Any) -> Any:
        given[part].div_(2) if part == 0 else given[part].clamp_(max=2)
        return given

    with pytest.raises(ValueError, match="prepare: it wrote to your own data, of which it is give"):
        losses_of((x, y), prepare=halve)
    module, segment = made()
    params = dict(module.named_parameters())
    with pytest.raises(ValueError, match="prepare: it wrote to your own data"):
        evaluate_stream(segment, params, zeros(3), (x, y), prepare=halve)
    before = x.clone()
    losses_of((x.numpy(), y.numpy()), prepare=halve)
    assert torch.equal(x, before)


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
    with pytest.raises(ValueError, match=r"time_dim: belongs to the segment\. Pass it to make_tr"):
        train_stream(segment, params, None, packed, optimizer, k1=4, time_dim=1)
    streams = ContiguousStreams(vectors, 2, time_dim=1)
    assert evaluate_stream(segment, params, None, streams, k=4).steps == 28
