"""A run that ends when its loss does not fall any more."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ftbptt.training import EarlyStop


@pytest.mark.parametrize(
    ("options", "losses", "expected"),
    [
        ({"patience": 2}, [3, 2, 1, 0], [False] * 4),
        ({"patience": 2}, [3, 3, 3], [False, False, True]),
        ({"patience": 2}, [3, 4, 2, 2.5, 2], [False, False, False, False, True]),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.5, 2.4], [False, False, True, False]),
        ({"patience": 1}, [math.nan], [True]),
        ({"patience": 2}, [1, math.nan, 0, math.inf, math.nan], [False] * 4 + [True]),
    ],
)
def test_early_stop(options: dict[str, Any], losses: list[float], expected: list[bool]) -> None:
    stop = EarlyStop(**options)
    assert [stop(loss) for loss in losses] == expected


def test_early_stop_goes_on() -> None:
    stop = EarlyStop(3)
    for loss in (2.0, 1.0, 1.5):
        stop(loss)
    again = EarlyStop(3)
    again.load_state_dict(stop.state_dict())
    assert [again(loss) for loss in (1.0, 1.0)] == [False, True]
    assert again.best == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patience": 0}, "patience: expected at least 1, found 0"),
        ({"patience": 2, "min_delta": -0.1}, "min_delta: expected at least 0, found -0.1"),
        ({"patience": 2, "min_delta": math.nan}, "min_delta: expected at least 0, found nan"),
    ],
)
def test_bad_early_stop(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EarlyStop(**options)
