"""Parts of messages: what an error says, what a value is."""

from __future__ import annotations

from typing import Any


def first_line(error: BaseException) -> str:
    """The first line of its message; its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def describe_type(value: Any) -> str:
    """The type of a value, and how many parts it has if it is a tuple or a list.

    >>> describe_type((1, 2)), describe_type(1)
    ('a tuple of 2', 'an int')
    """
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}{size}"
