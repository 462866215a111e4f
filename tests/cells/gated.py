"""Hand-written recurrent cells of the gated family, as modules and as functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .problems import (
    HEADS,
    OUT,
    UNITS,
    VOCABULARY,
    B,
    D,
    Draw,
    H,
    Problem,
    cell,
    cross_entropy,
    cross_entropy_per_row,
    mse,
    named,
    per_row,
    per_step,
)

Tree = Any


@cell
def elman(draw: Draw) -> Problem:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t @ params["w"] + h @ params["u"] + params["b"])
        return h @ params["v"], h

    params = {"w": draw(D, H), "u": draw(H, H), "b": draw(H), "v": draw(H, OUT)}
    return Problem(step, params, draw(B, H), draw.sequence(B, D), draw.sequence(B, OUT), mse)


@cell
def elman_one_sequence(draw: Draw) -> Problem:
    """Written for one sequence: no rows anywhere."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(params["w"] @ x_t + params["u"] @ h + params["b"])
        return params["v"] @ h, h

    params = {"w": draw(H, D), "u": draw(H, H), "b": draw(H), "v": draw(OUT, H)}
    x, y = draw.sequence(D), draw.sequence(OUT)
    return Problem(step, params, draw(H), x, y, per_step, rows=None)


class LSTMReadout(nn.Module):
    """The gates by hand, and a linear readout."""

    def __init__(self, outputs: int = OUT) -> None:
        super().__init__()
        self.gates_x = nn.Linear(D, 4 * H)
        self.gates_h = nn.Linear(H, 4 * H, bias=False)
        self.readout = nn.Linear(H, outputs)

    def forward(self, x_t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tree]:
        h, c = state
        i, f, g, o = (self.gates_x(x_t) + self.gates_h(h)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return self.readout(h), (h, c)


@cell
def lstm_readout(draw: Draw) -> Problem:
    module = draw.module(LSTMReadout)
    state = draw(B, H), draw(B, H)
    classes = draw.tokens(OUT, B)
    return Problem(module, named(module), state, draw.sequence(B, D), classes, cross_entropy)


class StackedLSTMCells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(size, H) for size in (D, H, H)])

    def forward(self, x_t: Tensor, state: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tree]:
        after = []
        for layer, own in zip(self.cells, state, strict=True):
            h, c = layer(x_t, own)
            after.append((h, c))
            x_t = h
        return x_t, after


@cell
def stacked_lstm_cells(draw: Draw) -> Problem:
    module = draw.module(StackedLSTMCells)
    state = [(draw(B, H), draw(B, H)) for _ in range(3)]
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    return Problem(module, named(module), state, x, y, per_row)


