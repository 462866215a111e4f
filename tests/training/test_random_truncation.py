"""Truncation at random: its mean is the gradient of the whole segment, exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import ftbptt
from ftbptt import make_train_segment, random_truncation
from ftbptt.training import RandomTruncation, evaluate_stream, train_stream

from ..cells import problem
from ..cells.problems import Draw, mse, named
from ..oracle import assert_close
from .streams import mean_cross_entropy, stream, tagger, zeros

Tree = Any
CELLS = ["lstm_readout", "embedding_tied", "delay_line", "counter_and_flag", "lru_complex"]


def every_draw(
    truncation: RandomTruncation, steps: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[float]:
    """All ways to cut so many steps, one after the other: the probability of each."""
    for pattern in itertools.product([False, True], repeat=steps - 1):
        draws = [1.0, *(0.0 if cut else 1.0 for cut in pattern)]
        monkeypatch.setattr(truncation, "draws", lambda steps, draws=draws: draws)
        chance, since = 1.0, 0
        for cut in pattern:
            since += 1
            c = truncation.probability(since)
            chance *= c if cut else 1 - c
            since = 0 if cut else since
        yield chance


def expected(
    truncation: RandomTruncation,
    arguments: Any,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    **flags: Tensor,
) -> Tree:
    """The mean over all draws."""
    mean, whole = None, 0.0
    for chance in every_draw(truncation, steps, monkeypatch):
        own = truncation(*arguments, **flags)
        whole += chance
        own = tree_map(lambda leaf, p=chance: leaf * p if graded(leaf) else leaf, own)
        mean = own if mean is None else tree_map(
            lambda a, b: a + b if graded(a) else a, mean, own
        )  # fmt: skip
    assert whole == pytest.approx(1)
    return mean


def graded(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


@pytest.mark.parametrize("name", CELLS)
def test_the_mean_of_all_draws_is_the_whole_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = problem(name)
    segment = make_train_segment(given.step, given.loss, backend="eager")
    truncation = random_truncation(segment, 2.5)
    found = expected(truncation, given.data(6), 6, monkeypatch)
    assert_close(found, segment(*given.data(6)))


def test_a_state_that_starts_at_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, largest = state
        h = torch.tanh(x_t + h * params["w"])
        largest = torch.maximum(largest, h)
        return largest, (h, largest)

    draw = Draw(0)
    state = (draw(2, 3), torch.full((2, 3), -torch.inf, dtype=torch.float64))
    arguments = ({"w": draw(3)}, state, draw(4, 2, 3), draw(4, 2, 3))
    segment = make_train_segment(step, mse, backend="eager")
    found = expected(random_truncation(segment, 2.5), arguments, 4, monkeypatch)
    assert_close(found, segment(*arguments))


def test_with_resets_and_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem("peephole_lstm")
    segment = make_train_segment(given.step, given.loss, backend="eager")
    arguments = given.data(6)
    rows = tree_leaves(arguments[1])[0].shape[0]
    generator = torch.Generator().manual_seed(3)
    reset = torch.rand(6, rows, generator=generator) < 0.2
    mask = torch.rand(6, rows, generator=generator) < 0.7
    for tail in (3.0, math.inf):
        truncation = random_truncation(segment, 2.0, tail=tail)
        found = expected(truncation, arguments, 6, monkeypatch, reset=reset, mask=mask)
        assert_close(found, segment(*arguments, reset=reset, mask=mask))


@pytest.mark.parametrize("rows", [(), (3,)])
def test_with_resets_to_a_learned_state(
    rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient does not cross from one step to the next, so it is not to be made larger."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t + h * params["w"])
        return h, h

    draw, generator = Draw(0), torch.Generator().manual_seed(1)
    params = {"w": draw(4), "h0": draw(4)}
    arguments = (params, draw(3, 4), draw(6, 3, 4), draw(6, 3, 4))
    segment = make_train_segment(
        step, mse, backend="eager", initial_state=lambda params: params["h0"].expand(3, 4)
    )
    reset = torch.rand(6, *rows, generator=generator) < 0.4
    assert reset[1:].any()
    found = expected(random_truncation(segment, 2.5), arguments, 6, monkeypatch, reset=reset)
    assert_close(found, segment(*arguments, reset=reset))


@pytest.mark.parametrize("kind", ["batch_first", "in_dims", "zeros"])
def test_where_time_and_rows_lie(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 5, 4).double(), torch.randn(3, 5, 6).double()  # rows in front
    step: Any = nn.LSTM(4, 6, batch_first=True).double()
    options: dict[str, Any] = {}
    state: Any = tuple(torch.randn(1, 3, 6).double() for _ in range(2))
    if kind == "in_dims":
        step, state = nn.GRUCell(4, 6).double(), torch.randn(3, 6).double()
        options = {"in_dims": (None, 0, 0, 0)}
    elif kind == "zeros":
        state = None
    segment = make_train_segment(step, mse, backend="eager", **options)
    arguments = (named(step), state, x, y)
    found = expected(random_truncation(segment, 3), arguments, 5, monkeypatch)
    assert_close(found, segment(*arguments))


def test_data_of_another_layout() -> None:
    """``[K, D]`` after ``[B, K, D]``, of as many steps as rows."""
    torch.manual_seed(0)
    step = nn.GRU(4, 6, batch_first=True).double()
    segment = make_train_segment(step, mse, backend="eager")
    truncation = random_truncation(segment, 1e15)
    x, y = torch.randn(3, 3, 4).double(), torch.randn(3, 3, 6).double()
    for arguments in ((named(step), None, x[0], y[0]), (named(step), None, x, y)):
        assert_close(truncation(*arguments), segment(*arguments))


def test_half_precision_has_room_for_long_segments() -> None:
    """float16 ends at 65504: no sum over 256 rows of 300 steps fits."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * h + x_t * params["w"] + params["b"]
        return h, h

    params = {"w": torch.ones(1).half(), "b": torch.tensor(1.0).half()}
    x, y = torch.ones(300, 256, 1).half(), torch.zeros(300, 256, 1).half()
    segment = make_train_segment(step, mse, backend="eager")
    truncation = random_truncation(segment, 20, generator=torch.Generator().manual_seed(0))
    grads, _, loss, _ = truncation(params, torch.zeros(256, 1).half(), x, y)
    assert {leaf.dtype for leaf in (loss, *grads.values())} == {torch.float16}
    expected = segment.evaluate(params, torch.zeros(256, 1).half(), x, y).loss
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0)
    assert all(leaf.isfinite().all() for leaf in grads.values())


