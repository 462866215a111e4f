"""The count models, against their formula written as a loop."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from bench.counts import _Model, count_baselines


def test_the_chances_are_those_of_the_formula() -> None:
    text, held_out = np.random.default_rng(0).integers(0, 6, (2, 60))

    def chance(context: tuple[int, ...], character: int, discounts: tuple[float, ...]) -> float:
        if not discounts:
            return (Counter(text.tolist())[character] + 0.5) / (len(text) + 6 / 2)
        lower = chance(context[1:], character, discounts[:-1])
        triples = [tuple(text[i : i + 3].tolist()) for i in range(len(text) - 2)]
        after = Counter(t[-1] for t in triples if t[2 - len(context) : 2] == context)
        if not after:
            return lower
        discounted = max(after[character] - discounts[-1], 0)
        return (discounted + discounts[-1] * len(after) * lower) / after.total()

    for discounts in ((), (0.3,), (0.3, 0.7)):
        found = _Model(text, 6).chances(held_out, *discounts)
        for i, p in enumerate(found.tolist(), start=2):
            context = tuple(held_out[i - len(discounts) : i].tolist())
            assert math.isclose(p, chance(context, int(held_out[i]), discounts))


def test_a_large_vocabulary_takes_the_memory_of_the_text() -> None:
    """A table of all contexts took 60 GB."""
    text = np.random.default_rng(0).integers(0, 2000, 3000)
    bits = count_baselines(text[:2900], text[2900:], 2000)
    assert all(10 < value < 12 for value in bits.values())
