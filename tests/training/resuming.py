"""A table of runs that can be started anew, in this process or another, and what they leave."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from ftbptt import TrainSegment, make_train_segment
from ftbptt.training import (
    ChainedOptimizer,
    Chunk,
    ContiguousStreams,
    EarlyStop,
    PackedSequences,
    load_checkpoint,
    train_stream,
)

from .streams import Tagger, cross_entropy, mean_cross_entropy, stream, zeros

Tree = Any
Params = dict[str, Tensor]
Carried = namedtuple("Carried", "h count")


class FunctionalAdam:
    """Adam as two pure functions; its state is nested, and has a number in it."""

    def init(self, params: Params) -> Tree:
        return {"t": 0, "moments": tree_map(lambda p: (torch.zeros_like(p),) * 2, params)}

    def update(self, grads: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        t, moments, new = state["t"] + 1, {}, {}
        for name, grad in grads.items():
            m, v = state["moments"][name]
            m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad * grad
            moments[name] = m, v
            step = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
            new[name] = params[name].detach() - 0.02 * step
        return new, {"t": t, "moments": moments}


# -- modules: what makes one, its loss, and the state a run begins with ---------------------------


class Counting(nn.Module):
    """Its state is a dict around a named tuple, and has whole numbers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 5)
        self.readout = nn.Linear(5, 4)
        self.double()

    def forward(self, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h = self.cell(x_t, state["inner"].h)
        count = state["inner"].count + 1
        return self.readout(h), {"sum": state["sum"] + h.sum(1), "inner": Carried(h, count)}


def _counted() -> Tree:
    inner = Carried(torch.zeros(2, 5).double(), torch.zeros(2, 1, dtype=torch.int64))
    return {"sum": torch.zeros(2).double(), "inner": inner}


def _float_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return mean_cross_entropy(out.float(), y)


MODULES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Tree]]] = {
    "tagger": (Tagger, mean_cross_entropy, zeros),
    "masked": (Tagger, cross_entropy, zeros),
    "half": (lambda: Tagger().float(), _float_cross_entropy, lambda: tree_map(_single, zeros())),
    "counting": (Counting, mean_cross_entropy, _counted),
    "dropout": (lambda: nn.LSTM(3, 4, 2, dropout=0.5).double(), mean_cross_entropy, lambda: None),
    "tokens": (lambda: Embedded(), mean_cross_entropy, zeros),
}


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.tagger = Tagger(classes=7)
        self.double()

    def forward(self, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        out: tuple[Tensor, Tree] = self.tagger(self.embedding(x_t), state)
        return out


def _single(leaf: Tensor) -> Tensor:
    return leaf.float()


@cache
def segment(module: str) -> TrainSegment:
    make, loss, _ = MODULES[module]
    return make_train_segment(make(), loss, backend="eager")


# -- data -----------------------------------------------------------------------------------------

LENGTHS = (5, 1, 9, 3, 7)

# For tests of chunks in a random order, through which the state is carried as it comes.
IN_RANDOM_ORDER = pytest.mark.filterwarnings("ignore:data. the chunks come in a random order")


class Pieces(Dataset):
    """Ragged chunks; each time one is asked for, its noise is another."""

    def __init__(self, noise: bool) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = stream(LENGTHS[i], seed=10 + i)
        if self.noise:
            x = x + torch.randn(x.shape[0], 1, 1) + random.random() + numpy.random.rand()
        return x, y


class BySet:
    """An order of its own in each epoch, which it is told."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        pieces = Pieces(noise=False)
        order = torch.randperm(5, generator=torch.Generator().manual_seed(self.epoch))
        return iter([pieces[i] for i in order.tolist()])


def _loader(noise: bool = False, seed: int | None = None) -> DataLoader:
    own = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(Pieces(noise), batch_size=None, shuffle=True, generator=own)


def _by_batches() -> DataLoader:
    """The generator is that of a sampler within the sampler."""
    pieces = Pieces(noise=False)
    order = RandomSampler(pieces, generator=torch.Generator().manual_seed(4))
    return DataLoader(pieces, batch_sampler=BatchSampler(order, 1, False), collate_fn=itemgetter(0))


def _packed() -> PackedSequences:
    sequences = [
        tuple(part[:, 0] for part in stream(n, rows=1, seed=n)) for n in (6, 3, 8, 2, 5, 4)
    ]
    return PackedSequences(sequences, rows=2, seed=3)


class NoisySequences(Dataset):
    """Each time one is asked for, its noise is another."""

    lengths = (6, 3, 8, 2, 5, 4)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = stream(self.lengths[i], rows=1, seed=i)
        return x[:, 0] + torch.randn(3) + numpy.random.rand(), y[:, 0]

    def __len__(self) -> int:
        return len(self.lengths)


def _noisy_sequences() -> PackedSequences:
    return PackedSequences(NoisySequences(), rows=2, lengths=NoisySequences.lengths)


def _resetting() -> Chunk:
    x, y = stream(22)
    return Chunk(x, y, torch.rand(22, 2, generator=torch.Generator().manual_seed(3)) < 0.2)


DATA: dict[str, Callable[[], Any]] = {
    "tensors": lambda: stream(22),
    "singles": lambda: tuple(p.float() if p.is_floating_point() else p for p in stream(22)),
    "resets": _resetting,
    "list": lambda: [Pieces(noise=False)[i] for i in range(5)],
    "shuffled": _loader,
    "noisy": partial(_loader, noise=True),
    "own generator": partial(_loader, seed=4),
    "by epoch": BySet,
    "by batches": _by_batches,
    "packed": _packed,
    "packed, noisy": _noisy_sequences,
    "generator": lambda: (Pieces(noise=True)[i] for i in range(5)),
    "contiguous": lambda: ContiguousStreams(
        torch.randint(7, (41,), generator=torch.Generator().manual_seed(6)), rows=2
    ),
}


# -- runs -----------------------------------------------------------------------------------------


def _sgd(params: Params) -> Any:
    return torch.optim.SGD(params.values(), lr=0.3, momentum=0.9)


def _adam(params: Params) -> Any:
    names = list(params)
    return torch.optim.Adam(
        [{"params": [params[name] for name in names[:2]], "lr": 0.03},
         {"params": [params[name] for name in names[2:]], "weight_decay": 0.1}], lr=0.01,
    )  # fmt: skip


def _chained(params: Params) -> Any:
    of_matrices = torch.optim.Muon([p for p in params.values() if p.ndim == 2], lr=0.02)
    return ChainedOptimizer(of_matrices, _adam({n: p for n, p in params.items() if p.ndim != 2}))


def _functional(params: Params) -> Any:
    return FunctionalAdam()


def _one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=40)


def _in_turn(optimizer: Any) -> Any:
    rates = torch.optim.lr_scheduler
    warm = rates.LinearLR(optimizer, 0.1, total_iters=3)
    return rates.SequentialLR(optimizer, [warm, rates.MultiStepLR(optimizer, [1, 3])], [3])


def _cosine(optimizer: Any) -> Any:
    """Its rates are NumPy's numbers."""
    return LambdaLR(optimizer, lambda update: 0.5 + 0.5 * numpy.cos(update))


def _plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def _scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)


