"""Errors of others in a line of one's own message."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What it says, the first line of it; what it is if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
