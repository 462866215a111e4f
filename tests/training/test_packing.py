"""Sequences of different lengths on running rows: each whole, alone, and hardly any padding."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ftbptt import TrainSegment, make_train_segment
from ftbptt.training import (
    Chunk,
    Events,
    PackedSequences,
    SequenceEnd,
    Source,
    evaluate_stream,
    train_stream,
)

from .streams import Tagger, cross_entropy, mean_cross_entropy, stream, tagger, zeros


def numbered(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Sequences whose steps tell which one they are of and where: x = 1000 i + t, y = -x."""
    x = [1000 * i + torch.arange(n) for i, n in enumerate(lengths, 1)]
    return [(own, -own) for own in x]


def read(packed: PackedSequences, k: int, k2: int | None = None, epoch: int = 0) -> Chunk:
    """An epoch of [T, B], read in windows of which each begins with what the one before ended."""
    packed.begin(epoch)
    parts, end, back = [], 0, (k2 or k) - k
    while (chunk := packed.read(max(0, end - back), end + k)) is not None:
        new = end - max(0, end - back)
        if len(chunk.x) == new:
            break
        parts.append(Chunk(*(part[new:] for part in chunk)))
        end += k
    return Chunk(*(torch.cat(own) for own in zip(*parts, strict=True)))


def order(chunk: Chunk) -> list[list[int]]:
    """For each row, its sequences, found from where the row restarts."""
    return [
        (chunk.x[:, row][chunk.reset[:, row]] // 1000 - 1).tolist()
        for row in range(chunk.x.shape[1])
    ]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=14),
    rows=st.integers(1, 5),
    k=st.integers(1, 9),
    overlap=st.integers(0, 7),
    seed=st.none() | st.integers(0, 3),
    epoch=st.integers(0, 2),
)
def test_each_sequence_comes_out_whole(
    lengths: list[int], rows: int, k: int, overlap: int, seed: int | None, epoch: int
) -> None:
    sequences = numbered(lengths)
    packed = PackedSequences(sequences, rows, seed=seed)
    assert isinstance(packed, Source)
    chunk = read(packed, k, k + overlap, epoch)
    assert chunk.x.shape == chunk.reset.shape == chunk.mask.shape == (packed.total, rows)
    seen: list[int] = []
    for row, own in enumerate(order(chunk)):
        expected = [sequences[i] for i in own]
        steps = sum(len(x) for x, _ in expected)
        valid, reset = chunk.mask[:, row], chunk.reset[:, row]
        # All of them without a hole, then nothing but padding.
        assert valid[:steps].all()
        assert not valid[steps:].any()
        assert not chunk.x[steps:, row].any()
        assert chunk.x[:steps, row].tolist() == [int(v) for x, _ in expected for v in x]
        assert torch.equal(chunk.y[:steps, row], -chunk.x[:steps, row])
        starts = [sum(len(x) for x, _ in expected[:i]) for i in range(len(expected))]
        assert reset.nonzero().flatten().tolist() == starts
        seen += own
    assert sorted(seen) == list(range(len(lengths)))
    assert int(chunk.mask.sum()) == sum(lengths)
    assert packed.utilisation == pytest.approx(chunk.mask.double().mean().item())
    assert packed.total >= max(lengths)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows", [7, 16, 32])
@pytest.mark.parametrize("tail", ["log-normal", "Pareto"])
def test_hardly_any_padding_under_heavy_tails(tail: str, rows: int, seed: int) -> None:
    generator = numpy.random.default_rng(seed)
    drawn = {
        "log-normal": 40 * generator.lognormal(0, 1.2, 1501),
        "Pareto": 20 * (1 + generator.pareto(1.8, 1501)),
    }[tail]
    lengths = drawn.astype(int).clip(1)
    assert lengths.max() > 15 * numpy.median(lengths)
    packed = PackedSequences([None] * len(lengths), rows, lengths=lengths)
    assert packed.utilisation >= 0.95
    # Padding every batch to its longest would be far from that.
    padded = sum(rows * lengths[i : i + rows].max() for i in range(0, len(lengths), rows))
    assert lengths.sum() / padded < 0.7


def test_a_sequence_longer_than_the_share_of_a_row() -> None:
    """An epoch cannot be shorter than it, and is not longer either."""
    packed = PackedSequences(numbered([30, 2, 3, 5]), 2)
    assert packed.total == 30
    assert packed.utilisation == 40 / 60
    assert repr(packed) == "PackedSequences(4 sequences in 2 rows of 30 steps, 66.7% of them valid)"


