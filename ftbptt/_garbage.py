"""Python's search for unreachable cycles, put off while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For tracing and compilation: each search would look at all objects, and free next to none.

    It took a sixth of a first call whose kernels are on disk. One thread at a time: the search is
    that of all threads.
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
