"""C++ source -> a function, compiled once per source text and cached on disk.

A library is built in a temporary folder and renamed once complete. So a killed build leaves no
partial library, and processes that build the same source at the same time do not interfere.
Libraries are sealed: one that was damaged later is rebuilt.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, cast

import torch

from ..._compat.building import compile_cache_dir
from .sealed import is_sealed, seal
from .toolchain import commands, forget_precompiled, key_of, precompilation


class KernelBuildError(RuntimeError):
    """The C++ compiler failed on a kernel."""


def kernel_cache_dir() -> Path:
    """The folder of compiled kernels, inside Inductor's cache folder."""
    return Path(compile_cache_dir(), "ftbptt", torch.backends.cpu.get_cpu_capability())


def _new_builders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="ftbptt-build")


_builders = _new_builders()
_started: dict[Path, Future[None]] = {}
_ahead: dict[Path, Future[None]] = {}  # begun before they are asked for
_precompiled: set[Path] = set()  # cache folders for which this process has started precompiling


def _forget_builders() -> None:
    """In a forked process, which has none of the threads that its parent had."""
    global _builders
    _builders = _new_builders()
    _started.clear()
    _ahead.clear()


os.register_at_fork(after_in_child=_forget_builders)


def start(source: str) -> Path:
    """start : source of a kernel -> path of its library, which exists once ``finish`` returns

    Kernels are compiled in the background, several at once, while Inductor compiles the program.
    """
    library = _library_of(source)
    _begin(source, library)
    if library in _ahead:
        _started[library] = _ahead.pop(library)
    return library


def start_ahead(source: str) -> None:
    """As ``start``, of a kernel that will be asked for later: ``finish`` does not wait for it."""
    library = _library_of(source)
    begun = _ahead.get(library)
    # One that failed before, and was not asked for: on a full disk, which may have room by now.
    if begun is not None and begun.done() and (begun.cancelled() or begun.exception()):
        del _ahead[library]
    _begin(source, library)


def _begin(source: str, library: Path) -> None:
    if library not in _started and library not in _ahead and not is_sealed(library):
        library.parent.mkdir(parents=True, exist_ok=True)
        _ahead[library] = _builders.submit(_build, source, library)


def _library_of(source: str) -> Path:
    return kernel_cache_dir() / f"{key_of(source)}.so"


def finish() -> None:
    """Waits for all builds that were started.

    Raises :class:`KernelBuildError` if the compiler rejects a source.
    """
    builds = dict(_started)
    abandon()  # all of them, so that one which failed can be started again
    for build in builds.values():
        build.result()
    for folder in {library.parent for library in builds} - _precompiled:
        precompile = precompilation(folder)
        if precompile:
            _precompiled.add(folder)
            # A daemon: nobody waits for it, not even the end of the process.
            Thread(target=precompile, name="ftbptt-precompile", daemon=True).start()


def abandon() -> None:
    """Waits for all builds that were started, and ignores their errors.

    Ctrl-C meanwhile cancels what has not begun: not even the end of the process waits for it.
    """
    try:
        wait(_started.values())
    except BaseException:
        cancel()
        raise
    _started.clear()


def cancel() -> None:
    """Forgets all builds that were begun, and does not begin those that wait for their turn."""
    for builds in (_started, _ahead):
        for build in builds.values():
            build.cancel()
        builds.clear()


@cache
def load(library: str) -> Callable[[Any, Any], None]:
    """load : path of a library -> its function ``run(memory, numbers)`` (see ``cpu.loop``)"""
    finish()
    run = ctypes.CDLL(library).run
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    run.restype = None
    return cast(Callable[[Any, Any], None], run)


def _build(source: str, library: Path) -> None:
    folder, key = library.parent, library.stem
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        source_file, built = Path(scratch, f"{key}.cpp"), Path(scratch, f"{key}.so")
        source_file.write_text(source)
        attempts = commands(source_file, built, folder)
        for command in attempts:
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode <= 0:  # negative: ended by a signal, as Ctrl-C sends one to all
                break
        if result.returncode != 0:
            errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
            reason = " ".join(errors[:3]) or f"the compiler ended with {result.returncode}"
            raise KernelBuildError(f"no kernel could be compiled: {reason}")
        if command is not attempts[0]:  # what was precompiled is the problem
            forget_precompiled(folder)
        seal(built)
        os.replace(built, library)
