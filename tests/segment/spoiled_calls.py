"""A call that is right, of which a test spoils one thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt import make_train_segment

from ..cells.problems import B, D, H, per_row

K = 5
Tree = Any


def dict_step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
    h = torch.tanh(x_t @ params["w"] + state["h"] @ params["u"])
    return h, {"h": h}


def arguments() -> dict[str, Any]:
    """A call that is right; each test spoils one thing of it."""
    torch.manual_seed(1)
    params = {"w": torch.randn(D, H), "u": torch.randn(H, H) / H}
    return {
        "params": params, "state": {"h": torch.zeros(B, H)},
        "x": torch.randn(K, B, D), "y": torch.randn(K, B, H),
    }  # fmt: skip


def call(step: Any = dict_step, loss: Any = per_row, /, **changes: Any) -> Any:
    given = arguments() | changes
    segment = make_train_segment(step, loss, backend="eager")
    return segment(**given)


def refused(kind: type[Exception], words: str, *args: Any, **changes: Any) -> str:
    """The call raises exactly this kind, its text matching the fragments in order."""
    with pytest.raises(kind, match="(?s)" + words) as caught:
        call(*args, **changes)
    assert caught.type is kind
    return str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
