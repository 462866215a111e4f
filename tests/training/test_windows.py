"""Which steps an update reads: TBPTT(k1, k2), burn-in, context, fresh windows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftbptt.training import Truncation, Window


def windows(truncation: Truncation, total: int) -> list[Window]:
    """Those that make an update."""
    found, index = [], 0
    while (window := truncation.cut(truncation.window(index), total)) is not None:
        found += [window] if truncation.learns(window) else []
        index += 1
    return found


def spans(total: int, **options: Any) -> list[tuple[int, int, int]]:
    options = {"k2": None, "burn_in": 0, "context": 0, "fresh": False} | options
    return [(w.warm, w.start, w.end) for w in windows(Truncation.of(**options), total)]


def test_usual() -> None:
    assert spans(10, k1=4) == [(0, 0, 4), (4, 4, 8), (8, 8, 10)]


def test_overlapping() -> None:
    """The first reach back as far as there is something."""
    assert spans(8, k1=2, k2=5) == [(0, 0, 2), (0, 0, 4), (1, 1, 6), (3, 3, 8)]


def test_gaps() -> None:
    assert spans(11, k1=4, k2=1) == [(3, 3, 4), (7, 7, 8)]
    assert spans(12, k1=4, k2=1)[-1] == (11, 11, 12)


def test_burn_in() -> None:
    assert spans(12, k1=4, k2=2, burn_in=3) == [(0, 2, 4), (3, 6, 8), (7, 10, 12)]


def test_context_leaves_out_windows_without_a_loss() -> None:
    assert spans(8, k1=2, k2=5, context=3) == [(0, 0, 4), (1, 1, 6), (3, 3, 8)]
    assert spans(9, k1=4, k2=4, context=1) == [(0, 0, 4), (4, 4, 8)]


def test_fresh() -> None:
    """The last one is the first that reaches the end."""
    assert spans(9, k1=2, k2=4, fresh=True) == [(0, 0, 4), (2, 2, 6), (4, 4, 8), (6, 6, 9)]
    assert spans(9, k1=5, k2=2, burn_in=1, fresh=True) == [(0, 1, 3), (5, 6, 8)]
    assert spans(3, k1=1, k2=4, fresh=True) == [(0, 0, 3)]


@given(
    k1=st.integers(1, 8),
    k2=st.integers(1, 12),
    burn_in=st.integers(0, 6),
    context=st.integers(0, 11),
    fresh=st.booleans(),
    total=st.integers(0, 40),
)
def test_what_holds_for_all(
    k1: int, k2: int, burn_in: int, context: int, fresh: bool, total: int
) -> None:
    truncation = Truncation(k1, k2, burn_in, min(context, k2 - 1), fresh)
    found = windows(truncation, total)
    assert truncation.updates(total) == len(found)
    for window in found:
        assert 0 <= window.warm <= window.start < window.end <= total
        assert window.end - window.start <= k2
        assert window.start - window.warm <= burn_in
    for before, after in pairwise(found):
        assert after.warm >= before.warm
        assert after.index == before.index + 1
    if found and not fresh:
        assert all(window.end == (window.index + 1) * k1 for window in found[:-1])
    assert truncation.cut(truncation.window(0), 0) is None


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"k1": 0}, ValueError, "k1: expected at least 1, found 0"),
        ({"k1": 4, "k2": 0}, ValueError, "k2: expected at least 1, found 0"),
        ({"k1": 2.0}, TypeError, "k1: expected a whole number, found 2.0"),
        ({"k1": True}, TypeError, "k1: expected a whole number, found True"),
        ({"k1": 4, "burn_in": -1}, ValueError, "burn_in: expected at least 0, found -1"),
        (
            {"k1": 4, "context": 4},
            ValueError,
            "context: 4 of the k2=4 steps of a window leave none with a loss",
        ),
    ],
)
def test_bad_input(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        spans(10, **options)
