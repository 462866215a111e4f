"""Kernels on CPUs use all threads, however small they are."""

from __future__ import annotations

import pytest

from ftbptt.kernels.cpu import loop


@pytest.fixture(autouse=True)
def _all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_WAKING", 0)
