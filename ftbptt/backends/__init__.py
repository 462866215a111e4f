"""Backends: how a program runs. ``auto`` is ``compile``, and ``eager`` where that fails."""

from .base import Backend
from .compile import COMPILE
from .eager import EAGER

__all__ = ["COMPILE", "EAGER", "NAMES", "Backend", "choose"]

NAMES = ("auto", "eager", "compile")


def choose(name: str) -> Backend:
    """The backend to try first for one of ``NAMES``."""
    return EAGER if name == "eager" else COMPILE
