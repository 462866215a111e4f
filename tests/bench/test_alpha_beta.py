"""The alpha-beta model of communication costs."""

from __future__ import annotations

import pytest

from bench.alpha_beta import Link, Update, best, fitted, in_nodes, ring, tree

LINK = Link(alpha=1e-5, beta=1e9)


def by_hand(size: float, ranks: int) -> float:
    """A ring, message by message: all ranks send at once, p - 1 rounds to add, p - 1 to spread."""
    return sum(LINK.alpha + (size / ranks) / LINK.beta for _ in range(2 * (ranks - 1)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_ring(ranks: int) -> None:
    assert ring(LINK)(4e6, ranks) == pytest.approx(by_hand(4e6, ranks))


@pytest.mark.parametrize(("ranks", "levels"), [(1, 0), (2, 1), (5, 3), (4096, 12)])
def test_a_tree(ranks: int, levels: int) -> None:
    assert tree(LINK)(0, ranks) == pytest.approx(2 * levels * LINK.alpha)
    assert tree(LINK)(1e6, ranks) == pytest.approx(2 * levels * LINK.alpha + (levels > 0) * 2e-3)


def test_the_better_one() -> None:
    """A tree for small messages on many ranks, a ring for large ones on few."""
    either = best(ring(LINK), tree(LINK))
    assert either(8, 1024) == tree(LINK)(8, 1024) < ring(LINK)(8, 1024)
    assert either(1e9, 4) == ring(LINK)(1e9, 4) < tree(LINK)(1e9, 4)


def test_nodes() -> None:
    """Between nodes each rank transfers only its share."""
    slow = Link(1e-4, 1e8)
    both = in_nodes(ring(LINK), ring(slow), 8)
    assert both(8e6, 8) == ring(LINK)(8e6, 8)
    assert both(8e6, 32) == pytest.approx(ring(LINK)(8e6, 8) + ring(slow)(1e6, 4))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_fit_finds_the_link(ranks: int) -> None:
    sizes = [8, 1024, 1 << 20]
    link = fitted(sizes, [ring(LINK)(size, ranks) for size in sizes], ranks)
    assert (link.alpha, link.beta) == pytest.approx((LINK.alpha, LINK.beta))


def test_overlap() -> None:
    """A reduction that overlaps with the computation is free; what outlasts it is not."""
    one = lambda size, ranks: 1.0  # noqa: E731
    assert Update(10.0, [(1, 4.0), (1, 6.0)]).seconds(one, 2) == 10.0
    assert Update(10.0, [(1, 9.5), (1, 10.0)]).seconds(one, 2) == 11.5
    assert Update(10.0, [(1, 10.0), (1, 10.0)]).seconds(one, 2) == 12.0
    assert Update(10.0, [(1, 10.0)]).seconds(one, 1) == 10.0
