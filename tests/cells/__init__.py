"""The one table of cells that every test crosses with its own question."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch

from . import gated, memory, structure, torch_modules
from .problems import TABLE, Draw, Problem

__all__ = ["CELLS", "NOT_BFLOAT16", "REPRESENTATIVE", "WITH_ROWS", "problem", "slow_but"]

_modules = (torch_modules, gated, memory, structure)  # they fill the table
CELLS: list[str] = list(TABLE)
# These stand for their kind where a test is too slow for the whole table.
REPRESENTATIVE = (
    "lstm_readout",
    "stacked_lstm_cells",
    "layer_norm_lstm",
    "embedding_tied",
    "nested_everything",
    "counter_and_flag",
    "lru_complex",
    "delay_line",
    "gru_3_layers",
)
# torch has no bfloat16 complex numbers.
NOT_BFLOAT16 = frozenset({"lru_complex"})


@cache
def problem(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Problem:
    """The cell's problem; the seed fixes weights, state and data. Tests must not change it."""
    made = TABLE[name](Draw(seed))
    return made if dtype == torch.float64 else made.to(dtype)


def slow_but(quick: Iterable[Any], given: Iterable[Any]) -> list[Any]:
    """Parameters of a test, such as names of cells, marked slow but for the quick ones."""
    slow = pytest.mark.slow
    return [one if one in quick else pytest.param(one, marks=slow) for one in given]


WITH_ROWS: list[str] = [name for name in CELLS if problem(name).rows is not None]
