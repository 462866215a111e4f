"""What a peer makes of a problem: a call that returns (loss, gradients by name)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Result = tuple[Any, dict[str, Any]]
Call = Callable[[], Result]


class Skip(Exception):
    """A peer does not take part in a case; the message says why."""


def by_autograd(value_of: Callable[[], Tensor], leaves: Mapping[str, Tensor]) -> Call:
    """The call of a loss that autograd differentiates."""

    def call() -> Result:
        value = value_of()
        grads = torch.autograd.grad(value, list(leaves.values()))
        return value.detach(), dict(zip(leaves, grads, strict=True))

    return call


def one_line(error: BaseException) -> str:
    """The class of an error, and the beginning of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
