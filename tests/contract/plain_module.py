"""A module of an Elman cell, and problems made of modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..cells.problems import B, D, Draw, H, Problem, named, per_row

K = 5


class Plain(nn.Module):
    """An Elman cell whose recurrent layer may be wrapped."""

    def __init__(self, wrap: Any = lambda layer: layer) -> None:
        super().__init__()
        self.enter, self.recur = nn.Linear(D, H), wrap(nn.Linear(H, H))

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.enter(x_t) + self.recur(h))
        return h, h


def problem_of(module: nn.Module, draw: Draw, **changes: Any) -> Problem:
    made = Problem(
        module, named(module), draw(B, H), draw.sequence(B, D), draw.sequence(B, H), per_row
    )
    return replace(made, **changes)
