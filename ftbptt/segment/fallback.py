"""``backend="auto"``: a segment whose backend fails runs on another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from .._callers_code import is_callers
from .._messages import first_line
from .._warnings import warn
from ..backends import Backend, fallback

T = TypeVar("T")


def on_first_that_works(
    attempt: Callable[[Backend], T],
    backend: Backend,
    step_name: str,
    device_type: str,
) -> T:
    """on_first_that_works : what to do on a backend, the one to begin with -> its result

    If it fails, it is done on the next slower one, with a warning once that works; errors of the
    caller's own code are raised. If all fail, as where the data are at fault, so is the last error.
    """
    messages: list[str] = []
    while True:
        try:
            result = attempt(backend)
            break
        except torch.OutOfMemoryError:
            raise  # another backend needs more memory
        except Exception as error:
            if is_callers(error) or backend.name == "eager":
                raise
            other = fallback(backend, device_type)
            messages.append(
                f"ftbptt: the {backend.name} backend failed for {step_name} "
                f"({type(error).__name__}: {first_line(error)}); this segment runs on the "
                f"{other.name} backend instead, slower. backend={backend.name!r} shows the whole "
                "error."
            )
        backend = other
    for message in messages:
        warn(message, RuntimeWarning)
    return result
