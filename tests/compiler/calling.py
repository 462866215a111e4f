"""Calls a segment of a step that may be refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ftbptt import make_train_segment

from ..cells.problems import B, H, mse, named

K = 4
Tree = Any


def call(step: Any, params: Tree = None, state: Tree = None) -> Any:
    segment = make_train_segment(step, mse, backend="eager")
    params = named(step) if isinstance(step, nn.Module) else params
    params = {"w": torch.ones(H)} if params is None else params
    state = torch.zeros(B, H) if state is None else state
    return segment(params, state, torch.randn(K, B, H), torch.randn(K, B, H))
