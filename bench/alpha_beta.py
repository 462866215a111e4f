"""What an all-reduce costs, and how much of it an update hides: the alpha-beta model.

A message of ``n`` bytes takes ``alpha + n / beta``: a latency and a bandwidth. Ring and tree as in
Thakur, Rabenseifner and Gropp, 2005, and Sanders, Speck and Träff, 2009 (two trees, so that each
link sends and receives at once).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """``alpha`` seconds for any message, ``beta`` bytes a second."""

    alpha: float
    beta: float


Reduce = Callable[[float, int], float]  # bytes, ranks -> seconds


def ring(link: Link) -> Reduce:
    """Reduce-scatter and all-gather around a ring: 2 (p - 1) messages of a p-th of the bytes."""

    def seconds(size: float, ranks: int) -> float:
        return 2 * (ranks - 1) * (link.alpha + size / ranks / link.beta)

    return seconds


def tree(link: Link) -> Reduce:
    """Up and down two binary trees, in pieces: all bytes twice, a latency for each level."""

    def seconds(size: float, ranks: int) -> float:
        levels = math.ceil(math.log2(ranks)) if ranks > 1 else 0
        return 2 * levels * link.alpha + (2 * size / link.beta if levels else 0.0)

    return seconds


def best(*ways: Reduce) -> Reduce:
    """The fastest way for each size; libraries choose it from built-in tables."""
    return lambda size, ranks: min(way(size, ranks) for way in ways)


def in_nodes(inside: Reduce, outside: Reduce, per_node: int) -> Reduce:
    """Within a node first, so that each rank takes its share of the bytes to other nodes."""

    def seconds(size: float, ranks: int) -> float:
        if ranks <= per_node:
            return inside(size, ranks)
        return inside(size, per_node) + outside(size / per_node, ranks // per_node)

    return seconds


@dataclass(frozen=True)
class Update:
    """``compute`` seconds without communication; ``buckets`` of (bytes, when they are ready)."""

    compute: float
    buckets: Sequence[tuple[float, float]]

    def seconds(self, reduce: Reduce, ranks: int) -> float:
        """With communication: buckets follow each other, beside what is still being computed."""
        free = 0.0
        for size, ready in self.buckets if ranks > 1 else ():
            free = max(free, ready) + reduce(size, ranks)
        return max(free, self.compute)


def fitted(sizes: Sequence[float], seconds: Sequence[float], ranks: int) -> Link:
    """The link of which a ring takes such times for messages of such sizes.

    By least squares of the relative errors, so that small messages count as much as large ones.
    """
    weights = [1 / s**2 for s in seconds]
    total = sum(weights)
    x = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    y = sum(w * s for w, s in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (n - x) ** 2 for w, n in zip(weights, sizes, strict=True))
    both = sum(w * (n - x) * (s - y) for w, n, s in zip(weights, sizes, seconds, strict=True))
    slope = both / spread
    messages = 2 * (ranks - 1)
    return Link(max(y - slope * x, 0.0) / messages, messages / ranks / slope)
