"""Traces that are tried: they may fail, or be given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.overrides import TorchFunctionMode

from ..._compat.tracing import is_pinned

T = TypeVar("T")


def unless_it_fails(trace: Callable[[], T]) -> T | None:
    """The result of an attempt that may fail for reasons of torch, or of the K it is made with.

    An error in what is traced comes again, and is raised, in the trace for the K of the call.
    """
    try:
        return trace()
    except Exception:
        return None


class Tried(TorchFunctionMode):
    """Ends a trace that is not worth its time: of a loop over pairs of steps it takes minutes.

    With a symbol for K, ``steps``, where K is read as a number, since the trace then holds for one
    K only; with a number after ``most_calls`` calls of torch's functions.
    """

    def __init__(self, steps: Any, most_calls: float) -> None:
        super().__init__()
        self.steps, self.calls_left = steps, most_calls

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls_left -= 1
        if self.calls_left < 0 or (not isinstance(self.steps, int) and is_pinned(self.steps)):
            raise RuntimeError("the trace is given up")
        return func(*args, **(kwargs or {}))
