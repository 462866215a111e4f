"""Errors and Ctrl-C at any moment of a run: nothing is lost, and it goes on bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ftbptt import TrainSegment, make_train_segment, reference_segment
from ftbptt._interrupt import uninterrupted
from ftbptt.training import Events, load_checkpoint

from .resuming import IN_RANDOM_ORDER, Pieces, Run, assert_same, check, whole

pytestmark = IN_RANDOM_ORDER

NAMES = ["plain", "dropout, noisy", "noisy, accumulated", "micro-batches", "plateau"]


class Interrupting:
    """Events of which one raises, the n-th time it is told of something."""

    def __init__(self, name: str, n: int, error: BaseException) -> None:
        self.left, self.error = n, error
        self.events = Events(**{name: self})

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "event", ["before_window", "after_window", "before_update", "after_update", "report"]
)
def test_interrupted_in_an_event(name: str, event: str, tmp_path: Path) -> None:
    """Everything up to the last update is kept, and goes on from there."""
    for n, error in ((4, KeyboardInterrupt()), (5, ZeroDivisionError("of the caller's"))):
        file = tmp_path / f"{n}.pt"
        first = Run(name, 0, file, events=Interrupting(event, n, error).events)
        with pytest.raises(type(error)):
            first.go()
        made = first.updates.index
        # The update is made where its event is told of, but its caller has not seen it.
        assert made - len(first.seen) == (event in ("after_update", "report"))
        check(name, first, file, made)


@pytest.mark.parametrize("presses", [1, 2])
def test_who_presses_ctrl_c_again_is_told(presses: int, capfd: pytest.CaptureFixture[str]) -> None:
    """While something is compiled, which may take long."""
    done = []

    def compiled() -> None:
        with uninterrupted():
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        compiled()
    assert done
    told = "Ctrl-C takes effect once what is being compiled" in capfd.readouterr().err
    assert told == (presses > 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_interrupted_in_the_callers_loop(
    name: str, error: type[BaseException], tmp_path: Path
) -> None:
    first = Run(name, 0, tmp_path / "run.pt")
    with pytest.raises(error):  # noqa: PT012
        for update in first.updates:
            first.see(update)
            if update.index == 2:
                raise error
    check(name, first, tmp_path / "run.pt", 3)


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run in the background and would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupted_in_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a segment, when its random numbers are drawn and the next chunks are read."""
    name, file, calls = "dropout, noisy", tmp_path / "run.pt", []
    own = TrainSegment.__call__

    def call(self: Any, *args: Any, **rows: Any) -> Any:
        result = own(self, *args, **rows)
        calls.append(result)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(TrainSegment, "__call__", call)
        first = Run(name, 0, file)
        with pytest.raises(KeyboardInterrupt):
            first.go()
    check(name, first, file, 5)


class Interrupted(torch.optim.SGD):
    """Ctrl-C is pressed between two of its parameters."""

    at = 3

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.at -= 1
        params = self.param_groups[0]["params"]
        with torch.no_grad():
            for i, p in enumerate(params):
                p -= 0.3 * p.grad
                if i == 2 and self.at == 0:
                    os.kill(os.getpid(), signal.SIGINT)
                    self.failed()

    def failed(self) -> None:
        pass


