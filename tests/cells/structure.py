"""Cells whose difficulty is their shape: pytrees everywhere, aliases, leaves that nothing reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .problems import HEADS, OUT, UNITS, B, D, Draw, H, Problem, cell, mse, per_row, per_step

Tree = Any


class Layer(NamedTuple):
    w: Tensor
    u: Tensor


class Memory(NamedTuple):
    fast: Tensor
    slow: Tensor


@cell
def nested_everything(draw: Draw) -> Problem:
    """Dicts, tuples, lists and namedtuples in params, state, x, out and y."""

    def step(params: Tree, x_t: Tree, state: Tree) -> tuple[Tree, Tree]:
        memory, (trace, extra) = state["memory"], state["rest"]
        a, b = params["layers"]
        fast = torch.tanh(x_t["left"] @ a.w + memory.fast @ a.u)
        slow = 0.9 * memory.slow + 0.1 * torch.tanh(fast @ b.w + memory.slow @ b.u)
        trace = [0.5 * trace[0] + x_t["right"][0].unsqueeze(-1)]
        out = {"sum": (fast + slow) @ params["out"][0], "both": (fast * trace[0], slow)}
        return out, {"memory": Memory(fast, slow), "rest": (trace, extra)}

    params = {
        "layers": [Layer(draw(D, H), draw(H, H)), Layer(draw(H, H), draw(H, H))],
        "out": (draw(H, OUT),),
    }
    state = {"memory": Memory(draw(B, H), draw(B, H)), "rest": ([draw(B, 1)], draw(B, 2))}
    left, right = draw.sequence(B, D), draw.sequence(B)
    sums, fast, slow = draw.sequence(B, OUT), draw.sequence(B, H), draw.sequence(B, H)
    return Problem(
        step, params, state,
        lambda steps: {"left": left(steps), "right": (right(steps),)},
        lambda steps: {"sum": sums(steps), "both": (fast(steps), slow(steps))},
        mse,
    )  # fmt: skip


@cell
def dict_in_dict_out(draw: Draw) -> Problem:
    """The loss reads one leaf of out; the other is only returned."""

    def step(params: Tree, x_t: Tree, h: Tensor) -> tuple[Tree, Tensor]:
        h = torch.tanh(x_t["value"] @ params["w"] + h @ params["u"] + x_t["bias"])
        return {"prediction": h @ params["v"], "hidden": h, "index": h.argmax(-1)}, h

    def loss(out: Tree, y: Tree) -> Tensor:
        return (out["prediction"] - y["target"]).square().mean(-1)

    params = {"w": draw(D, H), "u": draw(H, H), "v": draw(H, OUT)}
    value, bias, target = draw.sequence(B, D), draw.sequence(B, 1), draw.sequence(B, OUT)
    return Problem(
        step, params, draw(B, H),
        lambda steps: {"value": value(steps), "bias": bias(steps)},
        lambda steps: {"target": target(steps)},
        loss,
    )  # fmt: skip


@cell
def unused_parameters(draw: Draw) -> Problem:
    """One parameter that nothing reads, one that only the unread output reads, one of integers."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tree, Tensor]:
        h = torch.tanh(x_t[..., params["order"]] @ params["w"] + h)
        return (h, h @ params["unread"]), h

    params = {
        "w": draw(D, H), "unused": draw(2, 3), "unread": draw(H, 2),
        "order": torch.tensor([4, 2, 0, 1, 3]),
    }  # fmt: skip
    y = draw.sequence(B, H)
    return Problem(
        step, params, draw(B, H), draw.sequence(B, D), y, lambda out, y: per_row(out[0], y)
    )


@cell
def in_place_temporaries(draw: Draw) -> Problem:
    """In-place writes, but only on tensors that the step made itself."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        new = x_t @ params["w"]
        new += h @ params["u"]
        new.tanh_()
        out = torch.zeros_like(new)
        out[:, 1:] = new[:, :-1] * 2
        out[:, 0] += h[:, 0]
        buffer = h.clone()
        buffer.mul_(0.5).add_(new, alpha=0.5)
        return out, buffer

    params = {"w": draw(D, H), "u": draw(H, H)}
    x, y = draw.sequence(B, D), draw.sequence(B, H)
    return Problem(step, params, draw(B, H), x, y, per_row)


@cell
def aliases(draw: Draw) -> Problem:
    """One tensor in two state leaves and twice in out; views of one tensor as state leaves."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tree, Tree]:
        a, b, left, right = state
        both = torch.tanh(x_t @ params["w"] + torch.cat([left, right], -1) @ params["u"])
        h = torch.tanh(a @ params["m"] + 0.5 * b + both[:, :H])
        return (h, h, both), (h, h, both[:, :H], both[:, H:])

    params = {"w": draw(D, 2 * H), "u": draw(2 * H, 2 * H), "m": draw(H, H)}
    state = tuple(draw(B, H) for _ in range(4))
    one, two, both = draw.sequence(B, H), draw.sequence(B, H), draw.sequence(B, 2 * H)

    def y(steps: int) -> Tree:
        return one(steps), two(steps), both(steps)

    return Problem(step, params, state, draw.sequence(B, D), y, mse)