# -- what truncation does where a dependency is long ----------------------------------------------

STEPS = 10


def far_and_near() -> tuple[Any, tuple[Any, ...]]:
    """The last output, a weighted sum of all inputs, should be 1.

    The first input is 1, so the weight is to grow; all later ones are slightly negative, and say
    the opposite, as long as the first is out of sight.
    """

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, h + params["w"] * x_t

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return ((out - 1).square() * y)[:, 0]

    x, y = torch.full((STEPS, 1), -0.05).double(), torch.zeros(STEPS, 1).double()
    x[0] = y[-1] = 1.0
    params = {"w": torch.zeros(()).double()}
    segment = make_train_segment(step, loss, backend="eager")
    return segment, (params, torch.zeros(1).double(), x, y)


def in_fixed_pieces(segment: Any, arguments: Any, length: int) -> float:
    """The gradient of plain truncation."""
    params, state, x, y = arguments
    total = 0.0
    for start in range(0, len(x), length):
        own = slice(start, start + length)
        grads, state, _, _ = segment(params, state, x[own], y[own])
        total += float(grads["w"]) * len(x[own]) / len(x)
    return total


@pytest.mark.slow
def test_without_the_bias_of_plain_truncation() -> None:
    segment, arguments = far_and_near()
    whole = float(segment(*arguments).grads["w"])
    assert whole < 0
    assert in_fixed_pieces(segment, arguments, 5) > 0.1 * -whole  # the wrong way
    generator = torch.Generator().manual_seed(1)
    truncation = random_truncation(segment, 5, generator=generator)
    draws = torch.tensor([float(truncation(*arguments).grads["w"]) for _ in range(1500)])
    error = float(draws.std()) / math.sqrt(len(draws))
    assert error < 0.1 * -whole
    assert abs(float(draws.mean()) - whole) < 4 * error


