"""C++ source -> a function, compiled once per content and kept on disk.

The library is built under another name and renamed when it is whole, so a build that is killed
leaves nothing behind that looks like one, and processes that build the same at once do not meet.
It ends with a hash of itself: one that was damaged later is built anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

from .._compat import compile_cpp, cpp_command, kernel_cache_dir

INCLUDE = Path(__file__).parent / "include"


@cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(INCLUDE.glob("*.h")))


@cache
def load(library: str) -> Callable[[Any, Any], None]:
    """load : path of a library -> its function ``run(memory, numbers)``"""
    run = ctypes.CDLL(library).run
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    run.restype = None
    return cast(Callable[[Any, Any], None], run)


def library_of(source: str) -> Path:
    """library_of : source of a kernel -> its shared library, compiled now if it is not there

    Raises RuntimeError if there is no working compiler.
    """
    content = [source.encode(), _headers(), cpp_command([str(INCLUDE)]).encode()]
    key = hashlib.sha256(b"\0".join(content)).hexdigest()[:32]
    folder = Path(kernel_cache_dir())
    library = folder / f"{key}.so"
    if not _is_whole(library):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
            path = Path(scratch) / f"{key}.cpp"
            path.write_text(source)
            built = compile_cpp(path, [str(INCLUDE)])
            built.write_bytes(built.read_bytes() + _hash(built.read_bytes()))
            os.replace(built, library)
    return library


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _is_whole(library: Path) -> bool:
    """Whether all of the library is there: its last bytes are the hash of the others.

    One that was cut short, by a crash or a copy, would end the process when it is loaded.
    """
    content = library.read_bytes() if library.exists() else b""
    size = len(_hash(b""))
    return content[-size:] == _hash(content[:-size])
