"""Backends: how a program runs. Each is one function from a scan block to a callable, ``run_scan``,
and ``build``, which makes a whole function of the program ready to run."""

from __future__ import annotations

from .compile import CompileBackend
from .eager import EagerBackend

BACKENDS = ("auto", "eager", "compile")
BUILD_ERRORS = (Exception,)


def choose(name: str) -> EagerBackend | CompileBackend:
    return EagerBackend() if name == "eager" else CompileBackend()
