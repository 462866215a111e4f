"""Parts of messages: what an error says, what a value is."""

from __future__ import annotations

from dataclasses import is_dataclass
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


def registering(leaf: Any) -> str:
    """How an object becomes a tree with leaves of its own, or "".

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Cache:
    ...     keys: object
    >>> registering(Cache(1)), registering(3)
    ('register its class, torch.export.register_dataclass(Cache)', '')
    """
    if isinstance(leaf, type) or not is_dataclass(leaf):
        return ""
    return f"register its class, torch.export.register_dataclass({type(leaf).__name__})"
