"""A recurrence with one operation under test in its step or its loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ftbptt import make_train_segment

from ..cells.problems import B, Draw, H, Problem, mse
from ..oracle import check

Tree = Any


def problem_with(after: Any, out: Any = None, loss: Any = mse) -> Problem:
    """``after(w, x, h)`` is the next state, ``out(w, x, h)`` the output (default: the state)."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tree, Tensor]:
        new = after(params["w"], x_t, h)
        return (new if out is None else out(params["w"], x_t, new)), new

    draw = Draw(0)
    params, state = {"w": draw(H, H)}, draw(B, H)
    return Problem(step, params, state, draw.sequence(B, H), draw.sequence(B, H), loss)


def check_both(made: Problem, backend: str = "eager") -> None:
    segment = make_train_segment(made.step, made.loss, backend=backend)
    for steps in (4, 1):
        check(segment, made, steps)
