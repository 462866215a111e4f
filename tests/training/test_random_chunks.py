"""Chunks that draw random numbers as they come, while training draws too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ftbptt._random_state import random_state, same_random_state, seed_random_state
from ftbptt.training import Events
from ftbptt.training.data import chunk_stream
from ftbptt.training.data.chunk_stream import ChunkStream

from ..cells import slow_but
from .resuming import IN_RANDOM_ORDER, Pieces, Run, assert_same
from .sources import of
from .streams import stream

pytestmark = IN_RANDOM_ORDER

CHUNKS = 12


class Shuffled:
    """A shuffle buffer; ``failures`` are the numbers of the draws that fail, of all so far."""

    def __init__(self, *failures: int, error: type[BaseException] = OSError) -> None:
        self.failures, self.error, self.draws = failures, error, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        waiting = []
        for i in range(CHUNKS):
            waiting.append(stream(3, seed=i))
            if len(waiting) > 4:
                yield self.draw(waiting)
        while waiting:
            yield self.draw(waiting)

    def draw(self, waiting: list[Any]) -> Any:
        number = int(torch.randint(99, ())) + random.randrange(99) + int(numpy.random.randint(99))
        self.draws += 1
        if self.draws - 1 in self.failures:
            raise self.error
        return waiting.pop(number % len(waiting))


class Ragged:
    """Consecutive chunks whose lengths are drawn."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        (x, y), at = stream(40), 0
        while at < 40:
            end = at + int(torch.randint(1, 9, ()))
            yield x[at:end], y[at:end]
            at = end


class Noisy:
    """Each chunk but the first is four numbers of ``torch.rand``, which are also kept."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []

    def __iter__(self) -> Iterator[tuple[Tensor, None]]:
        yield torch.zeros(4, 1), None
        for _ in range(5):
            self.drawn.append(torch.rand(4))
            yield self.drawn[-1].unsqueeze(1), None


def new_run(data: Any, seed: int = 0, file: Path | None = None, **more: Any) -> Run:
    """Its step has dropout."""
    return Run("dropout, list", seed, file, data=data, **more)


def source_of(data: Any) -> ChunkStream:
    source = of(data)
    assert isinstance(source, ChunkStream)
    return source


# -- what is read again ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Shuffled, Ragged])
@pytest.mark.parametrize("options", [{}, {"k1": 3, "k2": 8}, {"accumulate": 3}])
def test_resumed(make: Callable[[], Any], options: dict[str, Any], tmp_path: Path) -> None:
    once = new_run(make(), **options).go()
    for cut in {1, 2, 5, len(once.seen) // 2, len(once.seen) // 2 + 2, len(once.seen) - 1}:
        file = tmp_path / f"{cut}.pt"
        first = new_run(make(), 0, file, **options).go(cut)
        second = new_run(make(), 7, file, resume=True, **options).go()
        assert_same(first.seen + second.seen, once.seen)
        assert_same(second.left(), once.left())


def test_resumed_where_the_next_window_was_read_already(tmp_path: Path) -> None:
    """As for a GPU."""

    def ahead(*args: Any, **more: Any) -> Run:
        run = new_run(Shuffled(), *args, **more)
        run.updates._cursor.mover.aside = True
        return run

    once = ahead().go()
    for cut in range(1, len(once.seen), 3):
        file = tmp_path / f"{cut}.pt"
        first = ahead(0, file).go(cut)
        assert_same(first.seen + ahead(7, file, resume=True).go().seen, once.seen)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "failures",
    slow_but(
        [(0,), (7,), (CHUNKS,), (0, 1), (5, 8), (7, 8, 9)],
        [(0,), (1,), (7,), (CHUNKS,), (CHUNKS + 4,), (0, 1), (5, 6), (5, 8), (7, 8, 9), (7, 15)],
    ),
)
def test_failed_and_read_again(
    failures: tuple[int, ...], error: type[BaseException], saved: bool, tmp_path: Path
) -> None:
    """At the first chunk of an epoch, at another, and again while it is read again."""
    once = new_run(Shuffled()).go()
    data = Shuffled(*failures, error=error)
    run = new_run(data, 0, tmp_path / "run.pt" if saved else None)
    for _ in failures:
        with pytest.raises(error):
            run.go()
    assert_same(run.go().seen, once.seen)
    assert_same(run.left(), once.left())


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_an_iterator_goes_on_after_an_error(n: int, aside: bool, tmp_path: Path) -> None:
    """It gives nothing twice, and training draws again what it drew."""

    def fail(*_: Any) -> None:
        left.append(0)
        if len(left) == n:
            raise ValueError("of the caller's")

    left: list[int] = []
    options: dict[str, Any] = {"epochs": 1, "accumulate": 3}
    once = new_run(iter(Shuffled()), **options).go()
    assert_same(once.seen, new_run(Shuffled(), **options).go().seen)
    file = tmp_path / "run.pt"
    run = new_run(iter(Shuffled()), 0, file, events=Events(after_window=fail), **options)
    run.updates._cursor.mover.aside = aside
    with pytest.raises(ValueError, match="of the caller's"):
        run.go()
    torch.rand(3)  # by the caller
    assert_same(run.go().seen, once.seen)
    assert_same(run.left(), once.left())


@pytest.mark.parametrize("is_iterator", [False, True])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("number", [0, 1, 5])
def test_interrupted_when_a_chunk_was_taken(
    number: int, saved: bool, is_iterator: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not held yet."""
    as_chunk, calls = chunk_stream.as_chunk, []

    def interrupted(item: Any) -> Any:
        calls.append(item)
        if len(calls) == number + 1:
            raise KeyboardInterrupt
        return as_chunk(item)

    def data() -> Any:
        return iter(Shuffled()) if is_iterator else Shuffled()

    options: dict[str, Any] = {"epochs": 1, "k1": 3}  # k1: no chunk is held but not yet trained on
    once = new_run(data(), **options).go()
    monkeypatch.setattr(chunk_stream, "as_chunk", interrupted)
    run = new_run(data(), 0, tmp_path / "run.pt" if saved else None, **options)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert_same(run.go().seen, once.seen)
    assert len(calls) > CHUNKS


