"""``backend="auto"``: a segment whose backend fails runs on another one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._messages import first_line
from ..backends import Backend, fallback
from .execute import Executable


def run_or_fall_back(
    executable: Executable,
    step_name: str,
    device_type: str,
    on: Callable[[Backend], Executable],
    run: Callable[[Executable], list[Tensor]],
    callers: list[BaseException],
) -> tuple[list[Tensor], Executable, list[str]]:
    """The result of ``run(executable)``, or of the first slower backend that does not fail.

    ``on`` makes the same segment on another backend; ``callers``: errors of the caller's own code.
    Also returns what ran, and warnings. If all fail, as where the data are at fault, the last error
    is raised.
    """
    messages: list[str] = []
    while True:
        try:
            return run(executable), executable, messages
        except torch.OutOfMemoryError:
            raise  # another backend needs more memory
        except Exception as error:
            failed = executable.backend
            if error in callers or failed.name == "eager":
                raise
            other = fallback(failed, device_type)
            messages.append(
                f"ftbptt: the {failed.name} backend failed for {step_name} "
                f"({type(error).__name__}: {first_line(error)}); this segment runs on the "
                f"{other.name} backend instead, slower. backend={failed.name!r} shows the whole "
                "error."
            )
        executable = on(other)
