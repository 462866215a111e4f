"""Compiler commands for kernels, and what is precompiled to speed them up.

Of the 3 seconds that a kernel takes to compile, 1.5 are for parsing the header that all kernels
include, and up to 1.5 for the panels of its matrix products. Where many kernels are built, both are
compiled once and cached beside the kernels: the header, and an object file of all panels.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from filelock import FileLock, Timeout

from ..._compat.building import cpp_command, header_command, object_command
from .sealed import is_sealed, seal

INCLUDE = Path(__file__).parent / "include"
# Precompiling pays from this many kernels on. The compiled header takes 120 MB of disk.
_WORTH_PRECOMPILING = 4


@cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(INCLUDE.glob("*.h")))


def key_of(source: str) -> str:
    """key_of : source -> hash of it and of all else that its library depends on"""
    flags = cpp_command([], "", [str(INCLUDE)])
    environment = [flags, _instructions(), torch.__version__]
    content = b"\0".join([source.encode(), _headers(), *map(str.encode, environment)])
    return hashlib.sha256(content).hexdigest()[:32]


@cache
def _instructions() -> str:
    """What ``-march=native`` means here: other machines may share the cache folder."""
    return _cpuinfo("flags", "Features") or platform.processor()


@cache
def is_intel() -> bool:
    """Whether the processor is one of Intel's, or unknown."""
    vendor = _cpuinfo("vendor_id")
    return not vendor or "GenuineIntel" in vendor


def _cpuinfo(*names: str) -> str:
    """The first line of Linux's description of the processor that begins so, or nothing."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(names):
                return line
    return ""


def commands(source: Path, library: Path, folder: Path) -> list[list[str]]:
    """commands : C++ file x library to build x cache folder -> commands to try in order

    The first uses what is precompiled, if it is there. The last does without it.
    """
    header, panels = _header(folder), _panels(folder)
    attempts = [([source], "")]
    if any(_compiled(header)) and is_sealed(panels):
        attempts.insert(0, ([source, panels], str(header)))
    return [
        shlex.split(cpp_command([*map(str, sources)], str(library), [str(INCLUDE)], preincluded))
        for sources, preincluded in attempts
    ]


def precompilation(folder: Path) -> Callable[[], None] | None:
    """precompilation : cache folder -> function that precompiles the header and the panels, or None

    None while the folder has too few kernels for this to pay, and if it is done already. If the
    function fails, kernels are compiled without.
    """
    header, panels = _header(folder), _panels(folder)
    kernels = sum(path.suffix == ".so" for path in folder.iterdir())
    if kernels < _WORTH_PRECOMPILING or (any(_compiled(header)) and is_sealed(panels)):
        return None

    def precompile() -> None:
        # One process at a time; the others skip it. It is optional, so a full disk is no error.
        lock = FileLock(header.with_suffix(".lock"), blocking=False)
        with suppress(Timeout, OSError), lock, TemporaryDirectory(dir=folder) as scratch:
            definitions, output = Path(scratch) / "panels.cpp", str(Path(scratch) / "out")
            definitions.write_text('#include "panel.h"\nFTBPTT_PANELS()\n')
            header.write_text('#include "rows.h"\nFTBPTT_PANELS(extern)\n')
            as_object, built = object_command(str(definitions), output, [str(INCLUDE)])
            as_header, compiled = header_command(str(header), output, [str(INCLUDE)])
            for command in (as_object, as_header):
                if subprocess.run(shlex.split(command), capture_output=True).returncode != 0:
                    return
            seal(Path(built))
            os.replace(built, panels)
            os.replace(compiled, f"{header}{Path(compiled).suffix}")

    return precompile


def forget_precompiled(folder: Path) -> None:
    """Deletes what is precompiled, after the compiler has rejected it."""
    for path in (*_compiled(_header(folder)), _panels(folder)):
        path.unlink(missing_ok=True)


def _header(folder: Path) -> Path:
    return folder / f"{key_of('')}.h"


def _panels(folder: Path) -> Path:
    """The object file of all panels of the matrix product."""
    return folder / f"{key_of('')}.o"


def _compiled(header: Path) -> list[Path]:
    """The precompiled forms of ``x.h``, as compilers look for them: ``x.h.gch``, ``x.h.pch``."""
    return list(header.parent.glob(f"{header.name}.?ch"))