def test_flags_are_where_the_sequences_are() -> None:
    packed = PackedSequences([(torch.randn(n, 3), torch.arange(n)) for n in (4, 3)], rows=2)
    with torch.device("meta"):  # another default
        chunk = packed.read(0, 4)
    assert chunk is not None
    assert {leaf.device for leaf in chunk} == {torch.device("cpu")}


def test_a_share_without_a_sequence() -> None:
    """It has as many windows as the others, all padding."""
    whole = PackedSequences(numbered([2, 3]), 4)
    chunk = read(whole.share(3, 4), 2)
    assert chunk.mask.shape == chunk.x.shape == (3, 1)
    assert not chunk.mask.any()


def test_fewer_sequences_than_rows() -> None:
    chunk = read(PackedSequences(numbered([2, 3]), 4), 5)
    assert chunk.mask.sum(0).tolist() == [3, 2, 0, 0]


def test_epochs_are_shuffled_and_can_be_repeated() -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    packed = PackedSequences(numbered(lengths), 2, seed=5)
    orders = [order(read(packed, 4, epoch=epoch)) for epoch in range(4)]
    assert len({str(own) for own in orders}) == 4
    again = PackedSequences(numbered(lengths), 2, seed=5)
    assert order(read(again, 7, epoch=2)) == orders[2]
    assert order(read(PackedSequences(numbered(lengths), 2, seed=6), 7, epoch=2)) != orders[2]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert order(read(packed, 4, epoch=1)) == orders[1]
    assert torch.equal(torch.get_rng_state(), before)
    still = PackedSequences(numbered(lengths), 2, seed=None)
    assert (
        order(read(still, 4))
        == order(read(still, 4, epoch=3))
        == [
            [5, 8, 2, 9, 1],
            [7, 4, 10, 0, 6, 3],
        ]
    )


def test_seeds_are_independent_of_epochs() -> None:
    """No order of a run comes back in one of another seed, in this epoch or another."""
    lengths = [1] * 12
    orders = [
        str(order(read(PackedSequences(numbered(lengths), 2, seed=seed), 6, epoch=epoch)))
        for seed in (0, 1, 2, 4096, 1 << 32)
        for epoch in (0, 1, 2, 3)
    ]
    assert len(set(orders)) == len(orders)