class CoupledStack(nn.Module):
    """Two GRU cells; the lower one also reads what the upper one said a step ago."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.GRUCell(D + H, H), nn.GRUCell(H, H)
        self.readout = nn.Linear(2 * H, OUT)

    def forward(self, x_t: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tree]:
        lower = self.lower(torch.cat([x_t, state["upper"]], dim=-1), state["lower"])
        upper = self.upper(lower, state["upper"])
        return self.readout(torch.cat([lower, upper], -1)), {"lower": lower, "upper": upper}


@cell
def coupled_stack(draw: Draw) -> Problem:
    module = draw.module(CoupledStack)
    state = {"lower": draw(B, H), "upper": draw(B, H)}
    x, y = draw.sequence(B, D), draw.sequence(B, OUT)
    return Problem(module, named(module), state, x, y, per_step)


class LayerNormLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates_x = nn.Linear(D, 4 * H)
        self.gates_h = nn.Linear(H, 4 * H, bias=False)
        self.norm_x, self.norm_h = nn.LayerNorm(4 * H), nn.LayerNorm(4 * H)
        self.norm_c = nn.LayerNorm(H)

    def forward(self, x_t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tree]:
        h, c = state
        gates = self.norm_x(self.gates_x(x_t)) + self.norm_h(self.gates_h(h))
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(self.norm_c(c))
        return h, (h, c)


@cell
def layer_norm_lstm(draw: Draw) -> Problem:
    module = draw.module(LayerNormLSTM)
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    return Problem(module, named(module), (draw(B, H), draw(B, H)), x, y, mse)


class PeepholeLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(D + H, 4 * H)
        self.peep_i, self.peep_f, self.peep_o = (nn.Parameter(torch.ones(H)) for _ in range(3))

    def forward(self, x_t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tree]:
        h, c = state
        i, f, g, o = self.gates(torch.cat([x_t, h], dim=-1)).split(H, dim=-1)
        keep = torch.sigmoid(f + self.peep_f * c)
        c = keep * c + torch.sigmoid(i + self.peep_i * c) * torch.tanh(g)
        h = torch.sigmoid(o + self.peep_o * c) * torch.tanh(c)
        return h, (h, c)


@cell
def peephole_lstm(draw: Draw) -> Problem:
    module = draw.module(PeepholeLSTM)
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    return Problem(module, named(module), (draw(B, H), draw(B, H)), x, y, per_row)


class ChoGRU(nn.Module):
    """The GRU of Cho et al. 2014: the reset gate acts before the product."""

    def __init__(self) -> None:
        super().__init__()
        self.from_x = nn.Linear(D, 3 * H)
        self.from_h = nn.Linear(H, 2 * H, bias=False)
        self.from_reset = nn.Linear(H, H, bias=False)

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        xr, xz, xn = self.from_x(x_t).chunk(3, dim=-1)
        hr, hz = self.from_h(h).chunk(2, dim=-1)
        r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        h = z * h + (1 - z) * torch.tanh(xn + self.from_reset(r * h))
        return h, h


@cell
def cho_gru(draw: Draw) -> Problem:
    module = draw.module(ChoGRU)
    return Problem(
        module, named(module), draw(B, H), draw.sequence(B, D), draw.sequence(B, H), per_row
    )


@cell
def slstm(draw: Draw) -> Problem:
    """The xLSTM's scalar cell (Beck et al. 2024): each head mixes its own units."""
    size = HEADS * UNITS

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, c, n, m = state
        recurrent = torch.einsum("bhd,hde->bhe", h.unflatten(-1, (HEADS, UNITS)), params["r"])
        by_gate = recurrent.unflatten(-1, (4, UNITS)).transpose(1, 2).flatten(1)
        i, f, z, o = (x_t @ params["w"] + by_gate).chunk(4, -1)
        log_f = F.logsigmoid(f)
        highest = torch.maximum(log_f + m, i)
        i, f = torch.exp(i - highest), torch.exp(log_f + m - highest)
        c, n = f * c + i * torch.tanh(z), f * n + i
        return (h := torch.sigmoid(o) * c / n.clamp_min(1e-6)), (h, c, n, highest)

    params = {"w": draw(D, 4 * size), "r": draw(HEADS, UNITS, 4 * UNITS)}
    state = draw(B, size), draw(B, size), draw(B, size).abs() + 0.1, draw(B, size)
    return Problem(step, params, state, draw.sequence(B, D), draw.sequence(B, size), per_row)


@cell
def tied_weights(draw: Draw) -> Problem:
    """One matrix mixes the state and reads the input and writes the output."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        w = params["w"]
        h = torch.tanh(x_t @ w + h @ w.T)
        return h @ w + params["b"], h

    params = {"w": draw(H, H), "b": draw(H)}
    return Problem(step, params, draw(B, H), draw.sequence(B, H), draw.sequence(B, H), per_row)


class TiedLanguageModel(nn.Module):
    """Integer x, an embedding inside the step, and the same matrix as the readout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, H)
        self.cell = nn.GRUCell(H, H)
        self.readout = nn.Linear(H, VOCABULARY)
        self.readout.weight = self.embed.weight

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(self.embed(x_t), h)
        return self.readout(h), h


@cell
def embedding_tied(draw: Draw) -> Problem:
    module = draw.module(TiedLanguageModel)
    tokens, classes = draw.tokens(VOCABULARY, B), draw.tokens(VOCABULARY, B)
    return Problem(module, named(module), draw(B, H), tokens, classes, cross_entropy_per_row)


@cell
def weight_normalised(draw: Draw) -> Problem:
    """Work on parameters alone: the recurrent matrix is made from a direction and a gain."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        v = params["v"]
        u = params["gain"] * v / v.norm(dim=1, keepdim=True)
        h = torch.tanh(F.linear(x_t, params["w"], params["b"]) + h @ u.T)
        return h, h

    params = {"w": draw(H, D), "b": draw(H), "v": draw(H, H), "gain": 1 + draw(H, 1, scale=0.2)}
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    return Problem(step, params, draw(B, H), x, y, per_row)


@cell
def spectral_scaled(draw: Draw) -> Problem:
    """More work on parameters alone: a product of matrices, shared by state and output."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        mixed = params["a"] @ params["b"] / (1 + params["a"].square().sum())
        h = torch.tanh(x_t + h @ mixed)
        return h @ mixed.T, h

    params = {"a": draw(H, 2), "b": draw(2, H)}
    return Problem(step, params, draw(B, H), draw.sequence(B, H), draw.sequence(B, H), mse)
