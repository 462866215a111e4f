"""Programs that are compiled for some numbers of steps only, as Inductor does for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ftbptt import make_train_segment
from ftbptt.backends import EAGER

from ..cells import problem
from ..oracle import check

MOST_ELEMENTS = 2**31 - 1


def test_more_steps_than_indices_of_32_bits_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they suffice for the example Inductor takes them, and leaves a guard for it."""
    wide: list[bool] = []

    def build(function: Callable[..., Any], examples: Sequence[Tensor], mode: Any) -> Any:
        lengths = [e.shape[0] for e in examples if e.dim() and isinstance(e.shape[0], torch.SymInt)]
        assert all(length is lengths[0] or length == lengths[0] for length in lengths)
        is_wide = not lengths or bool(lengths[0] * 20_000_000 > MOST_ELEMENTS)
        wide.append(is_wide)

        def run(*args: Tensor) -> Any:
            steps = args[0].shape[0] if not lengths else max(a.shape[0] for a in args if a.dim())
            assert is_wide or steps * 20_000_000 <= MOST_ELEMENTS
            return function(*args)

        return run

    backend = replace(EAGER, build=build)
    monkeypatch.setattr("ftbptt.segment.executables.choose", lambda name: backend)
    given = problem("elman")
    segment = make_train_segment(given.step, given.loss, backend="eager")
    for steps in (3, 100, 7, 107, 108, 130, 64):
        check(segment, given, steps)
    # One for up to 64 steps, of which an example is, and one for more; each holds for any K.
    assert wide == [False, True]
    assert segment.compile_count == 2
