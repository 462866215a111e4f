"""C++ source -> a function, compiled once per content and kept on disk.

The library is built under another name and renamed when it is whole, so a build that is killed
leaves nothing behind that looks like one, and processes that build the same at once do not meet.
It ends with a hash of itself: one that was damaged later is built anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, cast

from .._compat import cpp_command, kernel_cache_dir

INCLUDE = Path(__file__).parent / "include"


class KernelBuildError(RuntimeError):
    """The compiler has failed."""


def _command(source: str, library: str) -> str:
    return cpp_command(source, library, [str(INCLUDE)])


@cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(INCLUDE.glob("*.h")))


_builders = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="ftbptt-build")
_started: dict[Path, Future[None]] = {}


def start(source: str) -> Path:
    """start : source of a kernel -> where its library will be, once ``finish`` has returned

    Several are compiled at once, and while the program around them is.
    """
    content = [source.encode(), _headers(), _command("", "").encode()]
    key = hashlib.sha256(b"\0".join(content)).hexdigest()[:32]
    library = Path(kernel_cache_dir()) / f"{key}.so"
    if library not in _started and not _is_whole(library):
        library.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=library.parent, prefix="build-")
        path, built = Path(scratch.name) / f"{key}.cpp", Path(scratch.name) / f"{key}.so"
        path.write_text(source)
        command = _command(str(path), str(built))
        _started[library] = _builders.submit(_build, scratch, command, built, library)
    return library


def finish() -> None:
    """Waits for all that was started.

    Raises :class:`KernelBuildError` if the compiler refuses a source.
    """
    for library, started in list(_started.items()):
        try:
            started.result()
        finally:
            _started.pop(library, None)  # what failed is tried again


def abandon() -> None:
    """What was started is not wanted any more, whether it fails or not."""
    for started in _started.values():
        started.exception()
    _started.clear()


@cache
def load(library: str) -> Callable[[Any, Any], None]:
    """load : path of a library -> its function ``run(memory, numbers)``"""
    finish()
    run = ctypes.CDLL(library).run
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    run.restype = None
    return cast(Callable[[Any, Any], None], run)


def _build(
    scratch: tempfile.TemporaryDirectory[str], command: str, built: Path, library: Path
) -> None:
    with scratch:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True)
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            raise KernelBuildError(f"no kernel could be compiled: {' '.join(said[:3])}")
        content = built.read_bytes()
        built.write_bytes(content + _hash(content))
        os.replace(built, library)


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _is_whole(library: Path) -> bool:
    """Whether all of the library is there: its last bytes are the hash of the others.

    One that was cut short, by a crash or a copy, would end the process when it is loaded.
    """
    content = library.read_bytes() if library.exists() else b""
    size = len(_hash(b""))
    return content[-size:] == _hash(content[:-size])
