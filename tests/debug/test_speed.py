"""``compare_speed``: what compiling buys, of a segment that is right."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

from ftbptt import SpeedComparison, TrainSegment, compare_speed, make_train_segment

from ..cells.problems import mse
from .test_compare import arguments, recurrence, wrong


class Slow(TrainSegment):
    """A segment that takes 20 ms more."""

    def __call__(self, *args: Any, **flags: Any) -> Any:
        time.sleep(0.02)
        return super().__call__(*args, **flags)


def test_of_a_segment() -> None:
    segment = make_train_segment(recurrence, mse, backend="eager")
    reset = torch.rand(5, 3) > 0.5
    found = compare_speed(segment, *arguments(), reset=reset, seconds=0.01)
    assert found.backend == "eager"
    assert (found.steps, found.device, found.threads) == (5, "cpu", torch.get_num_threads())
    assert len(found.seconds) == len(found.eager_seconds) >= 3
    assert found.first_seconds is not None
    assert found.first_seconds > max(found.seconds)
    # Now there was a call before.
    assert compare_speed(segment, *arguments(), reset=reset, seconds=0.01).first_seconds is None


def test_a_slow_segment_never_pays_off() -> None:
    segment = make_train_segment(recurrence, mse, backend="eager")
    found = compare_speed(Slow(segment.recipe, "eager"), *arguments(), seconds=0.01)
    assert min(found.seconds) > 0.02
    assert found.ratio < 1
    assert found.pays_off_after is None
    assert str(found).endswith("s, which is never made up for.")


def test_what_takes_long_is_measured_longer() -> None:
    segment = make_train_segment(recurrence, mse, backend="eager")
    began = time.perf_counter()
    found = compare_speed(segment, *arguments(), seconds=0.5)
    assert time.perf_counter() - began > 0.5
    assert len(found.seconds) > 3


def test_the_ratio_is_of_rounds() -> None:
    """What disturbs a whole round has no part in it."""
    found = SpeedComparison("", "fused", 9, "cpu", 1, [1.0, 1.0, 9.0], [5.0, 4.0, 45.0], 7.0)
    assert found.ratio == 5
    assert found.pays_off_after == 2  # it saves 4 s a call
    assert ", cpu, 1 thread: 5x the speed of the eager loop\n" in str(found)


def test_a_wrong_result_has_no_speed() -> None:
    message = "train_segment: its result is wrong, so its speed is not measured.\nTrainSegment("
    with pytest.raises(RuntimeError, match=re.escape(message)) as error:
        compare_speed(wrong(), *arguments())
    assert "grads['u']" in str(error.value)


def test_bad_arguments() -> None:
    segment = make_train_segment(recurrence, mse, backend="eager")
    with pytest.raises(ValueError, match="seconds: expected a number above 0, found 0"):
        compare_speed(segment, *arguments(), seconds=0)
    windows = make_train_segment(recurrence, mse, backend="eager", window=3)
    with pytest.raises(ValueError, match="train_segment: was made with window="):
        compare_speed(windows, *arguments())
    with pytest.raises(TypeError, match="train_segment: expected what make_train_segment returns"):
        compare_speed(recurrence, *arguments())  # type: ignore[arg-type]