# module, data, optimizer, and what train_stream is given besides.
RUNS: dict[str, tuple[str, str, Callable[[Params], Any], dict[str, Any]]] = {
    "plain": ("tagger", "tensors", _sgd, {"k1": 4}),
    "overlapping": ("tagger", "tensors", _adam, {"k1": 3, "k2": 7}),
    "burn-in": ("tagger", "resets", _sgd, {"k1": 3, "k2": 4, "burn_in": 5, "context": 1}),
    "gaps": ("tagger", "tensors", _adam, {"k1": 5, "k2": 2, "epochs": 2}),
    "fresh": ("tagger", "tensors", _sgd, {"k1": 3, "burn_in": 2, "fresh": True}),
    "fresh, list": ("tagger", "list", _sgd, {"k1": 4, "k2": 9, "fresh": True, "epochs": 2}),
    "fresh, noisy": ("tagger", "noisy", _sgd, {"k1": 2, "k2": 4, "burn_in": 3, "fresh": True}),
    "chained": ("tagger", "tensors", _chained, {"k1": 4, "epochs": 2, "scheduler": _in_turn}),
    "functional": ("tagger", "tensors", _functional, {"k1": 4, "ema_decay": 0.8}),
    "accumulated": ("tagger", "tensors", _adam, {"k1": 2, "accumulate": 3, "epochs": 2}),
    "micro-batches": ("tagger", "tensors", _sgd, {"k1": 3, "k2": 5, "micro_batches": 2}),
    "scheduled": ("tagger", "tensors", _sgd, {"k1": 4, "epochs": 2, "scheduler": _one_cycle}),
    "by NumPy": ("tagger", "by batches", _sgd, {"k1": 4, "epochs": 2, "scheduler": _cosine}),
    "in turn": ("tagger", "tensors", _adam, {"k1": 4, "epochs": 2, "scheduler": _in_turn}),
    "plateau": ("tagger", "tensors", _sgd, {"k1": 4, "epochs": 2, "scheduler": _plateau}),
    "clipped, averaged": (
        "tagger", "tensors", _adam,
        {"k1": 4, "clip_norm": 0.1, "clip_value": 0.02, "ema_decay": 0.9},
    ),
    "scaled": (
        "half", "singles", _sgd,
        {"k1": 4, "epochs": 2, "autocast": torch.float16, "scaler": _scaler,
         "scheduler": _one_cycle},
    ),
    "early stop": (
        "tagger", "tensors", partial(torch.optim.SGD, lr=0.9),
        {"k1": 4, "epochs": 9, "stop": partial(EarlyStop, 3, 0.01)},
    ),
    "nested state": ("counting", "tensors", _sgd, {"k1": 3, "k2": 5}),
    "dropout": ("dropout", "tensors", _adam, {"k1": 4, "k2": 6, "epochs": 2}),
    "dropout, list": ("dropout", "list", _sgd, {"k1": 4, "epochs": 2}),
    "dropout, shuffled": ("dropout", "shuffled", _sgd, {"k1": 4, "epochs": 3}),
    "dropout, noisy": ("dropout", "noisy", _sgd, {"k1": 2, "k2": 3, "epochs": 2}),
    "noisy, accumulated": ("tagger", "noisy", _sgd, {"k1": 3, "accumulate": 2, "epochs": 2}),
    "own generator": ("tagger", "own generator", _sgd, {"k1": 4, "epochs": 3}),
    "by epoch": ("tagger", "by epoch", _sgd, {"k1": 4, "epochs": 3}),
    "packed": ("masked", "packed", _adam, {"k1": 4, "epochs": 3}),
    "packed, noisy": ("masked", "packed, noisy", _sgd, {"k1": 3, "k2": 5, "epochs": 2}),
    "generator": ("tagger", "generator", _sgd, {"k1": 3, "k2": 7}),
    "contiguous": ("tokens", "contiguous", _adam, {"k1": 3, "k2": 7, "context": 4, "epochs": 2}),
}  # fmt: skip