def test_interrupted_in_the_optimizer(tmp_path: Path) -> None:
    """Some parameters are updated and others not yet: the update is made whole first."""
    file = tmp_path / "run.pt"
    options = {"optimizer": lambda params: Interrupted(params.values())}
    Interrupted.at = 99
    once = Run("plain", 0, **options).go()
    Interrupted.at = 3
    first = Run("plain", 0, file, **options)
    with pytest.raises(KeyboardInterrupt):
        first.go()
    assert (first.updates.index, len(first.seen)) == (3, 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    Interrupted.at = 99
    second = Run("plain", 7, file, resume=True, **options).go()
    assert_same(second.seen, once.seen[3:])
    assert_same(second.left(), once.left())


def test_an_error_within_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an update is not saved: the checkpoint before it stays."""

    def failed(self: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Interrupted, "failed", failed)
    Interrupted.at = 4
    handled: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: handled.append(number))
    try:
        options = {"optimizer": lambda params: Interrupted(params.values())}
        first = Run("plain", 0, tmp_path / "run.pt", checkpoint_every=2, **options)
        with pytest.raises(MemoryError):
            first.go()
    finally:
        signal.signal(signal.SIGINT, before)
    assert handled == [signal.SIGINT]  # the caller's own handler, which was put back
    with pytest.raises(RuntimeError, match="step of update 3 was not made to its end, so the"):
        first.updates.save()
    assert load_checkpoint(tmp_path / "run.pt")["index"] == 2
    Interrupted.at = 99
    next(first.updates)
    first.updates.save()
    assert load_checkpoint(tmp_path / "run.pt")["index"] == 4


def test_interrupted_while_it_is_resumed(tmp_path: Path) -> None:
    """As the chunks of before are read once more: the file is left as it is."""
    name, file = "dropout, list", tmp_path / "run.pt"
    Run(name, 0, file).go(5)
    content = file.read_bytes()
    again = Run(name, 7, file, resume=True)

    class Slow(list):
        def __iter__(self) -> Any:
            yield self[0]
            raise KeyboardInterrupt

    again.updates._cursor.source.chunks = Slow(Pieces(noise=False)[i] for i in range(5))
    with pytest.raises(KeyboardInterrupt):
        again.go()
    assert file.read_bytes() == content
    again.updates._cursor.source.chunks = [Pieces(noise=False)[i] for i in range(5)]
    assert_same(again.go().seen, whole(name)[0][5:])  # in a notebook, the cell is run once more


def test_a_loop_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    """No window counts twice that was at work."""
    for event in ("after_window", "before_update"):
        stopped = Interrupting(event, 4, KeyboardInterrupt())
        run = Run("micro-batches", 0, events=stopped.events)
        with pytest.raises(KeyboardInterrupt):
            run.go()
        run.go()
        if event == "after_window":
            assert_same(run.seen, whole("micro-batches")[0])


@pytest.mark.parametrize("name", [*NAMES, "fresh, list", "packed, noisy", "generator"])
@pytest.mark.parametrize("event", ["before_window", "before_update"])
def test_the_same_loop_goes_on(name: str, event: str, tmp_path: Path) -> None:
    """With a checkpoint, no window is left out either: also none of the first update."""
    for n in (1, 4):
        stopped = Interrupting(event, n, KeyboardInterrupt())
        run = Run(name, 0, tmp_path / f"{n}.pt", events=stopped.events)
        with pytest.raises(KeyboardInterrupt):
            run.go()
        run.go()
        assert_same(run.seen, whole(name)[0])


@pytest.mark.parametrize("name", ["dropout, shuffled", "own generator", "generator"])
@pytest.mark.parametrize("saved", [False, True])
def test_interrupted_while_it_begins(name: str, saved: bool, tmp_path: Path) -> None:
    """It begins again with the same random numbers, in the data and apart from it."""

    def start(_: Any) -> None:
        started.append(torch.rand(()))
        if len(started) == 1:
            raise KeyboardInterrupt

    started: list[Tensor] = [torch.ones(())]
    once = Run(name, 0, events=Events(epoch_start=start)).go()
    started.clear()
    file = tmp_path / "run.pt" if saved else None
    run = Run(name, 0, file, events=Events(epoch_start=start))
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert_same(run.go().seen, once.seen)


def test_an_error_in_the_first_update_after_a_break(tmp_path: Path) -> None:
    """It is made again from its first window, as any other."""
    stopped = Interrupting("after_window", 4, ValueError("of the caller's"))
    run = Run("noisy, accumulated", 0, tmp_path / "run.pt", events=stopped.events).go(1)
    with pytest.raises(ValueError, match="of the caller's"):
        run.go()
    assert_same(run.go().seen, whole("noisy, accumulated")[0])


@pytest.mark.parametrize("resume", [False, True])
def test_interrupted_after_the_only_update_of_an_epoch(resume: bool, tmp_path: Path) -> None:
    """The epoch had a window, which is not forgotten."""
    options: dict[str, Any] = {"k1": 22, "epochs": 3}
    once = Run("plain", 0, **options).go()
    stopped = Interrupting("after_update", 2, KeyboardInterrupt())
    run = Run("plain", 0, tmp_path / "run.pt", events=stopped.events, **options)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    if resume:
        run = Run("plain", 7, tmp_path / "run.pt", resume=True, **options)
    assert_same(run.go().seen[-1:], once.seen[2:])


@pytest.mark.parametrize("traced", [True, False])
def test_interrupted_in_the_middle_of_vmap(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C waits for its end: torch would end a level that it has not begun."""
    from torch._functorch import vmap

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t @ params["u"] + h @ params["w"])
        return h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean()

    in_dims = (None, 0, 1, 1) if traced else None
    segment = make_train_segment(step, loss, backend="eager", in_dims=in_dims)
    params = {"u": torch.randn(3, 3), "w": torch.randn(3, 3)}
    given = params, torch.zeros(2, 3), torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    if not traced:
        segment(*given)
    begin, begun = vmap._vmap_increment_nesting, []

    def interrupted(*args: Any) -> int:
        if not begun:
            begun.append(args)
            signal.raise_signal(signal.SIGINT)
        return begin(*args)

    with monkeypatch.context() as patched:
        patched.setattr(vmap, "_vmap_increment_nesting", interrupted)
        with pytest.raises(KeyboardInterrupt):
            segment(*given)
    assert begun
    expected = reference_segment(step, loss, *given)
    torch.testing.assert_close(segment(*given).grads, expected.grads)


