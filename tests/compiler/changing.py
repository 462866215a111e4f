"""Steps that read what may change between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cells.problems import B, Draw, H, Problem, mse

AGAIN = "compiled again: .* has changed, which the step or the loss reads"


def made_with(of: Callable[[Tensor], Tensor], loss: Any = mse) -> Problem:
    draw = Draw(1)

    def step(params: Any, x_t: Tensor, h: Tensor) -> Any:
        h = torch.tanh(of(x_t @ params["w"]) + h)
        return h, h

    params, state = {"w": draw(H, H)}, draw(B, H)
    return Problem(step, params, state, draw.sequence(B, H), draw.sequence(B, H), loss)
