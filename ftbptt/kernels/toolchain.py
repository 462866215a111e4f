"""The commands that make a kernel's library, and a compiled header that makes them fast.

What every kernel includes takes as long to read as a small cell's kernel takes to compile. Where
many are built it is compiled once, and kept beside them.
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
# Compiling the header takes as long as so many kernels save by it, and 120 MB.
_WORTH_A_HEADER = 4


@cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(INCLUDE.glob("*.h")))


def key_of(source: str) -> str:
    """key_of : a source -> a name for it, and for all that its library depends on"""
    flags = cpp_command("", "", [str(INCLUDE)])
    content = [flags, _instructions(), torch.__version__]
    whole = b"\0".join([source.encode(), _headers(), *map(str.encode, content)])
    return hashlib.sha256(whole).hexdigest()[:32]


@cache
def _instructions() -> str:
    """What ``-march=native`` stands for: other processors may have the same folder."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def commands(source: Path, library: Path, folder: Path) -> list[list[str]]:
    """commands : C++ file x its library x where kernels are kept -> what to run

    If the first fails the next may not: it does without the compiled header.
    """
    header = _header(folder)
    tried = [str(header)] if any(_compiled(header)) else []
    return [
        shlex.split(cpp_command(str(source), str(library), [str(INCLUDE)], use))
        for use in (*tried, "")
    ]


def header_to_compile(folder: Path) -> Callable[[], None] | None:
    """header_to_compile : where kernels are kept -> what compiles their header, if that pays

    A process that needs a kernel or two has no use for it. If it fails, kernels do without it.
    """
    header = _header(folder)
    kernels = sum(path.suffix == ".so" for path in folder.iterdir())
    if kernels < _WORTH_A_HEADER or any(_compiled(header)):
        return None
    output = str(folder / f"build-{uuid.uuid4().hex}")
    command, made = header_command(str(header), output, [str(INCLUDE)])

    def compile_header() -> None:
        # Of several processes one does it; a full disk is no reason to stop.
        with suppress(Timeout, OSError), FileLock(header.with_suffix(".lock"), blocking=False):
            header.write_text('#include "rows.h"\n')
            done = subprocess.run(shlex.split(command), capture_output=True)
            if done.returncode == 0:
                os.replace(made, f"{header}{Path(made).suffix}")
            else:
                Path(made).unlink(missing_ok=True)

    return compile_header


def forget_header(folder: Path) -> None:
    """Deletes the compiled header, which the compiler refuses."""
    for path in _compiled(_header(folder)):
        path.unlink(missing_ok=True)


def _header(folder: Path) -> Path:
    return folder / f"{key_of('')}.h"


def _compiled(header: Path) -> list[Path]:
    """Compilers find it by its name: ``x.h.gch`` or ``x.h.pch`` for ``x.h``."""
    return list(header.parent.glob(f"{header.name}.?ch"))