class Run:
    """A run with everything in it made anew; the same one if the seed is, or if it is resumed."""

    def __init__(self, name: str, seed: int, checkpoint: Path | None = None, **more: Any) -> None:
        module, data, optimizer, options = RUNS[name]
        train_segment = segment(module)
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        make, _, state = MODULES[module]
        self.params = dict(make().named_parameters())
        takes_names = optimizer in (_sgd, _adam, _chained, _functional)
        given = self.params if takes_names else self.params.values()
        self.optimizer = more.pop("optimizer", optimizer)(given)
        options = {"interval": 0, "progress": False, "checkpoint": checkpoint} | options | more
        self.scheduler = self.scaler = self.stop = None
        if options.get("scheduler"):
            self.scheduler = options["scheduler"] = options["scheduler"](self.optimizer)
        if options.get("scaler"):
            self.scaler = options["scaler"] = options["scaler"]()
        if options.get("stop"):
            self.stop = options["stop"] = options["stop"]()
        own = options.pop("data", None) or DATA[data]()
        self.updates = train_stream(
            train_segment, self.params, state(), own, self.optimizer, **options
        )
        self.seen: list[Any] = []

    def go(self, updates: int | None = None) -> Run:
        """So many updates, and what the caller sees of them."""
        if updates == 0:
            return self
        for n, update in enumerate(self.updates, 1):
            self.see(update)
            if n == updates:
                break
        return self

    def see(self, update: Any) -> None:
        self.seen.append(
            (update.index, update.epoch, update.position, update.loss.clone(),
             update.grad_norm.clone(), tree_map(Tensor.clone, update.state))
        )  # fmt: skip

    def left(self) -> dict[str, Any]:
        """All that is left of it."""
        parts = {
            "params": self.updates.params,
            "optimizer": self.optimizer.state_dict()
            if isinstance(self.optimizer, torch.optim.Optimizer)
            else self.updates._learner.opt_state,
            "ema": self.updates.ema_params,
            "state": self.updates.state,
            "index": self.updates.index,
            "history": [(r.index, r.epoch, r.position, r.loss, r.grad_norm, r.learning_rate)
                        for r in self.updates.history],
        }  # fmt: skip
        for name in ("scheduler", "scaler", "stop"):
            own = getattr(self, name)
            parts[name] = None if own is None else own.state_dict()
        return parts


def assert_same(found: Any, expected: Any) -> None:
    """Bit for bit."""
    a, b = tree_leaves(found), tree_leaves(expected)
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other or (one != one and other != other)


@cache
def whole(name: str) -> tuple[list[Any], dict[str, Any]]:
    """What is seen of a run that is not cut off, and what is left of it."""
    run = Run(name, seed=0).go()
    return run.seen, run.left()


def check(name: str, first: Run, file: Path, cut: int, **more: Any) -> None:
    """The file is of the run after ``cut`` updates, and the rest of it is as if in one go."""
    seen, left = whole(name)
    assert load_checkpoint(file)["index"] == cut
    assert_same(first.seen, seen[: len(first.seen)])
    second = Run(name, 7, file, resume=True, **more).go()
    assert_same(second.seen, seen[cut:])
    assert_same(second.left(), left)