def test_interrupted_when_an_epoch_has_begun(tmp_path: Path) -> None:
    """The second, when the data draws from its own numbers in the first."""

    def start(_: int) -> None:
        started.append(0)
        if len(started) == 2:
            raise KeyboardInterrupt

    started = [0, 0]
    once = new_run(Shuffled(), events=Events(epoch_start=start)).go()
    started.clear()
    run = new_run(Shuffled(), 0, tmp_path / "run.pt", events=Events(epoch_start=start))
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert_same(run.go().seen, once.seen)


# -- whose numbers are drawn ----------------------------------------------------------------------


def test_the_numbers_of_data_are_not_those_of_training() -> None:
    data, own = Noisy(), []
    source = source_of(data)
    source.begin(0)
    for start in range(0, 24, 4):
        source.read(start, start + 4)
        own.append(torch.rand(4))
    numbers = torch.cat(data.drawn + own)
    assert len(numbers) == 20 + 24 == len(numbers.unique())


def test_what_training_draws_is_nothing_to_the_data() -> None:
    """And the other way round, but for the first chunk."""
    read, states = [], []
    for draws in (0, 3):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        source = source_of(Shuffled())
        source.begin(0)
        read.append([source.read(0, 5)])  # two chunks
        states.append(random_state())
        for start in range(5, 36, 5):
            torch.rand(draws), [random.random() for _ in range(draws)], numpy.random.rand(draws)
            before = random_state()
            read[-1].append(source.read(start, start + 5))
            assert same_random_state(before, random_state())
    assert_same(*read)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    assert iter(Shuffled()).__next__() is not None
    torch.randint(1 << 62, ())  # the seed of the data's numbers
    assert all(same_random_state(state, random_state()) for state in states)


def test_an_error_in_the_data_leaves_the_numbers_of_training_alone() -> None:
    source = source_of(Shuffled(4))
    source.begin(0)
    source.read(0, 6)
    before = random_state()
    with pytest.raises(OSError):  # noqa: PT011
        source.read(6, 18)
    assert same_random_state(before, random_state())
    assert source.read(6, 18) is not None
    assert same_random_state(before, random_state())


def test_epochs_differ_when_only_later_chunks_are_random() -> None:
    data = Noisy()
    source = source_of(data)
    for epoch in range(2):
        source.begin(epoch)
        source.read(0, 99)
    assert len(torch.cat(data.drawn).unique()) == 2 * 20


def test_a_data_loader_has_the_order_of_a_plain_loop() -> None:
    pieces, orders = Pieces(noise=False), []
    torch.manual_seed(3)
    expected = [x.sum().item() for x, _ in DataLoader(pieces, batch_size=None, shuffle=True)]
    for draws in (0, 2):
        torch.manual_seed(3)
        source = source_of(DataLoader(pieces, batch_size=None, shuffle=True))
        source.begin(0)
        while source.read(source._end, source._end + 1) is not None:
            orders.append(source._held[-1].chunk.x.sum().item())
            torch.rand(draws)
    assert orders == 2 * expected


def test_a_list_draws_nothing() -> None:
    source = source_of([stream(3, seed=i) for i in range(4)])
    before = random_state()
    for epoch in range(2):
        source.begin(epoch)
        source.read(0, 99)
    assert same_random_state(before, random_state())


def test_ranks_read_the_same() -> None:
    """What one process would read if training drew nothing."""
    torch.manual_seed(0)
    single, ranks = source_of(Shuffled()), [source_of(Shuffled()) for _ in range(2)]
    start, expected = single.beginning(), []
    for epoch in range(3):
        single.begin(epoch)
        expected.append(single.read(0, 36))
    found: list[list[Any]] = []
    for number, source in enumerate(ranks):
        torch.manual_seed(number)
        source.begin_as(start)
        found.append([])
        for epoch in range(3):
            before = random_state()
            source.begin(epoch)
            found[-1].append(source.read(0, 36))
            assert same_random_state(before, random_state())
            torch.rand(5 + number)
    assert_same(found, [expected, expected])
    assert not torch.equal(expected[0].x, expected[1].x)
    resumed = source_of(Shuffled())
    resumed.begin_as(single.beginning())
    resumed.read_again(ranks[0].reading(), 2, 0)
    assert_same(resumed.read(0, 36), expected[2])
    for source in (ranks[0], resumed):
        source.begin(3)
    assert_same(resumed.read(0, 36), ranks[0].read(0, 36))


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "Philox"])
def test_numpy_may_have_another_generator(name: str) -> None:
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(getattr(numpy.random, name)())
    try:
        drawn = []
        for seed in (5 << 40, 5 << 40, 5):
            seed_random_state(seed)
            drawn.append((numpy.random.rand(), random.random(), float(torch.rand(()))))
    finally:
        numpy.random.set_bit_generator(before)
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[1], drawn[2], strict=True))