class Recordings:
    """A map-style data set that notes what was asked of it, and draws at random."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.asked = lengths, []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[Tensor, None]:
        if i >= len(self):
            raise IndexError(i)
        self.asked.append(i)
        return torch.randn(self.lengths[i]), None


@pytest.mark.parametrize("overlap", [0, 9])
def test_with_lengths_a_sequence_is_asked_for_once_and_late(overlap: int) -> None:
    lengths = [4, 2, 7, 1, 5, 3, 6]
    sequences = Recordings(lengths)
    packed = PackedSequences(sequences, 2, lengths=torch.tensor(lengths), seed=None)
    assert sequences.asked == []
    packed.begin(0)
    assert packed.read(0, 3) is not None
    assert sequences.asked == [2, 6]
    before, parts = None, []
    for end in range(4, packed.total + 4, 4):
        start = max(0, end - 4 - overlap)
        chunk = packed.read(start, end)
        if before is not None:  # the same draw for each window that has the step
            shared = before[1] - start
            assert torch.equal(chunk.x[:shared], before[0].x[start - before[2] :])
        before = chunk, min(end, packed.total), start
        parts.append(chunk.x)
    assert sorted(sequences.asked) == list(range(7))
    assert sum(len(own) for own in packed._held) <= 7
    packed.begin(1)
    packed.read(0, 1)
    assert len(sequences.asked) == 9


def test_trees_arrays_and_time_behind_the_rows() -> None:
    generator = numpy.random.default_rng(0)
    sequences = [
        (
            {"a": generator.normal(size=(n, 3)).astype(numpy.float32), "b": torch.arange(n)},
            generator.integers(9, size=n).astype(numpy.uint8),
        )
        for n in (5, 3, 4)
    ]
    for array in (sequences[0][1], sequences[0][0]["a"]):
        array.flags.writeable = False  # such as one on disk
    chunk = PackedSequences(sequences, 2, seed=None).read(0, 9)
    assert chunk.x["a"].shape == (7, 2, 3)
    assert (chunk.x["a"].dtype, chunk.y.dtype) == (torch.float32, torch.uint8)
    assert torch.equal(chunk.x["a"][:5, 0], torch.tensor(sequences[0][0]["a"]))
    assert chunk.x["b"][:, 1].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert chunk.y[4:7, 1].tolist() == sequences[1][1].tolist()
    turned = PackedSequences(sequences, 2, seed=None, time_dim=1).read(0, 9)
    assert turned.x["a"].shape == (2, 7, 3)
    assert torch.equal(turned.x["a"].transpose(0, 1), chunk.x["a"])
    for own, like in ((turned.y, chunk.y), (turned.reset, chunk.reset), (turned.mask, chunk.mask)):
        assert torch.equal(own.t(), like)


# -- training -----------------------------------------------------------------------------------

LENGTHS = [9, 4, 1, 6, 3, 5, 2]


@cache
def made() -> tuple[Tagger, TrainSegment]:
    module = tagger()
    return module, make_train_segment(module, cross_entropy, backend="eager")


def fresh() -> tuple[TrainSegment, dict[str, nn.Parameter]]:
    module, segment = made()
    module.load_state_dict(tagger().state_dict())
    return segment, dict(module.named_parameters())


def sequences() -> list[tuple[Tensor, Tensor]]:
    drawn = [stream(n, 1, seed=n) for n in LENGTHS]
    return [(x[:, 0], y[:, 0]) for x, y in drawn]


def losses_alone(module: Tagger, x: Tensor, y: Tensor) -> list[float]:
    """The loss of each step of a sequence that is run by itself, from a zero state."""
    state, found = zeros(1), []
    with torch.no_grad():
        for t in range(len(x)):
            out, state = module(x[t : t + 1], state)
            found.append(mean_cross_entropy(out[None], y[t : t + 1, None]).item())
    return found


@pytest.mark.parametrize("k", [1, 4, 30])
def test_losses_are_those_of_each_sequence_alone(k: int) -> None:
    """Step by step, whatever was in the row before it."""
    segment, params = fresh()
    packed = PackedSequences(sequences(), 3)
    expected: dict[tuple[int, int], float] = {}
    for row, own in enumerate(packed._order):
        losses = [loss for i in own for loss in losses_alone(made()[0], *packed.sequences[i])]
        expected |= {(t, row): loss for t, loss in enumerate(losses)}
    state, start, found = zeros(3), 0, {}
    while (chunk := packed.read(start, start + k)) is not None:
        out = segment(params, state, chunk.x, chunk.y, reset=chunk.reset, mask=chunk.mask)
        losses = cross_entropy(out.out, chunk.y)
        for t, row in chunk.mask.nonzero().tolist():
            found[start + t, row] = losses[t, row].item()
        state, start = out.state, start + k
    assert found == pytest.approx(expected, abs=1e-12)
    assert len(found) == sum(LENGTHS)


@pytest.mark.parametrize("options", [{"k1": 20}, {"k1": 7, "accumulate": 2}])
def test_an_update_is_that_of_all_sequences_alone(options: dict[str, int]) -> None:
    """Gradients are averaged over all valid steps; no gradient crosses from one to the next."""
    segment, params = fresh()
    packed = PackedSequences(sequences(), 3)
    assert packed.total in range(10, 15)
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    (update,) = train_stream(segment, params, zeros(3), packed, optimizer, progress=False,
                             **options)  # fmt: skip
    assert int(update.steps) == sum(LENGTHS)
    own = tagger()
    losses = []
    for row in packed._order:
        at = 0
        for i in row:
            x, y = packed.sequences[i]
            state = zeros(1)
            for t in range(len(x)):
                if at % options["k1"] == 0:
                    state = tuple(leaf.detach() for leaf in state)
                out, state = own(x[t : t + 1], state)
                losses.append(mean_cross_entropy(out[None], y[t : t + 1, None]))
                at += 1
    value = torch.stack(losses).mean()
    value.backward()
    torch.optim.SGD(own.parameters(), lr=0.5).step()
    assert update.loss.item() == pytest.approx(value.item(), abs=1e-12)
    for found, expected in zip(params.values(), own.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_ends_of_sequences_are_told() -> None:
    segment, params = fresh()
    ends: list[SequenceEnd] = []
    packed = PackedSequences(sequences(), 3, seed=None)
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    list(train_stream(segment, params, zeros(3), packed, optimizer, k1=4, k2=6, progress=False,
                      events=Events(sequence_end=ends.append)))  # fmt: skip
    chunk = packed.read(0, 99)
    within = [SequenceEnd(t, row) for t, row in chunk.reset.nonzero().tolist() if t]
    assert ends == [*within, SequenceEnd(packed.total, None)]
    assert len(within) == len(LENGTHS) - 3


def test_one_set_is_read_by_several() -> None:
    """As where a run is evaluated on what it is trained on: neither disturbs the other."""
    packed, found = PackedSequences(sequences(), rows=2), []
    for evaluated in (False, True):
        segment, params = fresh()
        optimizer = torch.optim.SGD(params.values(), lr=0.5)
        losses = []
        for update in train_stream(
            segment, params, zeros(2), packed, optimizer, k1=4, epochs=2, progress=False
        ):
            losses.append(update.loss)
            if evaluated and update.epoch == 1:
                evaluate_stream(segment, params, zeros(2), packed, k=3)
        found.append(torch.stack(losses))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_evaluation_is_the_mean_over_all_steps() -> None:
    segment, params = fresh()
    losses = [loss for x, y in sequences() for loss in losses_alone(made()[0], x, y)]
    found = evaluate_stream(segment, params, zeros(3), PackedSequences(sequences(), 3), k=4)
    assert found.steps == sum(LENGTHS)
    assert found.loss == pytest.approx(sum(losses) / len(losses), abs=1e-12)


def test_a_scalar_loss_cannot_leave_out_the_padding() -> None:
    module = tagger()
    params = dict(module.named_parameters())
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    with pytest.raises(ValueError, match="mask: a scalar loss cannot be masked"):
        evaluate_stream(segment, params, zeros(3), PackedSequences(sequences(), 3))


# -- bad input ----------------------------------------------------------------------------------

X = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("given", "options", "kind", "words"),
    [
        ([], {}, ValueError, "sequences: expected at least one, found none."),
        (
            iter([(X, X)]),
            {},
            TypeError,
            "sequences: expected a list of (x, y), or an object with len() and indices, found "
            "list_iterator. A generator can be listed: list(sequences).",
        ),
        ([(X, X)], {"rows": 0}, ValueError, "rows: expected at least 1, found 0."),
        ([(X, X)], {"rows": True}, TypeError, "rows: expected a whole number, found True."),
        ([(X, X)], {"time_dim": -1}, ValueError, "time_dim: expected at least 0, found -1."),
        (
            [X, X],
            {},
            TypeError,
            "sequences[0]: expected (x, y), found Tensor. For sequences without a target: (x, N",
        ),
        ([(X, X), (X,)], {}, TypeError, "sequences[1]: expected (x, y), found tuple."),
        ([(X, 1)], {}, TypeError, "sequences[0]: y: expected a tensor or an array, found int."),
        ([(X, torch.tensor(1))], {}, ValueError, "sequences[0]: y: expected time on axis 0, found"),
        (
            [(X, X), (X, X[:3])],
            {},
            ValueError,
            "sequences[1]: y: has 3 steps on axis 0, but x has 4.",
        ),
        ([(X, X), (X[:0], X[:0])], {}, ValueError, "sequences[1]: has 0 steps. Leave empty ones o"),
        ([(X, X)], {"lengths": [4, 4]}, ValueError, "lengths: has 2, but there are 1 sequences."),
        (
            [(X, X)],
            {"lengths": [0]},
            ValueError,
            "sequences[0]: has 0 steps. Leave empty ones out.",
        ),
    ],
)
def test_bad_input(given: Any, options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        PackedSequences(given, **{"rows": 2, **options})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((X[:3], X), "sequences[1]: y: has 4 steps on axis 0, but x has 3."),
        ((X[:3], X[:3]), "sequences[1]: has 3 steps, but lengths says 4."),
        ((X.double(), X), "sequences[1]: is not like one before it. All must have the same struct"),
        ((X[:, :1], X), "sequences[1]: is not like one before it."),
        ((X, None), "sequences[1]: is not like one before it."),
        (({"a": X}, X), "dtypes and features; only their number of steps may differ."),
    ],
)
def test_sequences_that_are_not_what_was_said(other: Any, words: str) -> None:
    packed = PackedSequences([(X, X), other], 2, lengths=[4, 4])
    with pytest.raises(ValueError, match=re.escape(words)):
        packed.read(0, 4)
