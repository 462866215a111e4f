"""Compiler commands for kernels, and the precompiled header that speeds them up.

Parsing the header that every kernel includes takes as long as compiling the kernel of a small cell.
Where many kernels are built, the header is precompiled once and cached beside them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from .._compat import cpp_command, header_command

INCLUDE = Path(__file__).parent / "include"
# Precompiling pays from this many kernels on. The compiled header takes 120 MB of disk.
_WORTH_A_HEADER = 4


@cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(INCLUDE.glob("*.h")))


def key_of(source: str) -> str:
    """key_of : source -> hash of it and of all else that its library depends on"""
    flags = cpp_command("", "", [str(INCLUDE)])
    environment = [flags, _instructions(), torch.__version__]
    content = b"\0".join([source.encode(), _headers(), *map(str.encode, environment)])
    return hashlib.sha256(content).hexdigest()[:32]


@cache
def _instructions() -> str:
    """What ``-march=native`` means here: other machines may share the cache folder."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def commands(source: Path, library: Path, folder: Path) -> list[list[str]]:
    """commands : C++ file x library to build x cache folder -> commands to try in order

    The first uses the precompiled header, if there is one. The last does without it.
    """
    header = _header(folder)
    headers = [str(header)] if any(_compiled(header)) else []
    return [
        shlex.split(cpp_command(str(source), str(library), [str(INCLUDE)], preincluded))
        for preincluded in (*headers, "")
    ]


def header_to_compile(folder: Path) -> Callable[[], None] | None:
    """header_to_compile : cache folder -> function that precompiles the header, or None

    None while the folder has too few kernels for this to pay, and if it is done already. If the
    function fails, kernels are compiled without the header.
    """
    header = _header(folder)
    kernels = sum(path.suffix == ".so" for path in folder.iterdir())
    if kernels < _WORTH_A_HEADER or any(_compiled(header)):
        return None
    output = str(folder / f"build-{uuid.uuid4().hex}")
    command, compiled = header_command(str(header), output, [str(INCLUDE)])

    def compile_header() -> None:
        # One process at a time; the others skip it. It is optional, so a full disk is no error.
        with suppress(Timeout, OSError), FileLock(header.with_suffix(".lock"), blocking=False):
            header.write_text('#include "rows.h"\n')
            result = subprocess.run(shlex.split(command), capture_output=True)
            if result.returncode == 0:
                os.replace(compiled, f"{header}{Path(compiled).suffix}")
            else:
                Path(compiled).unlink(missing_ok=True)

    return compile_header


def forget_header(folder: Path) -> None:
    """Deletes the precompiled header, after the compiler has rejected it."""
    for path in _compiled(_header(folder)):
        path.unlink(missing_ok=True)


def _header(folder: Path) -> Path:
    return folder / f"{key_of('')}.h"


def _compiled(header: Path) -> list[Path]:
    """The precompiled forms of ``x.h``, as compilers look for them: ``x.h.gch``, ``x.h.pch``."""
    return list(header.parent.glob(f"{header.name}.?ch"))
