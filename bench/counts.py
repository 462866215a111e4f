"""Count models: what a character model must beat, in bits per character.

    order 0 (unigram)   P(c)      = n(c) / N, add one half
    order 1             P(c|b)    interpolated absolute discounting over order 0
    order 2 (trigram)   P(c|a,b)  the same over order 1

With a discount d:  P(c|ctx) = (max(n(ctx c) - d, 0) + d * types(ctx) * P_lower(c)) / n(ctx).
The discounts are tuned on the last part of the training text, then the counts are taken again over
all of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int64]
Table = NDArray[np.float64]
DISCOUNTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def count_baselines(train: Codes, held_out: Codes, size: int) -> dict[str, float]:
    """Bits per character of the unigram and the order-2 count model on ``held_out``."""
    cut = len(train) - max(len(train) // 20, 3)
    counted, tuning = train[:cut], train[cut:]
    best1 = min(DISCOUNTS, key=lambda d: _bits(_tables(counted, size, d), 1, tuning))
    best2 = min(DISCOUNTS, key=lambda d: _bits(_tables(counted, size, best1, d), 2, tuning))
    tables = _tables(train, size, best1, best2)
    return {
        "unigram counts": _bits(tables, 0, held_out),
        "order-2 counts": _bits(tables, 2, held_out),
    }


def _tables(codes: Codes, size: int, d1: float, d2: float | None = None) -> list[Table]:
    """[P(c), P(c|b), P(c|a,b)], with one row per context; the last only if ``d2`` is given."""
    a, b, c = codes[:-2], codes[1:-1], codes[2:]
    unigram = np.bincount(codes, minlength=size) + 0.5
    tables = [(unigram / unigram.sum())[None]]
    pairs = np.bincount(b * size + c, minlength=size**2).reshape(size, size)
    tables.append(_discounted(pairs, tables[0], d1))
    if d2 is not None:
        triples = np.bincount((a * size + b) * size + c, minlength=size**3).reshape(-1, size)
        tables.append(_discounted(triples, np.tile(tables[1], (size, 1)), d2))
    return tables


def _discounted(counts: NDArray[np.int64], lower: Table, discount: float) -> Table:
    total = counts.sum(1, keepdims=True)
    types = (counts > 0).sum(1, keepdims=True)
    discounted = np.maximum(counts - discount, 0.0)
    with np.errstate(invalid="ignore"):
        table = (discounted + discount * types * lower) / total
    return np.where(total > 0, table, lower)


def _bits(tables: list[Table], order: int, codes: Codes) -> float:
    """Mean bits of each character of ``codes`` but the first two, which lack a context."""
    a, b, c = codes[:-2], codes[1:-1], codes[2:]
    size = tables[0].shape[1]
    context = (np.zeros_like(c), b, a * size + b)[order]
    return float(-np.log2(tables[order][context, c]).mean())
