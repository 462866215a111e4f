"""Calls that ``torch.compile`` leaves as they are. To import this imports torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


@torch.compiler.disable
def outside(function: Callable[..., Result], *args: object) -> Result:
    """``function(*args)``, which is not traced."""
    return function(*args)
