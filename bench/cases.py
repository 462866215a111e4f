"""What is timed: a recurrent step, a loss and the data of one segment, for each case.

Every peer computes the same thing for a case: the forward pass from a zero state, the mean squared
error, and the gradients of all parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Tree = Any


@dataclass(frozen=True)
class Case:
    """A step's kind and its sizes: K steps, B rows, D inputs (and outputs), H units, L layers."""

    name: str
    kind: str  # "lstm", "lnlstm" or "gru": a key of MODELS
    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int = 1
    per_sequence: bool = False  # under vmap, one gradient for each of the B sequences
    unrolled: bool = False  # K is small enough for torch.compile of the unrolled loop
    recompute: bool = False  # also time the engine with recompute=True

    @property
    def title(self) -> str:
        sizes = f"T={self.steps} B={self.batch} D={self.inputs} H={self.hidden}"
        cell = {"lstm": "LSTM", "lnlstm": "layer-norm LSTM", "gru": "GRU"}[self.kind]
        cell = cell if self.layers == 1 else f"{self.layers}-layer {cell}"
        return (
            f"vmap over {self.batch} {cell}s, {sizes}" if self.per_sequence else f"{cell} {sizes}"
        )


class LSTM(nn.Module):
    """One nn.LSTMCell and a linear readout."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(case.inputs, case.hidden)
        self.readout = nn.Linear(case.hidden, case.inputs)

    def forward(self, x_t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tree]:
        h, c = self.cell(x_t, state)
        return self.readout(h), (h, c)


class LayerNormLSTM(nn.Module):
    """An LSTM with layer norm on both projections and on the cell, and a linear readout."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        gates = 4 * case.hidden
        self.from_x = nn.Linear(case.inputs, gates)
        self.from_h = nn.Linear(case.hidden, gates, bias=False)
        self.norm_x, self.norm_h = nn.LayerNorm(gates), nn.LayerNorm(gates)
        self.norm_c = nn.LayerNorm(case.hidden)
        self.readout = nn.Linear(case.hidden, case.inputs)

    def forward(self, x_t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tree]:
        h, c = state
        gates = self.norm_x(self.from_x(x_t)) + self.norm_h(self.from_h(h))
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(self.norm_c(c))
        return self.readout(h), (h, c)


class GRU(nn.Module):
    """A stack of nn.GRUCells and a linear readout."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        sizes = [case.inputs, *[case.hidden] * case.layers]
        self.cells = nn.ModuleList(map(nn.GRUCell, sizes[:-1], sizes[1:]))
        self.readout = nn.Linear(case.hidden, case.inputs)

    def forward(self, x_t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, Tree]:
        after: list[Tensor] = []
        for cell, h in zip(self.cells, state, strict=True):
            x_t = cell(x_t, h)
            after.append(x_t)
        return self.readout(x_t), tuple(after)


MODELS: dict[str, type[nn.Module]] = {"lstm": LSTM, "lnlstm": LayerNormLSTM, "gru": GRU}

CASES = (
    Case("lstm", "lstm", 64, 32, 64, 128, unrolled=True, recompute=True),
    Case("lstm-one-row", "lstm", 100, 1, 8, 50),
    Case("lstm-small", "lstm", 64, 16, 16, 32),
    Case("lstm-large", "lstm", 32, 256, 32, 256, unrolled=True),
    Case("layer-norm-lstm", "lnlstm", 64, 32, 64, 128),
    Case("gru-3-layers", "gru", 64, 32, 64, 128, layers=3),
    Case("vmap-64", "lstm", 32, 64, 16, 32, per_sequence=True),
    Case("lstm-long", "lstm", 1024, 32, 64, 128, recompute=True),
)
QUICK = ("lstm", "lstm-one-row", "vmap-64")


@dataclass(frozen=True)
class Problem:
    """A case with its numbers. With ``per_sequence``, the rows come first: x[B, K, D]."""

    case: Case
    model: nn.Module
    state: tuple[Tensor, ...]
    x: Tensor
    y: Tensor

    @property
    def params(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())


def loss(out: Tensor, y: Tensor) -> Tensor:
    """Mean squared error."""
    return (out - y).square().mean()


def build(case: Case, dtype: torch.dtype = torch.float32) -> Problem:
    """The case's numbers, the same in every process; drawn in float32, then converted."""
    torch.manual_seed(0)
    model = MODELS[case.kind](case).to(dtype)
    shape = (case.steps, case.batch, case.inputs)
    x, y = torch.randn(shape), torch.randn(shape)
    if case.per_sequence:
        x, y = x.movedim(1, 0).contiguous(), y.movedim(1, 0).contiguous()
    leaves = case.layers if case.kind == "gru" else 2
    state = tuple(torch.zeros(case.batch, case.hidden, dtype=dtype) for _ in range(leaves))
    return Problem(case, model, state, x.to(dtype), y.to(dtype))
