"""The recurrent cells that are timed, and the model around them: a stack and a linear readout.

A cell is called like torch's, ``cell(x_t, (h, c)) -> (h, c)`` or ``cell(x_t, h) -> h``. Each
follows its paper, without optimizations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Tree = Any


class LayerNormLSTM(nn.Module):
    """An LSTM with layer norm on both projections and on the cell."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_x = nn.Linear(inputs, 4 * hidden)
        self.from_h = nn.Linear(hidden, 4 * hidden, bias=False)
        self.norm_x, self.norm_h = nn.LayerNorm(4 * hidden), nn.LayerNorm(4 * hidden)
        self.norm_c = nn.LayerNorm(hidden)

    def forward(self, x_t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        gates = self.norm_x(self.from_x(x_t)) + self.norm_h(self.from_h(h))
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(self.norm_c(c)), c


class PeepholeLSTM(nn.Module):
    """An LSTM whose gates see the cell: i and f before the step, o after it (Gers et al. 2000)."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_x = nn.Linear(inputs, 4 * hidden)
        self.from_h = nn.Linear(hidden, 4 * hidden, bias=False)
        bound = hidden**-0.5
        self.peep_i = nn.Parameter(torch.empty(hidden).uniform_(-bound, bound))
        self.peep_f = nn.Parameter(torch.empty(hidden).uniform_(-bound, bound))
        self.peep_o = nn.Parameter(torch.empty(hidden).uniform_(-bound, bound))

    def forward(self, x_t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = (self.from_x(x_t) + self.from_h(h)).chunk(4, dim=-1)
        i, f = torch.sigmoid(i + self.peep_i * c), torch.sigmoid(f + self.peep_f * c)
        c = f * c + i * torch.tanh(g)
        return torch.sigmoid(o + self.peep_o * c) * torch.tanh(c), c


class ChoGRU(nn.Module):
    """The GRU of Cho et al. 2014, which resets h before the product; nn.GRU does so after it."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_x = nn.Linear(inputs, 3 * hidden)
        self.from_h = nn.Linear(hidden, 2 * hidden, bias=False)
        self.from_reset = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_t: Tensor, h: Tensor) -> Tensor:
        xr, xz, xn = self.from_x(x_t).chunk(3, dim=-1)
        hr, hz = self.from_h(h).chunk(2, dim=-1)
        r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        return z * h + (1 - z) * torch.tanh(xn + self.from_reset(r * h))


class MinGRU(nn.Module):
    """The GRU of Feng et al. 2024: the gate and the candidate see the input alone."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.candidate = nn.Linear(inputs, hidden), nn.Linear(inputs, hidden)

    def forward(self, x_t: Tensor, h: Tensor) -> Tensor:
        z = torch.sigmoid(self.gate(x_t))
        return (1 - z) * h + z * self.candidate(x_t)


@dataclass(frozen=True)
class Kind:
    """A cell, what to call it, and the sizes of its products, in units of H columns."""

    label: str
    cell: Callable[[int, int], nn.Module]  # of inputs and hidden
    leaves: int  # of the state: h, or h and c
    from_x: int
    from_h: tuple[int, ...]  # those that need the step before, one after the other


KINDS = {
    "lstm": Kind("LSTM", nn.LSTMCell, 2, 4, (4,)),
    "lnlstm": Kind("layer-norm LSTM", LayerNormLSTM, 2, 4, (4,)),
    "peephole": Kind("peephole LSTM", PeepholeLSTM, 2, 4, (4,)),
    "gru": Kind("GRU", nn.GRUCell, 1, 3, (3,)),
    "chogru": Kind("Cho GRU", ChoGRU, 1, 3, (2, 1)),
    "mingru": Kind("minGRU", MinGRU, 1, 2, ()),
}


class Stack(nn.Module):
    """Layers of one kind of cell and a linear readout to as many outputs as there are inputs."""

    def __init__(self, kind: Kind, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        sizes = [inputs, *[hidden] * layers]
        self.cells = nn.ModuleList(map(kind.cell, sizes[:-1], sizes[1:]))
        self.readout = nn.Linear(hidden, inputs)

    def forward(self, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        after = []
        for cell, layer_state in zip(self.cells, state, strict=True):
            layer_state = cell(x_t, layer_state)
            x_t = layer_state[0] if isinstance(layer_state, tuple) else layer_state
            after.append(layer_state)
        return self.readout(x_t), tuple(after)
