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
Chances = NDArray[np.float64]
DISCOUNTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def count_baselines(train: Codes, held_out: Codes, size: int) -> dict[str, float]:
    """Bits per character of the unigram and the order-2 count model on ``held_out``."""
    cut = len(train) - max(len(train) // 20, 3)
    counted, tuning = _Model(train[:cut], size), train[cut:]
    best1 = min(DISCOUNTS, key=lambda d: _bits(counted.chances(tuning, d)))
    best2 = min(DISCOUNTS, key=lambda d: _bits(counted.chances(tuning, best1, d)))
    model = _Model(train, size)
    return {
        "unigram counts": _bits(model.chances(held_out)),
        "order-2 counts": _bits(model.chances(held_out, best1, best2)),
    }


class _Model:
    """The counts of a text."""

    def __init__(self, codes: Codes, size: int) -> None:
        self.size = size
        unigram = np.bincount(codes, minlength=size) + 0.5
        self.unigram = unigram / unigram.sum()
        *contexts, characters = self._contexts(codes)
        self.after = [_Followers(context, characters, size) for context in contexts]

    def _contexts(self, codes: Codes) -> tuple[Codes, Codes, Codes]:
        """Of each character but the first two: the one before it, the two before, and itself."""
        a, b, c = codes[:-2], codes[1:-1], codes[2:]
        return b, a * self.size + b, c

    def chances(self, codes: Codes, *discounts: float) -> Chances:
        """P of each character but the first two, by as many before it as there are discounts."""
        *contexts, characters = self._contexts(codes)
        chances = self.unigram[characters]
        for after, context, discount in zip(self.after, contexts, discounts, strict=False):
            chances = after.chances(context, characters, chances, discount)
        return chances


class _Followers:
    """How often each character follows each context, of those that occur."""

    def __init__(self, contexts: Codes, characters: Codes, size: int) -> None:
        self.size = size
        pairs, counts = np.unique(contexts * size + characters, return_counts=True)
        known, first = np.unique(pairs // size, return_index=True)
        self.counts = pairs, counts
        self.totals = known, np.add.reduceat(counts, first)
        self.types = known, np.diff(first, append=len(pairs))

    def chances(
        self, contexts: Codes, characters: Codes, lower: Chances, discount: float
    ) -> Chances:
        """P(character | context), where ``lower`` is that by a shorter context."""
        count = _looked_up(self.counts, contexts * self.size + characters)
        total, types = (_looked_up(table, contexts) for table in (self.totals, self.types))
        discounted = np.maximum(count - discount, 0.0) + discount * types * lower
        return np.where(total > 0, discounted / np.maximum(total, 1), lower)


def _looked_up(table: tuple[Codes, Codes], keys: Codes) -> Codes:
    """The value of each key, 0 for those that the table lacks; its own are sorted."""
    known, values = table
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[places] == keys, values[places], 0)


def _bits(chances: Chances) -> float:
    return float(-np.log2(chances).mean())
