"""Locks that a forked process does not find held for ever."""

from __future__ import annotations

import os
import threading


class LockOverForks:
    """A lock that may be taken again by the thread that holds it.

    A fork has none of the other threads, which would release it, so it gets a new one there. That
    a fork waits for it is no way out: other libraries do so too, and then each waits for another.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        if self._lock.acquire(blocking=False):  # not held, or by the thread that has forked
            self._lock.release()
        else:
            self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
