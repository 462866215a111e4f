"""Cells with a memory: matrices, slots, buffers, linear recurrences, complex and discrete state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .problems import OUT, B, D, Draw, H, Problem, cell, mse, named, per_row, per_step

Tree = Any
M = 4  # slots of a memory
W = 9  # length of a field that is convolved


@cell
def fast_weights(draw: Draw) -> Problem:
    """A matrix per row: written by an outer product, read by bmm."""

    def step(params: Tree, x_t: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        key, value, query = (x_t @ params[name] for name in ("key", "value", "query"))
        key = F.normalize(key, dim=-1)
        memory = 0.9 * memory + torch.einsum("bi,bj->bij", value, key)
        return torch.bmm(memory, query.unsqueeze(-1)).squeeze(-1), memory

    params = {name: draw(D, H) for name in ("key", "value", "query")}
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    return Problem(step, params, draw(B, H, H), x, y, per_row)


@cell
def delta_rule(draw: Draw) -> Problem:
    """The write depends on what the memory answers: bmm on the carry's own cycle."""

    def step(params: Tree, x_t: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        key = F.normalize(x_t @ params["key"], dim=-1)
        rate = torch.sigmoid(x_t @ params["rate"])
        error = x_t @ params["value"] - torch.einsum("bij,bj->bi", memory, key)
        memory = memory + rate.unsqueeze(-1) * error.unsqueeze(-1) * key.unsqueeze(-2)
        return torch.einsum("bij,bj->bi", memory, x_t @ params["query"]), memory

    params = {name: draw(D, H) for name in ("key", "value", "query")} | {"rate": draw(D, 1)}
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    return Problem(step, params, draw(B, H, H), x, y, per_step)


@cell
def slot_attention(draw: Draw) -> Problem:
    """Softmax attention over the slots of a memory, which is then written where it was read."""

    def step(params: Tree, x_t: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        query = x_t @ params["query"]
        scores = torch.einsum("bmh,bh->bm", slots @ params["key"], query) / H**0.5
        weight = torch.softmax(scores, dim=-1)
        read = (weight.unsqueeze(-1) * slots).sum(1)
        slots = slots + weight.unsqueeze(-1) * torch.tanh(x_t @ params["write"]).unsqueeze(1)
        return read @ params["out"], F.layer_norm(slots, (H,))

    params = {
        "query": draw(D, H), "key": draw(H, H), "write": draw(D, H), "out": draw(H, OUT),
    }  # fmt: skip
    x, y = draw.sequence(B, D), draw.sequence(B, OUT)
    return Problem(step, params, draw(B, M, H), x, y, per_row)


@cell
def ema(draw: Draw) -> Problem:
    """A linear recurrence with a constant decay, no gate at all."""

    def step(params: Tree, x_t: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        mean = params["decay"] * mean + (1 - params["decay"]) * (x_t @ params["w"])
        return mean, mean

    params = {"w": draw(D, H), "decay": torch.sigmoid(draw(H))}
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    return Problem(step, params, draw(B, H), x, y, mse)


@cell
def min_gru(draw: Draw) -> Problem:
    """Gates of x alone: affine in the carry, elementwise."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.sigmoid(x_t @ params["z"])
        h = (1 - z) * h + z * (x_t @ params["candidate"])
        return F.gelu(h) @ params["out"], h

    params = {"z": draw(D, H), "candidate": draw(D, H), "out": draw(H, OUT)}
    x, y = draw.sequence(B, D), draw.sequence(B, OUT)
    return Problem(step, params, draw(B, H), x, y, per_row)


@cell
def lru_complex(draw: Draw) -> Problem:
    """The linear recurrent unit: a complex diagonal carry with a stable eigenvalue."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        modulus = torch.exp(-torch.exp(params["nu"]))
        eigenvalue = torch.polar(modulus, params["theta"])
        gain = torch.sqrt(1 - modulus.square())
        h = eigenvalue * h + gain * (x_t.to(h.dtype) @ params["b"])
        return (h @ params["c"]).real + x_t @ params["d"], h

    params = {
        "nu": draw(H), "theta": draw(H), "b": draw.complex(D, H), "c": draw.complex(H, OUT),
        "d": draw(D, OUT),
    }  # fmt: skip
    x, y = draw.sequence(B, D), draw.sequence(B, OUT)
    return Problem(step, params, draw.complex(B, H), x, y, per_row)


@cell
def delay_line(draw: Draw) -> Problem:
    """A shift register: nothing feeds itself, so there is no loop at all."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        one, two, three = state
        out = torch.tanh(x_t @ params[0] + one @ params[1] + three @ params[2])
        return out, (x_t, one, two)

    params = [draw(D, OUT) for _ in range(3)]
    state = tuple(draw(B, D) for _ in range(3))
    return Problem(step, params, state, draw.sequence(B, D), draw.sequence(B, OUT), per_row)


@cell
def ring_buffer(draw: Draw) -> Problem:
    """The same as one tensor, shifted by slice and cat."""

    def step(params: Tree, x_t: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        past = torch.cat([past[:, 1:], torch.tanh(x_t @ params["w"]).unsqueeze(1)], dim=1)
        return (past * params["tap"].unsqueeze(-1)).sum(1), past

    params = {"w": draw(D, H), "tap": draw(M)}
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    return Problem(step, params, draw(B, M, H), x, y, mse)


@cell
def counter_and_flag(draw: Draw) -> Problem:
    """A counted step (int64) and a flag (bool) that change what the floats do."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, count, seen = state["h"], state["count"], state["seen"]
        seen = seen | (x_t[:, 0] > 0.5)
        phase = torch.sin(count.to(x_t.dtype) * 0.3).unsqueeze(-1)
        gate = torch.where((count % 2 == 0) & seen, 1.0, 0.25).to(x_t.dtype).unsqueeze(-1)
        h = torch.tanh(x_t @ params["w"] + gate * (h @ params["u"]) + phase)
        return h, {"h": h, "count": count + 1, "seen": seen}

    params = {"w": draw(D, H), "u": draw(H, H)}
    state = {"h": draw(B, H), "count": torch.arange(B), "seen": torch.arange(B) == 0}
    return Problem(step, params, state, draw.sequence(B, D), draw.sequence(B, H), per_row)


@cell
def schedule_scalar(draw: Draw) -> Problem:
    """State without rows: a 0-d int64 step number that drives the decay."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, number = state
        decay = 1 / (1 + number.to(h.dtype))
        h = (1 - decay) * h + decay * torch.tanh(x_t @ params["w"] + h @ params["u"])
        return h, (h, number + 1)

    params = {"w": draw(D, H), "u": draw(H, H)}
    state = (draw(B, H), torch.tensor(2))
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    return Problem(step, params, state, x, y, per_row, rows=None)


@cell
def conv_lstm(draw: Draw) -> Problem:
    """A convolutional LSTM on a one-dimensional field [B, C, W], of joined channels."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, c = state
        gates = F.conv1d(torch.cat([x_t, h], 1), params["w"], params["b"], padding=1)
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h.mean(-1), (h, c)

    params = {"w": draw(4 * M, 2 + M, 3), "b": draw(4 * M)}
    x, y = draw.sequence(B, 2, W), draw.sequence(B, M)
    return Problem(step, params, (draw(B, M, W), draw(B, M, W)), x, y, per_row)


class LeakyUnits(nn.Module):
    """Echo-state-like: fixed reservoir and leak in buffers, only the readout and input learn."""

    leak: Tensor
    reservoir: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.readout = nn.Linear(D, H), nn.Linear(H, OUT)
        self.register_buffer("reservoir", torch.randn(H, H) / H)
        self.register_buffer("leak", torch.linspace(0.1, 0.9, H))

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.lerp(h, torch.tanh(self.enter(x_t) + h @ self.reservoir), self.leak)
        return self.readout(h), h


@cell
def buffers(draw: Draw) -> Problem:
    module = draw.module(LeakyUnits)
    x, y = draw.sequence(B, D), draw.sequence(B, OUT)
    return Problem(module, named(module), draw(B, H), x, y, per_row)


@cell
def competing_units(draw: Draw) -> Problem:
    """Piecewise: where, max over a group, clamp, abs, cumsum along units."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        drive = x_t @ params["w"] + h @ params["u"]
        drive = torch.where(drive > 0, drive, 0.1 * drive)
        best = drive.amax(-1, keepdim=True)
        h = (drive - best).abs().clamp(max=2.0) - 0.1 * torch.cumsum(h, -1) / H
        return h, h / (1 + h.abs().sum(-1, keepdim=True))

    params = {"w": draw(D, H), "u": draw(H, H)}
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    return Problem(step, params, draw(B, H), x, y, mse)
