"""TBPTT(k1, k2) as plain loops of autograd, step by step: what the tests of streams hold it to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Tree = Any


class Tagger(nn.Module):
    """``module(x_t, (h, c)) -> (scores, (h, c))``, small and in float64."""

    def __init__(self, features: int = 3, hidden: int = 5, classes: int = 4) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(features, hidden)
        self.readout = nn.Linear(hidden, classes)
        self.double()

    def forward(self, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        h, c = self.cell(x_t, state)
        return self.readout(h), (h, c)


def tagger(seed: int = 0) -> Tagger:
    torch.manual_seed(seed)
    return Tagger()


def zeros(rows: int = 2, hidden: int = 5) -> Tree:
    return torch.zeros(rows, hidden).double(), torch.zeros(rows, hidden).double()


def stream(steps: int, rows: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    """x[T, B, 3] and classes y[T, B]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, rows, 3, generator=generator).double()
    return x, torch.randint(4, (steps, rows), generator=generator)


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """[K, B]"""
    return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(
        y.shape
    )


def mean_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(out, y).mean()


def honest_updates(
    module: nn.Module,
    state: Tree,
    x: Tensor,
    y: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    k1: int,
    k2: int,
    burn_in: int = 0,
    context: int = 0,
    fresh: bool = False,
    reset: Tensor | None = None,
    on_update: Callable[[float, Tree], None],
) -> None:
    """The loops of ``Truncation``'s docstring, with nothing but autograd."""
    total, states = len(x), {0: state}

    def run(start: int, end: int, state: Tree) -> tuple[list[Tensor], Tree]:
        outs = []
        for t in range(start, end):
            states[t] = tree_map(Tensor.detach, state)
            if reset is not None:
                keep = ~reset[t].unsqueeze(1)
                state = tree_map(lambda leaf, keep=keep: leaf * keep, state)
            out, state = module(x[t], state)
            outs.append(out)
        states[end] = tree_map(Tensor.detach, state)
        return outs, state

    seen, index = 0, 0
    while seen < total:
        if fresh:
            warm = index * k1
            start = warm + burn_in
            seen = start + k2
        else:
            seen = (index + 1) * k1
            start = max(0, seen - k2)
            warm = max(0, start - burn_in)
        index, end = index + 1, min(seen, total)
        if end - start <= context:
            continue
        if not fresh and warm not in states:  # steps that no window runs over
            last = max(states)
            with torch.no_grad():
                run(last, warm, states[last])
        began = state if fresh else states[warm]
        with torch.no_grad():
            _, before = run(warm, start, began)
        outs, _ = run(start, end, tree_map(Tensor.detach, before))
        loss = mean_cross_entropy(torch.stack(outs[context:]), y[start + context : end])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_update(loss.item(), states[end])
