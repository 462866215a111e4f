"""What a peer makes of a problem: a call that returns (loss, gradients by name)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Result = tuple[Any, dict[str, Any]]
Call = Callable[[], Result]


class Skip(Exception):
    """A peer does not take part in a case; the message says why."""
