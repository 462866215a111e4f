"""Backends: how a program runs. ``auto`` is ``fused``, and ``eager`` where that fails."""

from .base import Backend
from .compile import COMPILE
from .eager import EAGER
from .fused import FUSED

__all__ = ["COMPILE", "EAGER", "FUSED", "NAMES", "Backend", "choose"]

_BY_NAME = {"auto": FUSED, "eager": EAGER, "compile": COMPILE, "fused": FUSED}
NAMES = tuple(_BY_NAME)


def choose(name: str) -> Backend:
    """The backend to try first for one of ``NAMES``."""
    return _BY_NAME[name]
