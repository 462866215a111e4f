"""Compiled files that tell whether they are complete: they end with a hash of what is before it.

Loading a library that was truncated, by a crash or a copy, would crash the process.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def seal(path: Path) -> None:
    """Appends the hash. Loaders and linkers ignore what follows the last section of a file."""
    content = path.read_bytes()
    path.write_bytes(content + _hash(content))


def is_sealed(path: Path) -> bool:
    """Whether the file exists, and ends with the hash of the bytes before it."""
    content = path.read_bytes() if path.exists() else b""
    size = len(_hash(b""))
    return content[-size:] == _hash(content[:-size])


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
