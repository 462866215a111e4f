"""A long sequence in which rare events change all later labels: only a carried state learns it."""

from __future__ import annotations

from bench.frames import learn


def test_the_carried_state_learns_what_a_fresh_one_cannot() -> None:
    carried, fresh = (
        learn(40_000, between=12, hidden=10, k=12, fresh=fresh, rate=1e-2)
        for fresh in (False, True)
    )
    assert carried > 0.98
    assert fresh < 0.7  # it is right behind an event, and guesses at the start of a chunk