def test_lengths_have_the_mean_and_the_tail_that_were_asked_for() -> None:
    segment, _ = far_and_near()
    for tail in (4.0, math.inf):
        truncation = random_truncation(segment, 8, tail=tail, generator=torch.Generator())
        cuts = truncation.cuts(200_000)
        lengths = torch.tensor([end - start for start, end in cuts.pieces]).double()
        assert lengths.mean() == pytest.approx(8, rel=0.05)
        survivors = (lengths > 40).double().mean()
        chance = math.prod(1 - truncation.probability(since) for since in range(1, 41))
        assert survivors == pytest.approx(chance, rel=0.2)
        assert (chance > 0.01) == (tail == 4)  # (7 / 8) ** 40 without a tail
        assert [piece[0] for piece in cuts.pieces[1:]] == [piece[1] for piece in cuts.pieces[:-1]]


def test_cuts_are_drawn_on_the_cpu() -> None:
    """Also where another device is the default."""
    segment = make_train_segment(tagger(), mean_cross_entropy, backend="eager")
    for generator in (torch.Generator(), None):
        truncation, drawn = random_truncation(segment, 3.0, generator=generator), []
        for device in ("cpu", "meta"):
            (generator or torch.default_generator).manual_seed(0)
            with torch.device(device):
                drawn.append(truncation.cuts(20))
        assert drawn[0] == drawn[1]


def test_a_stream_is_trained_on_it() -> None:
    module = tagger()
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    truncation = random_truncation(segment, 4, generator=torch.Generator().manual_seed(0))
    params = dict(module.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    updates = list(train_stream(
        truncation, params, zeros(), stream(40), optimizer, k1=20, epochs=10, progress=False
    ))  # fmt: skip
    losses = [float(update.loss) for update in updates]
    assert len(losses) == 20
    assert sum(losses[-2:]) < sum(losses[:2])
    found = truncation.evaluate(params, zeros(), *stream(40))
    assert torch.equal(found.loss, segment.evaluate(params, zeros(), *stream(40)).loss)


def test_a_stream_is_evaluated_without_cuts() -> None:
    module = tagger()
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    generator = torch.Generator().manual_seed(0)
    truncation = random_truncation(segment, 4, generator=generator)
    params = dict(module.named_parameters())
    expected = evaluate_stream(segment, params, zeros(), stream(40), k=9)
    actual = evaluate_stream(truncation, params, zeros(), stream(40), k=9)
    assert (actual.loss, actual.steps) == (expected.loss, expected.steps)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(0).get_state())


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"burn_in": 3, "fresh": True}])
def test_a_stream_of_a_batch_first_layer(options: dict[str, Any]) -> None:
    """Time and rows lie where they do for the segment that is cut."""
    layer = nn.GRU(3, 5, batch_first=True)
    segment = make_train_segment(layer, mse, backend="eager")
    params = dict(layer.named_parameters())
    x, y = torch.randn(6, 40, 3), torch.randn(6, 40, 5)
    updates = list(train_stream(
        random_truncation(segment, 1e9), params, None, (x, y),
        torch.optim.SGD(params.values(), lr=0.1), k1=10, progress=False, **options,
    ))  # fmt: skip
    assert [update.position for update in updates][:3] == ([13, 23, 33] if options.get("fresh")
                                                           else [10, 20, 30])  # fmt: skip
    assert updates[-1].state.shape == (1, 6, 5)