def test_a_schedule_that_ends_before_the_run(tmp_path: Path) -> None:
    """All updates are kept that were made."""
    run = Run("scheduled", 0, tmp_path / "run.pt", epochs=9)
    with pytest.raises(ValueError, match="Tried to step"):
        run.go()
    assert load_checkpoint(tmp_path / "run.pt")["index"] == run.updates.index > 10


def test_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the run is what is raised, with a note that there is no checkpoint of it."""
    import ftbptt.training.checkpoints.stores as module

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "run.pt"
    first = Run("plain", 0, file, checkpoint_every=2)
    with monkeypatch.context() as patched:
        first.go(3)
        patched.setattr(module, "save_checkpoint", full)
        with pytest.raises(OSError, match="No space left"):
            first.go()
        stopped = Run("plain", 0, tmp_path / "b.pt",
                      events=Interrupting("before_update", 3, ValueError("x")).events)  # fmt: skip
        with pytest.raises(ValueError, match="x") as caught:
            stopped.go()
        (note,) = caught.value.__notes__
        assert "the checkpoint could not be written: [Errno 28] No space left" in note
    assert load_checkpoint(file)["index"] == 3
    first.go()  # after room was made
    assert_same(first.seen, whole("plain")[0])
    assert load_checkpoint(file)["index"] == 6


def test_a_loop_that_is_left_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``break`` has no error that a note could be added to."""
    import ftbptt.training.checkpoints.stores as module

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_checkpoint", full)
    words = "ftbptt: the checkpoint could not be written: .Errno 28. No space left"
    loop = iter(Run("plain", 0, tmp_path / "run.pt").updates)
    next(loop)
    with pytest.warns(RuntimeWarning, match=words):
        loop.close()  # type: ignore[attr-defined]


def test_a_function_that_raises_stop_iteration(tmp_path: Path) -> None:
    """As a bare ``next`` may: the loop would end, and look as if all was done."""
    run = Run("plain", 0, tmp_path / "run.pt",
              events=Interrupting("before_window", 3, StopIteration()).events)  # fmt: skip
    with pytest.raises(RuntimeError, match="a function that the run called raised StopIteration"):
        run.go()
    assert_same(run.go().seen, whole("plain")[0])


class FailingOnce(Pieces):
    """A file cannot be read at first."""

    def __init__(self, noise: bool, error: type[BaseException]) -> None:
        super().__init__(noise)
        self.left, self.error = 3, error

    def __getitem__(self, i: int) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().__getitem__(i)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_data_that_fails_once_is_read_again(error: type[BaseException]) -> None:
    """Also without a checkpoint: an iterator that failed would leave out a chunk, or end."""
    data = DataLoader(FailingOnce(True, error), batch_size=None, shuffle=True)
    run = Run("dropout, noisy", 0, data=data)
    with pytest.raises(error):
        run.go()
    assert_same(run.go().seen, whole("dropout, noisy")[0])


@pytest.mark.parametrize("saved", [False, True])
def test_an_iterator_that_failed_is_not_read_on(saved: bool, tmp_path: Path) -> None:
    """A generator would be at its end, as if all were done."""
    pieces = FailingOnce(False, OSError)
    run = Run("generator", 0, tmp_path / "run.pt" if saved else None,
              data=(pieces[i] for i in range(5)))  # fmt: skip
    with pytest.raises(OSError):  # noqa: PT011
        run.go()
    words = r"data: the iterator failed at chunk 3 \(OSError\), and may leave out steps"
    with pytest.raises(RuntimeError, match=words):
        run.go()


