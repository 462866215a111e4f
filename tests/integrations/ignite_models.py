"""Models that take chunks, with nested hidden states, for the tests of the trainer for Ignite."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

D, H, OUT = 3, 5, 2
Tree = Any


def batches(count: int, steps: int = 10) -> list[tuple[Tensor, Tensor]]:
    """x[10, 3, 3] and y[10, 3, 2]."""
    draw = torch.Generator().manual_seed(7)
    return [
        (torch.randn(steps, 3, D, generator=draw).double(),
         torch.randn(steps, 3, OUT, generator=draw).double())
        for _ in range(count)
    ]  # fmt: skip


class Plain(nn.Module):
    def __init__(self, kind: Any = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.rnn, self.readout = kind(D, H, **options), nn.Linear(H, OUT)

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        out, hidden = self.rnn(x, hidden)
        return self.readout(out), hidden


class Cells(nn.Module):
    """A loop over cells, its state a nested list in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.GRUCell(D, H), nn.LSTMCell(H, H)
        self.readout = nn.Linear(H, OUT)

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        if hidden is None:
            zero = x.new_zeros(x.shape[1], H)
            hidden = {"low": zero, "high": [zero, [zero]]}
        low, (h, (c,)) = hidden["low"], hidden["high"]
        outs = []
        for x_t in x:
            low = self.low(x_t, low)
            h, c = self.high(low, (h, c))
            outs.append(self.readout(h))
        return torch.stack(outs), {"low": low, "high": [h, [c]]}


class Pair(NamedTuple):
    h: Tensor
    c: Tensor


class Named(Plain):
    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        out, (h, c) = super().forward(x, None if hidden is None else tuple(hidden))
        return out, OrderedDict(state=Pair(h, c))["state"]


class Counted(nn.Module):
    """A state of floats and an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = Plain(nn.GRU)

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        inner, steps = (None, torch.zeros((), dtype=torch.long)) if hidden is None else hidden
        out, inner = self.plain(x, inner)
        return out / (1 + 0 * steps), (inner, steps + len(x))


class LearnedStart(Plain):
    def __init__(self) -> None:
        super().__init__(nn.GRU)
        self.start = nn.Parameter(torch.zeros(1, 1, H))

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        if hidden is None:
            hidden = self.start.expand(1, x.shape[1], H).contiguous()
        return super().forward(x, hidden)


class Counting(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        self.calls += 1
        return super().forward(x, hidden)


class Logging(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        out, hidden = super().forward(x, hidden)
        self.log.append(1.0)
        return out, hidden


class Printing(Plain):
    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        print("forward")
        return super().forward(x, hidden)


SEEN: list[int] = []


class Global(Plain):
    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        self._count(x)
        return super().forward(x, hidden)

    def _count(self, x: Tensor) -> None:
        SEEN.append(len(x))


class TeacherForcing(Plain):
    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        if random.random() < 0.5:
            x = 0.5 * x
        return super().forward(x, hidden)


class BatchNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        return super().forward(self.norm(x.flatten(0, 1)).view_as(x), hidden)


class NormOverTime(Plain):
    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        return super().forward(x - x.mean(0, keepdim=True), hidden)


class Convolution(Plain):
    """Over time, with weights of zero: only its gradient shows the difference."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1)
        nn.init.zeros_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        mixed = self.conv(x.permute(1, 2, 0)).permute(2, 0, 1)
        return super().forward(x + mixed, hidden)


class Attention(Plain):
    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        rows = x.transpose(0, 1)
        mixed = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        return super().forward(mixed.transpose(0, 1), hidden)


class ConvolutionBehindNoise(Plain):
    """Noise that drops everything, as some constants make it do, hides what comes after it."""

    def __init__(self, below: bool) -> None:
        super().__init__()
        self.below = below
        self.conv = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        noise = torch.rand_like(x)
        x = x * (noise < 0.5 if self.below else noise > 0.5)
        return super().forward(self.conv(x.permute(1, 2, 0)).permute(2, 0, 1), hidden)


