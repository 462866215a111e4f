"""Backends: how a program runs. ``auto`` tries ``fused`` and falls back where that fails."""

from .base import Backend
from .compile import COMPILE
from .cudagraph import CUDAGRAPH
from .eager import EAGER
from .fused import FUSED

__all__ = ["COMPILE", "CUDAGRAPH", "EAGER", "FUSED", "NAMES", "Backend", "choose", "fallback"]

_BY_NAME = {
    "auto": FUSED, "eager": EAGER, "compile": COMPILE, "fused": FUSED, "cudagraph": CUDAGRAPH,
}  # fmt: skip
NAMES = tuple(_BY_NAME)


def choose(name: str) -> Backend:
    """The backend to try first for one of ``NAMES``."""
    return _BY_NAME[name]


def fallback(failed: Backend, device_type: str) -> Backend:
    """The backend to try after ``failed``."""
    return CUDAGRAPH if device_type == "cuda" and failed.name == "fused" else EAGER
