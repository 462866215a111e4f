"""Errors of the caller's own code, which would come again on any other backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_MARK = "_ftbptt_callers_own"


@contextmanager
def callers_code() -> Iterator[None]:
    """Around a call of the caller's code; marks an error that it raises."""
    try:
        yield
    except Exception as error:
        setattr(error, _MARK, True)
        raise


def is_callers(error: BaseException) -> bool:
    """Whether the caller's code raised it."""
    return hasattr(error, _MARK)
