"""Python's search for unreachable cycles, put off for a while."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_is_put_off = False


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For tracing and compilation: each search would look at all objects, and free next to none.

    It took a sixth of a first call whose kernels are on disk. Also for the capture of a CUDA graph,
    which garbage would end. The search is that of all threads: whoever put it off first ends that.
    """
    global _is_put_off
    was_on = gc.isenabled()
    try:
        _is_put_off |= was_on
        gc.disable()
        yield
    finally:
        if was_on:
            _in_force_again()


def _in_force_again() -> None:
    global _is_put_off
    if _is_put_off:
        gc.enable()
    _is_put_off = False


# A process that another thread forks meanwhile has nobody who would do so.
os.register_at_fork(after_in_child=_in_force_again)