def count_calls(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        run.calls += 1  # type: ignore[attr-defined]
        return function(*args)

    run.calls = 0  # type: ignore[attr-defined]
    return run


class Decorated(Plain):
    @count_calls
    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        return super().forward(x, hidden)


class ClassCounter(Plain):
    count = 0

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        ClassCounter.count += 1
        return super().forward(x, hidden)


class Tied(nn.Module):
    """A module with two names, and a parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, H, bias=False)
        self.again = self.inner
        self.rnn, self.readout = nn.GRU(H, H), nn.Linear(H, OUT)
        self.same = self.readout.weight

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        out, hidden = self.rnn(self.inner(x) + self.again(x.square()), hidden)
        return out @ self.same.T + self.readout(out), hidden


class Branching(Plain):
    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        if x.sum().item() > 0:
            x = -x
        return super().forward(x, hidden)


class LockedDropout(Plain):
    """One mask for all steps of a chunk."""

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        mask = torch.rand(1, *x.shape[1:], dtype=x.dtype) < 0.5
        return super().forward(x * mask, hidden)


class Sparse(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, D, sparse=True)

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        return super().forward(x + self.embedding((x[..., 0] > 0).long()), hidden)


def weight_normed() -> nn.Module:
    model = Plain()
    nn.utils.parametrizations.weight_norm(model.readout)
    return model


class Stateless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.readout = nn.Linear(D, OUT)

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        return self.readout(x), None


class Bidirectional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.readout = nn.LSTM(D, H, bidirectional=True), nn.Linear(2 * H, OUT)

    def forward(self, x: Tensor, hidden: Tree = None) -> tuple[Tensor, Tree]:
        out, hidden = self.rnn(x, hidden)
        return self.readout(out), hidden


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    reason: str = ""  # why it is not compiled
    dim: int = 0
    without_state: str = ""  # why chunks without a hidden state are not compiled

    @property
    def compiles(self) -> bool:
        return not self.reason


MODELS = {
    "LSTM": Model(Plain),
    "two layers of GRU": Model(lambda: Plain(nn.GRU, num_layers=2)),
    "batch first": Model(lambda: Plain(nn.LSTM, batch_first=True), dim=1),
    "batch first, counted from the end": Model(lambda: Plain(nn.LSTM, batch_first=True), dim=-2),
    "cells, nested state": Model(Cells),
    "named tuple": Model(Named),
    "integer in the state": Model(Counted),
    "learned start": Model(LearnedStart, without_state="the gradient of start differs by 100 %"),
    "tied parameters": Model(Tied),
    "weight norm": Model(lambda: weight_normed()),
    "counter": Model(Counting, "changes the attribute 'calls' of Counting"),
    "list": Model(Logging, "changes the attribute 'log' of Logging"),
    "print": Model(Printing, "prints or logs"),
    "global list": Model(Global, "changes the global variable 'SEEN'"),
    "Python's random numbers": Model(TeacherForcing, "draws from Python's"),
    "decorator that counts": Model(Decorated, "changes the attribute 'calls' of the function"),
    "counter in the class": Model(
        ClassCounter, "changes the attribute 'count' of the class ClassCounter"
    ),
    "batch norm": Model(
        BatchNorm, "changes the attribute '(num_batches_tracked|running_\\w+)' of norm"
    ),
    "norm over time": Model(NormOverTime, "several steps at once"),
    "convolution": Model(Convolution, "several steps at once"),
    "attention": Model(Attention, "several steps at once"),
    "branch on a value": Model(Branching, "cannot be compiled: it needs the value of a tensor"),
    "locked dropout": Model(LockedDropout, "several steps share them"),
    "convolution behind noise": Model(lambda: ConvolutionBehindNoise(True), "several steps at"),
    "and behind its opposite": Model(lambda: ConvolutionBehindNoise(False), "several steps at"),
    "sparse gradients": Model(Sparse, "sparse gradients"),
    "no state": Model(Stateless, "hidden state holds a NoneType"),
    "both directions": Model(Bidirectional, "bidirectional=True"),
}


def model_of(name: str) -> tuple[Any, list[tuple[Tensor, Tensor]], int]:
    """A model, batches for it, and the axis of time."""
    entry = MODELS[name]
    torch.manual_seed(0)
    random.seed(0)
    data = batches(3)
    if entry.dim:
        data = [(x.transpose(0, 1), y.transpose(0, 1)) for x, y in data]
    return entry.make().double(), data, entry.dim