@cell
def exchanged_state(draw: Draw) -> Problem:
    """Leaves swapped each step, one passed on untouched, one only read, one only written."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        a, b, fixed, last = state["a"], state["b"], state["fixed"], state["last"]
        new = torch.tanh(x_t @ params["w"] + a * fixed)
        return new + b @ params["u"] + last, {"a": b, "b": new, "fixed": fixed, "last": x_t[:, :1]}

    params = {"w": draw(D, H), "u": draw(H, H)}
    state = {"a": draw(B, H), "b": draw(B, H), "fixed": draw(B, H), "last": draw(B, 1)}
    return Problem(step, params, state, draw.sequence(B, D), draw.sequence(B, H), per_row)


@cell
def elman_by_head(draw: Draw) -> Problem:
    """Each head mixes its own units: a product with a block-diagonal matrix."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        drive = (x_t @ params["w"]).unflatten(-1, (HEADS, UNITS))
        h = torch.tanh(drive + torch.einsum("bhd,hde->bhe", h, params["r"]))
        return h.flatten(1), h

    params = {"w": draw(D, HEADS * UNITS), "r": draw(HEADS, UNITS, UNITS)}
    state, y = draw(B, HEADS, UNITS), draw.sequence(B, HEADS * UNITS)
    return Problem(step, params, state, draw.sequence(B, D), y, per_row)


@cell
def memoryless(draw: Draw) -> Problem:
    """out does not depend on the state, and the state not on the parameters: a map, no scan."""

    def step(params: Tree, x_t: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x_t @ params["w"] + params["b"]), total + x_t

    params = {"w": draw(D, OUT), "b": draw(OUT)}
    x, y = draw.sequence(B, D), draw.sequence(B, OUT)
    return Problem(step, params, draw(B, D), x, y, per_row)


@cell
def constant_output(draw: Draw) -> Problem:
    """An out leaf made of parameters alone, one that is the old state, one that is x itself."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tree, Tensor]:
        bias = torch.tanh(params["b"])
        return (bias * 2, h, x_t), torch.tanh(x_t @ params["w"] + h * bias)

    def loss(out: Tree, y: Tensor) -> Tensor:
        return (out[0] + out[1].mean(1) - y).square().mean(-1) + out[2].square().mean((1, 2))

    params = {"w": draw(D, H), "b": draw(H)}
    x, y = draw.sequence(B, D), draw.sequence(H)
    return Problem(step, params, draw(B, H), x, y, loss)


@cell
def recurrence_on_recurrence(draw: Draw) -> Problem:
    """One recurrence reads the other with only cheap operations between; a delayed inner value."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        low, high, late = state
        gate = torch.sigmoid(x_t @ params["w"] + low @ params["u"])
        new = torch.relu(gate * low + x_t @ params["w"])
        high = torch.tanh(new + high)
        return high * late, (new, high, gate)

    params = {"w": draw(D, H), "u": draw(H, H)}
    state = (draw(B, H), draw(B, H), draw(B, H))
    return Problem(step, params, state, draw.sequence(B, D), draw.sequence(B, H), mse)


@cell
def captured_tensor(draw: Draw) -> Problem:
    """The step closes over a constant; x_t is a scalar for each step."""
    table = draw(9)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(params["u"] @ h + x_t * params["w"] + table[:H].to(h))
        return (h * params["v"]).sum(), h

    params = {"u": draw(H, H), "w": draw(H), "v": draw(H)}
    x, y = draw.sequence(), draw.sequence()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square()

    return Problem(step, params, draw(H), x, y, loss, rows=None)


@cell
def reads_time_twice(draw: Draw) -> Problem:
    """Two chains of different length from one leaf to another, joined only in the output."""

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        a, b, c = state
        a = torch.tanh(x_t @ params["w"] + a @ params["u"])
        b = torch.sigmoid(a @ params["u"] + b)
        c = torch.tanh(a * b + c @ params["m"])
        return torch.stack([a, b, c], dim=1).flatten(1) @ params["v"], (a, b, c)

    params = {"w": draw(D, H), "u": draw(H, H), "m": draw(H, H), "v": draw(3 * H, OUT)}
    state = tuple(draw(B, H) for _ in range(3))
    return Problem(step, params, state, draw.sequence(B, D), draw.sequence(B, OUT), per_step)
