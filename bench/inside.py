"""Benchmark of sliding windows, taps, and how far back gradients reach.

    python -m bench.inside                  everything, about three minutes; writes bench/results/
    python -m bench.inside --quick          smaller sizes, fewer rounds; writes runs/bench/

The loops commonly written for a sliding window are checked against the segment in float64 first.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ftbptt import as_step, gradient_horizon, make_train_segment
from ftbptt.training import ContiguousStreams, train_stream

from .cases import loss
from .charlm import as_indices
from .charlm import loss as char_loss
from .charmodel import CharLM
from .parts import Part, run_parts
from .targets import row
from .text import Vocabulary, read_text
from .turns import in_turns, ratio

Params = dict[str, Tensor]
State = tuple[Tensor, Tensor]


def computed_again(
    cell: nn.LSTMCell, state: State, x: Tensor, y: Tensor, reach: int
) -> list[Tensor]:
    """Recomputes the last ``reach`` steps with autograd for the loss of each step."""
    params, states = list(cell.parameters()), [state]
    with torch.no_grad():
        for x_t in x:
            states.append(cell(x_t, states[-1]))
    total = [torch.zeros_like(p) for p in params]
    for t in range(len(x)):
        start = max(0, t - reach + 1)
        state_t = states[start]
        for s in range(start, t + 1):
            state_t = cell(x[s], state_t)
        value = (state_t[0] - y[t]).square().sum() / y.numel()
        for sum_, grad in zip(total, torch.autograd.grad(value, params), strict=True):
            sum_ += grad
    return total


def retained(cell: nn.LSTMCell, state: State, x: Tensor, y: Tensor, reach: int) -> list[Tensor]:
    """Detaches before each step; each loss goes back through the graphs of the last ``reach``."""
    params = list(cell.parameters())
    total = [torch.zeros_like(p) for p in params]
    graphs: deque[tuple[State, State]] = deque(maxlen=reach)
    for x_t, y_t in zip(x, y, strict=True):
        before = (state[0].detach().requires_grad_(), state[1].detach().requires_grad_())
        state = cell(x_t, before)
        graphs.append((before, state))
        d_outputs: Any = [2 * (state[0].detach() - y_t) / y.numel(), torch.zeros_like(state[1])]
        for inputs, outputs in reversed(graphs):
            all_grads = torch.autograd.grad(
                outputs, [*params, *inputs], d_outputs, retain_graph=True
            )
            for sum_, grad in zip(total, all_grads[: len(params)], strict=True):
                sum_ += grad
            d_outputs = all_grads[len(params) :]
    return total


LOOPS: dict[str, Callable[..., list[Tensor]]] = {
    "the last k2 steps computed again": computed_again,
    "retain_graph": retained,
}


def sliding(rounds: int, steps: int, reach: int, rows: int, hidden: int) -> list[dict[str, Any]]:
    """A sliding window against the loops commonly written for it."""
    torch.manual_seed(0)
    cell = nn.LSTMCell(hidden, hidden)
    params: Params = dict(cell.named_parameters())
    state = (torch.zeros(rows, hidden), torch.zeros(rows, hidden))
    x, y = torch.randn(steps, rows, hidden), torch.randn(steps, rows, hidden)
    segment = make_train_segment(cell, loss, window=reach)

    double = nn.LSTMCell(hidden, hidden).double()
    double.load_state_dict(cell.state_dict())
    arguments = (state[0].double(), state[1].double()), x.double(), y.double()
    exact = make_train_segment(double, loss, window=reach, backend="eager")
    grads = exact(dict(double.named_parameters()), *arguments).grads
    for name, loop in LOOPS.items():
        for a, b in zip(grads.values(), loop(double, *arguments, reach), strict=True):
            if not torch.allclose(a, b, rtol=0, atol=1e-10):
                raise SystemExit(f"inside: the sliding window differs from the loop of {name}")

    calls: dict[str, Callable[[], object]] = {"ours": lambda: segment(params, state, x, y)}
    for name, loop in LOOPS.items():
        calls[name] = lambda loop=loop: loop(cell, state, x, y, reach)  # type: ignore[misc]
    times = in_turns(calls, rounds, 3)
    what = f"a sliding window, T={steps} k2={reach} B={rows} H={hidden}, faster than a loop with "
    return [row(what + name, ratio(times, name, "ours"), ">=", 20) for name in LOOPS]


def taps(rounds: int) -> list[dict[str, Any]]:
    """The cost of a tap on an LSTM."""
    torch.manual_seed(0)
    lstm = nn.LSTM(64, 128)
    params: Params = dict(lstm.named_parameters())
    state, x = (torch.zeros(1, 32, 128),) * 2, torch.randn(64, 32, 64)
    y = torch.randn(64, 32, 128)
    plain, one = make_train_segment(lstm, loss), make_train_segment(lstm, loss, taps=["l0.h"])
    times = in_turns(
        {
            "plain": lambda: plain(params, state, x, y),
            "one": lambda: one(params, state, x, y),
        },
        rounds,
        20,
    )
    what = "an LSTM with a tap on h over one without, T=64 B=32 D=64 H=128"
    return [row(what, ratio(times, "one", "plain"), "<=", 1.25)]


def horizon(folder: Path, updates: int, hidden: int) -> list[dict[str, Any]]:
    """How far back the gradients of a briefly trained character model reach; plots it."""
    text, _ = read_text(None)
    vocabulary = Vocabulary.of(text, 100)
    data = ContiguousStreams(vocabulary.encode(text), 32)
    torch.manual_seed(0)
    model = CharLM(len(vocabulary), hidden, 1)
    params: Params = dict(model.named_parameters())
    segment = make_train_segment(as_step(model, sequence=True), char_loss)
    optimizer = torch.optim.AdamW(params.values(), lr=5e-3)
    run = train_stream(
        segment, params, model.zero_state(32), data, optimizer, k1=64, updates=updates,
        prepare=as_indices, clip_norm=1.0, progress=False,
    )  # fmt: skip
    for _ in run:
        pass
    chunk = data.read(64 * updates, 64 * updates + 256)
    assert chunk is not None
    result = gradient_horizon(
        segment, params, run.state, *as_indices(chunk.x, chunk.y), max_lag=100
    )
    result.plot(folder / "horizon.png")
    print(result)
    k2 = result.suggest_k2(0.1)
    what = f"a character LSTM after {updates} updates: k2 for a bias of at most 10 %"
    return [row(what, float(k2), "<=", 100, " steps")]


def parts(quick: bool, rounds: int, folder: Path) -> list[Part]:
    return [
        lambda: sliding(rounds, *((64, 8, 2, 16) if quick else (256, 16, 8, 64))),
        lambda: taps(rounds),
        lambda: horizon(folder, *((20, 32) if quick else (1000, 128))),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return run_parts("inside", __doc__, 9, parts, arguments, draws=True)


if __name__ == "__main__":
    sys.exit(main())
