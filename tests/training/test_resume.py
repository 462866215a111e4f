"""A run that is cut off and resumed gives, bit for bit, what one gives that was not."""

from __future__ import annotations

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ftbptt import make_train_segment
from ftbptt.training import (
    EarlyStop,
    Events,
    Stream,
    load_checkpoint,
    train_stream,
)
from ftbptt.training.checkpoints.file import previous

from ..cells import slow_but
from .resuming import (
    IN_RANDOM_ORDER,
    MODULES,
    RUNS,
    Pieces,
    Run,
    assert_same,
    check,
    segment,
    whole,
)
from .streams import mean_cross_entropy, stream

pytestmark = IN_RANDOM_ORDER

# Each of these is of another kind; those that differ from one of them in an option are slow.
QUICK = {
    "overlapping", "burn-in", "gaps", "fresh, list", "fresh, noisy", "functional", "accumulated",
    "micro-batches", "in turn", "clipped, averaged", "scaled", "early stop", "nested state",
    "dropout, shuffled", "packed, noisy", "generator", "contiguous",
}  # fmt: skip


@pytest.mark.parametrize("often", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(QUICK, RUNS))
def test_cut_off_after_any_update(name: str, often: bool, tmp_path: Path) -> None:
    seen, _ = whole(name)
    assert len(seen) > 4
    for cut in {1, *range(2, len(seen), 1 if often else len(seen) // 3), len(seen)}:
        file = tmp_path / f"{cut}.pt"
        check(name, Run(name, 0, file).go(cut), file, cut)


@pytest.mark.parametrize("name", ["dropout, noisy", "scaled", "packed"])
def test_cut_off_after_every_update(name: str, tmp_path: Path) -> None:
    """Each update by a run of its own."""
    (seen, left), found = whole(name), []
    for seed in range(len(seen)):
        run = Run(name, seed, tmp_path / "run.pt", resume=True).go(1)
        found += run.seen
    assert_same(found, seen)
    assert_same(run.left(), left)
    assert not Run(name, 9, tmp_path / "run.pt", resume=True).go().seen


@pytest.mark.parametrize(
    "name",
    ["dropout, noisy", "noisy, accumulated", "own generator", "fresh, noisy", "packed, noisy"],
)
def test_cut_off_when_the_next_window_was_read_already(name: str, tmp_path: Path) -> None:
    """As for a GPU; the update draws random numbers too, behind those of that window's data."""

    def begun(seed: int, file: Path | None = None, **more: Any) -> Run:
        noise = Events(before_update=lambda grads: [g.add_(torch.randn_like(g)) for g in grads])
        run = Run(name, seed, file, events=noise, **more)
        run.updates._cursor.mover.aside = True
        return run

    once = begun(0).go()
    for cut in range(1, len(once.seen), 2):
        file = tmp_path / f"{cut}.pt"
        first = begun(0, file).go(cut)
        second = begun(7, file, resume=True).go()
        assert_same(first.seen + second.seen, once.seen)
        assert_same(second.left(), once.left())


def test_what_is_traced_anew_draws_nothing(tmp_path: Path) -> None:
    """As in another process: tracing a step with dropout leaves the random numbers alone."""
    seen, _ = whole("dropout")
    file = tmp_path / "run.pt"
    Run("dropout", 0, file).go(3)
    segment.cache_clear()
    second = Run("dropout", 7, file, resume=True).go()
    assert_same(second.seen, seen[3:])


def test_a_longer_run_goes_on_where_a_shorter_one_ended(tmp_path: Path) -> None:
    """Also in the data: its next epoch has the order that it would have had."""
    seen, left = whole("dropout, shuffled")
    first = Run("dropout, shuffled", 0, tmp_path / "run.pt", epochs=1).go()
    second = Run("dropout, shuffled", 7, tmp_path / "run.pt", resume=True).go()
    assert_same(first.seen + second.seen, seen)
    assert_same(second.left(), left)
    assert len(second.seen) == 2 * len(first.seen)


def test_history_and_time_go_on(tmp_path: Path) -> None:
    first = Run("plain", 0, tmp_path / "run.pt").go(2)
    seconds = load_checkpoint(tmp_path / "run.pt")["meter"]["seconds"]
    second = Run("plain", 7, tmp_path / "run.pt", resume=True)
    assert [report.index for report in second.updates.history] == [0, 1]
    assert second.updates.history == first.updates.history
    assert second.updates.seconds >= seconds > 0
    second.go()
    assert [report.index for report in second.updates.history] == list(range(6))
    assert second.updates.history[-1].seconds > seconds


def test_losses_that_were_not_reported_yet_are_not_lost(tmp_path: Path) -> None:
    once = Run("plain", 0, interval=1e6).go().updates.history
    Run("plain", 0, tmp_path / "run.pt", interval=1e6).go(4)
    resumed = Run("plain", 7, tmp_path / "run.pt", interval=1e6, resume=True).go()
    (report,) = resumed.updates.history
    assert (report.index, report.loss) == (once[0].index, once[0].loss)


def test_an_early_stop_is_not_forgotten(tmp_path: Path) -> None:
    """The script is run again after its run has ended, with no more patience and with more."""
    file = tmp_path / "run.pt"
    ended = Run("early stop", 0, file).go().updates.index
    assert ended == len(whole("early stop")[0]) < 9 * 6
    again = Run("early stop", 7, file, resume=True).go()
    assert not again.seen
    assert_same(again.left(), whole("early stop")[1])
    Run("early stop", 7, file, resume=True, stop=partial(EarlyStop, 5, 0.01)).go(1)
    assert load_checkpoint(file)["index"] == ended + 1

    def once(loss: float) -> bool:
        return True

    Run("plain", 0, tmp_path / "other.pt", stop=lambda: once).go()
    for _ in range(2):  # nor where it is saved again
        again = Run("plain", 7, tmp_path / "other.pt", resume=True, stop=lambda: once).go()
        assert not again.seen
        again.updates.save()
    assert len(Run("plain", 7, tmp_path / "other.pt", resume=True).go().seen) == 5


def test_what_the_caller_does_in_the_loop_is_saved(tmp_path: Path) -> None:
    """Learning rate, random numbers and notes of the caller, changed after an update was made."""

    def loop(run: Run, updates: int) -> list[float]:
        for update in run.updates:
            run.see(update)
            run.optimizer.param_groups[0]["lr"] *= 0.9
            drawn = float(torch.rand(())) + random.random() + numpy.random.rand()
            run.updates.extra.setdefault("drawn", []).append(drawn)
            if update.index == updates - 1:
                return run.updates.extra["drawn"]
        return run.updates.extra["drawn"]

    once = Run("dropout", 0)
    expected = loop(once, 99)
    # Left, or killed when the next update is asked for, where a checkpoint is due.
    left = tmp_path / "left.pt"
    loop(Run("dropout", 0, left), 3)
    killed = tmp_path / "killed.pt"
    run = Run("dropout", 0, killed, checkpoint_every=3)
    loop(run, 3)
    copies = load_checkpoint(killed)
    assert copies["extra"]["drawn"] == expected[:3]
    for file in (left, killed):
        second = Run("dropout", 7, file, resume=True)
        assert loop(second, 99) == expected
        assert_same(second.left(), once.left())


def test_a_checkpoint_is_due_every_so_many_updates(tmp_path: Path) -> None:
    run, found = Run("gaps", 0, tmp_path / "run.pt", checkpoint_every=3), []
    for _ in run.updates:
        file = tmp_path / "run.pt"
        found.append(load_checkpoint(file)["index"] if file.exists() else None)
    assert found == [None, None, None, 3, 3, 3, 6, 6]
    assert load_checkpoint(tmp_path / "run.pt")["index"] == 8
    assert load_checkpoint(previous(tmp_path / "run.pt"))["index"] == 6


def test_by_next_alone(tmp_path: Path) -> None:
    run = Run("plain", 0, tmp_path / "run.pt")
    run.see(next(run.updates))
    run.see(next(run.updates))
    run.updates.finish()
    assert next(run.updates, None) is None
    check("plain", run, tmp_path / "run.pt", 2)


def test_finished_within_a_loop(tmp_path: Path) -> None:
    run = Run("plain", 0, tmp_path / "run.pt")
    for update in run.updates:
        run.see(update)
        if update.index == 1:
            run.updates.finish()
            break
    assert next(run.updates, None) is None
    check("plain", run, tmp_path / "run.pt", 2)


def test_the_state_dict_of_a_run(tmp_path: Path) -> None:
    """Kept by the caller, without a file."""
    seen, left = whole("dropout, shuffled")
    first = Run("dropout, shuffled", 0).go(4)
    torch.save(first.updates.state_dict(), tmp_path / "own.pt")
    second = Run("dropout, shuffled", 7)
    second.updates.load_state_dict(torch.load(tmp_path / "own.pt", weights_only=True))
    second.go()
    assert_same(first.seen + second.seen, seen)
    assert_same(second.left(), left)
    with pytest.raises(RuntimeError, match="this run has no checkpoint"):
        first.updates.save()


@pytest.mark.parametrize("name", ["plain", "functional", "accumulated", "dropout, list"])
@pytest.mark.parametrize("interval", [0, 1e6])
def test_back_to_the_same_state_again_and_again(name: str, interval: float) -> None:
    """The state stays what it was; a run that has begun stays as it is."""
    first = Run(name, 0, interval=interval).go(3)
    saved = copy.deepcopy(first.updates.state_dict())
    with pytest.raises(
        RuntimeError, match=r"load_state_dict: this run has begun\. Call train_stre"
    ):
        first.updates.load_state_dict(saved)
    expected = first.go().seen[3:]
    for seed in (7, 8):
        run = Run(name, seed, interval=interval)
        run.updates.load_state_dict(saved)
        assert_same(run.go().seen, expected)


def test_what_is_loaded_is_not_what_the_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    older = Run("plain", 0).go(2).updates.state_dict()
    Run("plain", 0, file).go(4)
    assert load_checkpoint(file)["index"] == 4
    run = Run("plain", 7, file, resume=True)
    run.updates.load_state_dict(older)
    run.updates.finish()
    assert load_checkpoint(file)["index"] == 2


def test_two_runs_from_one_state() -> None:
    """Neither changes what the other computes with."""
    first = Run("plain", 0).go(2)
    second = Run("plain", 7)
    second.updates.load_state_dict(first.updates.state_dict())
    for run in (first, second, first, second):
        run.go(1)
    assert_same(first.seen[2:], second.seen)
    assert_same(first.seen, whole("plain")[0][:4])


class Reservoir(nn.Module):
    """A fixed random recurrence, and a buffer that is no part of the module's state."""

    weight: Tensor
    bias: Tensor
    gain: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.readout = nn.Linear(5, 4).double()
        self.register_buffer("weight", torch.randn(5, 5).double() / 3)
        self.register_buffer("bias", torch.randn(1).double().expand(5))  # cannot be written
        self.register_buffer("gain", torch.ones(()).double(), persistent=False)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x.sum(-1, keepdim=True) * self.gain + h @ self.weight + self.bias)
        return self.readout(h), h


def reservoir_run(module: nn.Module, file: Path, **options: Any) -> Stream:
    params = dict(module.named_parameters())
    data = stream(20)[0], torch.zeros(20, 2, 4).double()
    return train_stream(
        make_train_segment(module, lambda out, y: (out - y).square().mean(), backend="eager"),
        params, torch.zeros(2, 5).double(), data, torch.optim.SGD(params.values(), 0.1), k1=4,
        checkpoint=file, progress=False, **options,
    )  # fmt: skip


def test_buffers(tmp_path: Path) -> None:
    """A script without a seed draws another reservoir when it is started again."""
    first, second = Reservoir(0), Reservoir(1)
    next(iter(reservoir_run(first, tmp_path / "run.pt")))
    second.gain.fill_(2)
    reservoir_run(second, tmp_path / "run.pt", resume=True)
    assert torch.equal(second.weight, first.weight)
    assert torch.equal(second.bias, first.bias)
    assert second.gain == 2
    other = Reservoir(2)
    other.register_buffer("more", torch.ones(1))
    with pytest.raises(ValueError, match="buffers: found bias, more, weight, but in the chec"):
        reservoir_run(other, tmp_path / "run.pt", resume=True)


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer; its state has a form of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        self.fast = torch.optim.SGD(params, lr, momentum=0.9)
        super().__init__(self.fast.param_groups, {})
        self.param_groups = self.fast.param_groups
        self.count = 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fast.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.fast.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.fast.load_state_dict(state_dict["fast"])
        self.count = state_dict["count"]
        for slow, value in zip(self.slow, state_dict["slow"], strict=True):
            slow.copy_(value)


def test_an_optimizer_with_a_state_of_its_own_form(tmp_path: Path) -> None:
    def begun(seed: int, **more: Any) -> Run:
        make = partial(Lookahead, lr=0.3)
        return Run("plain", seed, optimizer=lambda params: make(params.values()), **more)

    seen = begun(0).go().seen
    first = begun(0, checkpoint=tmp_path / "run.pt").go(3)
    second = begun(7, checkpoint=tmp_path / "run.pt", resume=True).go()
    assert_same(first.seen + second.seen, seen)


def test_a_relative_file_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run("plain", 0, Path("run.pt"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    run.go(2)
    assert (tmp_path / "run.pt").exists()
    assert not any((tmp_path / "other").iterdir())


def test_without_a_file_the_run_starts_anew(tmp_path: Path) -> None:
    seen, left = whole("plain")
    run = Run("plain", 0, tmp_path / "new" / "folder" / "run.pt", resume=True).go()
    assert_same(run.seen, seen)
    assert_same(run.left(), left)
    assert load_checkpoint(tmp_path / "new" / "folder" / "run.pt")["index"] == 6


@pytest.mark.parametrize("cut", [3, 13])
@pytest.mark.parametrize("same_loader", [False, True])
def test_workers_that_are_kept(cut: int, same_loader: bool, tmp_path: Path) -> None:
    """Starting them draws a random number, so where they are there an epoch has another order."""

    def loader() -> DataLoader:
        return DataLoader(
            Pieces(noise=False), batch_size=None, shuffle=True, num_workers=1,
            persistent_workers=True,
        )  # fmt: skip

    def run(data: DataLoader, seed: int, **more: Any) -> Run:
        made = Run("dropout, shuffled", seed, tmp_path / "run.pt", data=data, **more)
        return made

    once = run(loader(), 0).go()
    data = loader()
    first = run(data, 0, resume=False).go(cut)
    assert_same(first.seen, once.seen[:cut])
    second = run(data if same_loader else loader(), 7, resume=True).go()
    assert_same(second.seen, once.seen[cut:])


def test_fewer_steps_than_before_are_refused(tmp_path: Path) -> None:
    Run("plain", 0, tmp_path / "run.pt").go(4)
    short = Run("plain", 7, tmp_path / "run.pt", resume=True, data=stream(15))
    with pytest.raises(ValueError, match="made after 16 steps of an epoch, but there are only 15"):
        short.go()


def test_saved_before_the_first_update(tmp_path: Path) -> None:
    """Data that comes in chunks has drawn nothing by then."""
    first = Run("dropout, shuffled", 0, tmp_path / "run.pt")
    first.updates.save()
    second = Run("dropout, shuffled", 7, tmp_path / "run.pt", resume=True).go()
    assert_same(second.seen, whole("dropout, shuffled")[0])


@pytest.mark.parametrize("name", ["plain", "dropout, list", "dropout, shuffled"])
def test_the_state_dict_of_a_run_without_an_update(name: str) -> None:
    saved = copy.deepcopy(Run(name, 0).updates.state_dict())
    run = Run(name, 7)
    run.updates.load_state_dict(saved)
    assert_same(run.go().seen, whole(name)[0])


@pytest.mark.parametrize("given", [True, False])
def test_a_state_that_the_segment_knows(given: bool, tmp_path: Path) -> None:
    """Of named tuples there are lists in a checkpoint; the segment has the structure."""
    start = MODULES["counting"][2]()
    seen = []
    for cuts in ((None,), (3, None)):
        torch.manual_seed(0)
        module = MODULES["counting"][0]()
        params = dict(module.named_parameters())
        train_segment = make_train_segment(
            module, mean_cross_entropy, backend="eager",
            initial_state=start if given else lambda params: start,
        )  # fmt: skip
        losses: list[Tensor] = []
        for updates in cuts:
            run = train_stream(
                train_segment, params, None, stream(22), torch.optim.SGD(params.values(), 0.1),
                k1=3, k2=5, progress=False, checkpoint=tmp_path / f"{len(cuts)}.pt", resume=True,
                updates=updates,
            )  # fmt: skip
            losses += [update.loss for update in run]
        seen.append(losses)
    assert len(seen[0]) == 8
    assert_same(*seen)


@pytest.mark.parametrize("given", [True, False])
def test_without_parameters(given: bool, tmp_path: Path) -> None:
    class Nothing:
        def init(self, params: Any) -> Any:
            return None

        def update(self, grads: Any, state: Any, params: Any) -> Any:
            return params, state

    def step(params: Any, x_t: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return total + x_t, total + x_t

    own = make_train_segment(
        step, lambda out, y: out.mean(), backend="eager", initial_state=torch.zeros(2)
    )
    state = torch.zeros(2) if given else None
    for epochs in (1, 2):
        run = train_stream(
            own, {}, state, (torch.ones(8, 2), None), Nothing(), k1=4, epochs=epochs,
            progress=False, checkpoint=tmp_path / "run.pt", resume=True,
        )  # fmt: skip
        assert [float(update.loss) for update in run] == [2.5, 6.5]


def test_saved_before_it_goes_on(tmp_path: Path) -> None:
    """Once more a run from elsewhere: what it has written is not taken for another's."""
    first = Run("plain", 0).go(3)
    run = Run("plain", 7, tmp_path / "run.pt")
    run.updates.load_state_dict(first.updates.state_dict())
    run.updates.save()
    assert_same(run.go().seen, whole("plain")[0][3:])


def test_fewer_epochs_than_it_has_had(tmp_path: Path) -> None:
    """It makes no update more, also where the epoch that it was in has not ended."""
    file = tmp_path / "run.pt"
    Run("plain", 0, file, epochs=None).go(8)
    content = load_checkpoint(file)
    assert (content["index"], content["place"][0]) == (8, 1)
    assert Run("plain", 7, file, resume=True, epochs=1).go().seen == []
    assert [seen[:2] for seen in Run("plain", 7, file, resume=True, epochs=2).go().seen] == [
        (index, 1) for index in range(8, 12)
    ]
