"""Cores of a rank's own, in threads: what they change is of the thread, and of those it starts."""

from __future__ import annotations

import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from ftbptt.distributed import use_own_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def _placed() -> tuple[set[int], int]:
    return os.sched_getaffinity(0), os.sched_getscheduler(0)


def _placed_as(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[int], int]]:
    """A thread after ``use_own_cores``, and one that it starts."""
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(size))

    def both() -> list[tuple[set[int], int]]:
        use_own_cores()
        with ThreadPoolExecutor(1) as started:
            return [_placed(), started.submit(_placed).result()]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(both).result()


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _placed()
    cores, size = before[0], min(2, len(before[0]))
    shares = []
    for rank in range(size):
        own, started = _placed_as(rank, size, monkeypatch)
        assert own == started
        assert own[1] == os.SCHED_BATCH
        shares.append(own[0])
    assert set().union(*shares) <= cores
    assert [len(share) for share in shares] == [len(cores) // size] * size
    assert sum(map(len, shares)) == len(set().union(*shares))
    assert _placed() == before


def test_fewer_cores_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, _ = _placed()
    own, _ = _placed_as(1, len(cores) + 1, monkeypatch)
    assert own == (cores, os.SCHED_BATCH)


def test_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=r"use_own_cores: the system does not allow it \("):
            _placed_as(0, 1, monkeypatch)
