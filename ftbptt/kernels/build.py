"""C++ source -> a function, compiled once per content and kept on disk.

The library is built under another name and renamed when it is whole, so a build that is killed
leaves nothing behind that looks like one, and processes that build the same at once do not meet.
It ends with a hash of itself: one that was damaged later is built anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from .._compat import compile_cache_dir
from .toolchain import commands, forget_header, header_to_compile, key_of


class KernelBuildError(RuntimeError):
    """The compiler has failed."""


def kernel_cache_dir() -> Path:
    """Where compiled kernels are kept: beside what Inductor keeps."""
    return Path(compile_cache_dir(), "ftbptt", torch.backends.cpu.get_cpu_capability())


_builders = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="ftbptt-build")
_started: dict[Path, Future[None]] = {}
_with_header: set[Path] = set()  # folders of kernels for which this process has made a header


def start(source: str) -> Path:
    """start : source of a kernel -> where its library will be, once ``finish`` has returned

    Several are compiled at once, and while the program around them is.
    """
    folder, key = kernel_cache_dir(), key_of(source)
    library = folder / f"{key}.so"
    if library not in _started and not _is_whole(library):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder, prefix="build-")
        path, built = Path(scratch.name) / f"{key}.cpp", Path(scratch.name) / f"{key}.so"
        path.write_text(source)
        tried = commands(path, built, folder)
        _started[library] = _builders.submit(_build, scratch, tried, built, library)
    return library


def finish() -> None:
    """Waits for all that was started.

    Raises :class:`KernelBuildError` if the compiler refuses a source.
    """
    folders = {library.parent for library in _started}
    for library, started in list(_started.items()):
        try:
            started.result()
        finally:
            _started.pop(library, None)  # what failed is tried again
    for folder in folders - _with_header:
        compile_header = header_to_compile(folder)
        if compile_header:
            _with_header.add(folder)
            _builders.submit(compile_header)


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
    scratch: tempfile.TemporaryDirectory[str], tried: list[list[str]], built: Path, library: Path
) -> None:
    with scratch:
        for command in tried:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                break
        else:
            said = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            raise KernelBuildError(f"no kernel could be compiled: {' '.join(said[:3])}")
        if command is not tried[0]:
            forget_header(library.parent)
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
