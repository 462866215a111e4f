"""The options of :func:`train_stream`: their types and ranges."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.amp import GradScaler

from .._checks import check_function, check_number, check_one_of, check_positive
from .reports.events import Events

ON_NONFINITE = ("stop", "skip", "raise")
AUTOCAST = (torch.bfloat16, torch.float16)


def check_types(
    *, events: Any, autocast: Any, scaler: Any, reduce_dtype: Any, checkpoint: Any, stop: Any,
    prepare: Any,
) -> None:  # fmt: skip
    """Raises TypeError for an option of another type; all may be None."""
    for name, option, kind, expected in (
        ("events", events, Events, "ftbptt.training.Events(...)"),
        ("autocast", autocast, torch.dtype, "a dtype such as torch.bfloat16"),
        ("scaler", scaler, GradScaler, "a torch.amp.GradScaler"),
        ("reduce_dtype", reduce_dtype, torch.dtype, "a dtype such as torch.bfloat16"),
        ("checkpoint", checkpoint, (str, os.PathLike), "the name of a file"),
    ):
        if option is not None and not isinstance(option, kind):
            raise TypeError(f"{name}: expected {expected}, found {option!r}.")
    for name, function, arguments in (("stop", stop, "(loss)"), ("prepare", prepare, "(x, y)")):
        if function is not None:
            check_function(name, function, arguments)


def check_scheduler(scheduler: Any, *, is_saved: bool) -> None:
    """Raises TypeError for a scheduler without a method that the run will call."""
    names = ["step", "state_dict", "load_state_dict"] if is_saved else ["step"]
    if scheduler is None:
        return
    if isinstance(scheduler, type) or not all(callable(getattr(scheduler, n, None)) for n in names):
        raise TypeError(
            "scheduler: expected one of torch.optim.lr_scheduler, or an object with "
            f"{', '.join(names)}, found {scheduler!r}."
        )


def check_values(
    clip_norm: float | None,
    clip_value: float | None,
    interval: float,
    ema_decay: float | None,
    on_nonfinite: str,
    autocast: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> None:
    """Raises ValueError for an option out of its range, TypeError for a bound that is no number."""
    for name, bound in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if bound is not None:
            check_positive(name, bound)
    check_number("interval", interval)
    if not interval >= 0:
        raise ValueError(f"interval: expected at least 0 seconds, found {interval}.")
    if ema_decay is not None:
        check_number("ema_decay", ema_decay)
        if not 0 <= ema_decay < 1:
            raise ValueError(f"ema_decay: expected a number from 0 to below 1, found {ema_decay}.")
    check_one_of("on_nonfinite", on_nonfinite, ON_NONFINITE)
    if autocast is not None and autocast not in AUTOCAST:
        raise ValueError(
            f"autocast: expected {' or '.join(map(str, AUTOCAST))}, found {autocast}. Without "
            "autocast= the segment computes in the dtype of its arguments."
        )
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise ValueError(
            f"reduce_dtype: expected a floating dtype such as torch.bfloat16, found {reduce_dtype}."
        )
    if reduce_dtype is torch.float16:
        raise ValueError(
            "reduce_dtype: sums over the steps of all ranks would overflow in float16. Use "
            "torch.bfloat16, which takes as many bytes."
        )