def test_an_ensemble_is_trained_and_evaluated_on_it() -> None:
    """Under vmap all models are cut at the same steps, and time lies behind them."""
    modules = [tagger(seed) for seed in range(2)]
    segment = make_train_segment(modules[0], mean_cross_entropy, backend="eager")
    x, y = (torch.stack(parts) for parts in zip(stream(20), stream(20, seed=2), strict=True))

    def trained(make: Any, params: Any, state: Any, data: Any, **options: Any) -> list[Tensor]:
        unbiased = random_truncation(segment, 3, generator=torch.Generator().manual_seed(0))
        run = train_stream(
            make(unbiased), params, state, data, torch.optim.SGD(params.values(), lr=0.1), k1=8,
            progress=False, **options,
        )  # fmt: skip
        return [update.loss for update in run]

    params, _ = torch.func.stack_module_state(modules)
    params = {name: p.detach() for name, p in params.items()}
    state = tuple(torch.stack([leaf] * 2) for leaf in zeros())
    mapped = partial(torch.func.vmap, randomness="same")
    with pytest.raises(ValueError, match="time_dim: train_segment is under vmap"):
        trained(mapped, params, state, (x, y))
    found = torch.stack(trained(mapped, params, state, (x, y), time_dim=1))
    assert found.shape == (3, 2)
    unbiased = random_truncation(segment, 3)
    evaluate = torch.func.vmap(unbiased.evaluate)
    evaluated = evaluate_stream(evaluate, params, state, (x, y), k=7, time_dim=1).loss
    with pytest.raises(ValueError, match="time_dim: train_segment is under vmap"):
        evaluate_stream(evaluate, params, state, (x, y))
    with pytest.raises(TypeError, match="a segment under vmap computes gradients"):
        evaluate_stream(mapped(unbiased), params, state, (x, y), time_dim=1)
    for i, module in enumerate(modules):
        own = dict(module.named_parameters())
        alone = trained(lambda unbiased: unbiased, own, zeros(), (x[i], y[i]))
        torch.testing.assert_close(found[:, i], torch.stack(alone))
        loss = evaluate_stream(unbiased.evaluate, own, zeros(), (x[i], y[i])).loss
        assert float(evaluated[i]) == pytest.approx(loss)


def test_cuts_are_resumed(tmp_path: Path) -> None:
    """They are drawn from a generator of one's own, which the checkpoint has."""
    found = []
    for parts in ((None,), (2, None)):
        torch.manual_seed(0)
        module = nn.GRUCell(3, 5)
        params = dict(module.named_parameters())
        x, y = torch.randn(40, 2, 3), torch.randn(40, 2, 5)
        for updates in parts:
            truncation = random_truncation(
                make_train_segment(module, mse, backend="eager"), 3,
                generator=torch.Generator().manual_seed(4),
            )  # fmt: skip
            run = train_stream(
                truncation, params, None, (x, y), torch.optim.SGD(params.values(), lr=0.1), k1=10,
                progress=False, updates=updates, resume=True,
                checkpoint=tmp_path / f"{len(parts)}.pt",
            )  # fmt: skip
            for _ in run:
                pass
        found.append(params)
    torch.testing.assert_close(*found, rtol=0, atol=0)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean_length", "options", "words"),
    [
        (1, {}, "mean_length: expected a number of steps above 1, found 1"),
        (math.inf, {}, "mean_length: expected a number of steps above 1, found inf"),
        (8, {"tail": 2}, "tail: expected a number above 2, so that lengths have a mean, found 2"),
        ("8", {}, "mean_length: expected a number, found '8'"),
        (8, {"tail": "3"}, "tail: expected a number, found '3'"),
        (
            8,
            {"generator": 3},
            r"generator: expected a torch.Generator, found 3\. One with a seed is",
        ),
    ],
)
def test_bad_options(mean_length: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        random_truncation(far_and_near()[0], mean_length, **options)


@pytest.mark.parametrize("option", ["taps", "window", "context"])
def test_segments_that_cannot_be_cut(option: str) -> None:
    options: dict[str, Any] = {"taps": True, "window": 3, "context": 2}
    segment = make_train_segment(nn.GRUCell(2, 3), mse, **{option: options[option]})
    with pytest.raises(ValueError, match=f"train_segment: was made with {option}="):
        random_truncation(segment, 8)


def test_no_train_segment() -> None:
    with pytest.raises(TypeError, match="train_segment: expected what make_train_segment returns"):
        ftbptt.random_truncation(lambda *args: None, 8)  # type: ignore[arg-type]