@pytest.mark.parametrize("saved", [False, True])
def test_interrupted_when_an_iterator_has_given_a_chunk(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives it only once."""
    from ftbptt.training.data import chunk_stream

    as_chunk, left = chunk_stream.as_chunk, [0, 0, 1]

    def interrupted(item: Any) -> Any:
        if left and left.pop(0):
            raise KeyboardInterrupt
        return as_chunk(item)

    monkeypatch.setattr(chunk_stream, "as_chunk", interrupted)
    run = Run("generator", 0, tmp_path / "run.pt" if saved else None)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert_same(run.go().seen, whole("generator")[0])


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_an_iterator_that_is_read_ahead_goes_on(n: int, tmp_path: Path) -> None:
    """It gives nothing twice: what was read since the last update is kept."""
    whole_run = Run("generator", 0, accumulate=4).go()
    events = Interrupting("before_window", n, ValueError("of the caller's")).events
    run = Run("generator", 0, tmp_path / "run.pt", accumulate=4, events=events)
    run.updates._cursor.mover.aside = True  # as for a GPU
    with pytest.raises(ValueError, match="of the caller's"):
        run.go()
    assert_same(run.go().seen, whole_run.seen)


@pytest.mark.parametrize("aside", [False, True])
def test_an_error_in_the_next_window_comes_after_the_update(aside: bool, tmp_path: Path) -> None:
    """Also where that is read while the device is at work: no update is lost by it."""
    failing = [False, True]

    def prepare(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if failing and failing.pop(0):
            raise OSError("the disk is gone")
        return x, y

    run = Run("plain", 0, tmp_path / "run.pt", prepare=prepare)
    run.updates._cursor.mover.aside = aside
    with pytest.raises(OSError, match="the disk is gone"):
        run.go()
    assert len(run.seen) == 1
    assert_same(run.go().seen, whole("plain")[0])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_was_read_ahead_is_read_again(n: int, tmp_path: Path) -> None:
    """Also in the first update, before which nothing was."""
    events = Interrupting("before_update", n, ValueError("of the caller's")).events
    run = Run("accumulated", 0, tmp_path / "run.pt", events=events)
    run.updates._cursor.mover.aside = True  # as for a GPU
    with pytest.raises(ValueError, match="of the caller's"):
        run.go()
    assert_same(run.go().seen, whole("accumulated")[0])


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_interrupted_where_the_next_epoch_begins(
    error: type[BaseException], saved: bool, tmp_path: Path
) -> None:
    """As while a ``DataLoader`` starts its workers."""
    pieces, begins = [Pieces(noise=False)[i] for i in range(5)], []

    class Failing:
        def __iter__(self) -> Iterator[Any]:
            begins.append(0)
            if len(begins) in (2, 3):
                raise error
            return iter(pieces)

    once = Run("plain", 0, data=pieces, epochs=2).go()
    file = tmp_path / "run.pt" if saved else None
    run = Run("plain", 0, file, data=Failing(), epochs=2)
    for _ in range(2):
        with pytest.raises(error):
            run.go()
    assert_same(run.go().seen, once.seen)


def test_an_iterator_is_read_again_by_a_run_from_elsewhere(tmp_path: Path) -> None:
    """What fails on the way, or in the update after that, does not end it."""
    first = Run("generator", 0).go(3)
    saved = first.updates.state_dict()
    for saves in (False, True):
        file = tmp_path / "run.pt" if saves else None
        events = Interrupting("before_window", 1, ValueError("of the caller's")).events
        run = Run("generator", 0, file, events=events)
        run.updates.load_state_dict(saved)
        with pytest.raises(ValueError, match="of the caller's"):
            run.go()
        assert_same(run.go().seen, whole("generator")[0][3:])
    pieces = Pieces(noise=True)

    def chunks() -> Iterator[Any]:
        for i in range(5):
            if i == 1:
                raise KeyboardInterrupt
            yield pieces[i]

    run = Run("generator", 0, data=chunks())
    run.updates.load_state_dict(saved)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    with pytest.raises(RuntimeError, match=r"data: the iterator failed at chunk 2 \(KeyboardInter"):
        run.go()


def test_what_an_iterator_gave_is_not_kept_for_nothing() -> None:
    """Without a checkpoint no update is made again, also where the state of the run was read."""
    run = Run("generator", 0)
    next(run.updates)
    run.updates.state_dict()
    run.go()
    assert not run.updates._cursor.source._replay.recorded  # type: ignore[attr-defined]
