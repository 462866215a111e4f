"""Draws from the random numbers of Python and NumPy by a step that is being traced.

Such a draw would be one number for all steps, so the step is refused. A changed state of a
generator alone does not prove it: the generators are global, and another thread, such as one that
augments data while the first call traces, may have drawn. So a change only starts a second trace,
in which the draws are attributed to a thread: :func:`draws_of_this_thread` notes those that the
step makes itself.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def draws_of_this_thread() -> Iterator[set[str]]:
    """The modules from whose generators this thread draws within the context."""
    drawn: set[str] = set()
    generator = random.random.__self__  # type: ignore[attr-defined]

    def profile(_: Any, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is generator:
            drawn.add("random")

    profile_before = sys.getprofile()  # each thread has one
    sys.setprofile(profile)
    try:
        with _watching_numpy(drawn):
            yield drawn
    finally:
        sys.setprofile(profile_before)


@contextmanager
def _watching_numpy(drawn: set[str]) -> Iterator[None]:
    """A profile function does not see NumPy's functions; but each locks its bit generator."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        yield
        return
    generator = numpy.random.get_bit_generator()
    watched = _WatchedGenerator(generator, drawn)
    numpy.random.set_bit_generator(watched)
    watched.thread = threading.get_ident()  # not before: set_bit_generator takes the lock too
    try:
        yield
    finally:
        watched.thread = None
        numpy.random.set_bit_generator(generator)


class _WatchedGenerator:
    """A bit generator of NumPy, with a lock that notes when ``thread`` takes it."""

    def __init__(self, generator: Any, drawn: set[str]) -> None:
        self.generator, self.drawn = generator, drawn
        self.thread: int | None = None  # None: not watching
        self.lock = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)

    def __enter__(self) -> None:
        if threading.get_ident() == self.thread:
            self.drawn.add("numpy.random")
        self.generator.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.generator.lock.release()
