"""A cache of compiled code that cannot be used: another one for this process, with a warning."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from .._compat.building import compile_cache_dir, forget_compile_paths
from .._messages import first_line
from .._warnings import warn
from ..kernels.cpu.build import KernelBuildError

Result = TypeVar("Result")
_NAME = "TORCHINDUCTOR_CACHE_DIR"  # which torch and the kernels' own cache follow
_TRITON = "TRITON_CACHE_DIR"  # which torch sets to a folder in that one, for good


def use_a_folder_that_works() -> None:
    """Sees to it, before torch's compiler is asked for anything, that it can write somewhere."""
    folder = "the folder that torch chooses"
    try:
        folder = compile_cache_dir()
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _use_temporary(folder)
        _warn(folder, error)


def built_somewhere(build: Callable[[], Result]) -> Result:
    """What ``build`` returns; once more in an empty folder if the cache may be why it fails.

    A folder that is full, or in which something is damaged, costs a slower start.
    """
    folder = compile_cache_dir()
    _remove_cut_libraries(folder)
    try:
        return build()
    except Exception as error:
        if folder == _temporary_if_any() or not _may_be_the_caches(error, folder):
            raise
        before = _use_temporary(folder)
        forget_compile_paths()
        try:
            result = build()
        except Exception:
            _restore(before)
            raise error from None
        _warn(folder, error)
        return result


def _warn(folder: str, error: Exception) -> None:
    warn(
        f"ftbptt: the cache of compiled code in {folder} cannot be used ({type(error).__name__}: "
        f"{first_line(error)}). This process compiles in a temporary folder. Make room there, "
        f"delete what is damaged, or name another folder in {_NAME}.",
        RuntimeWarning,
    )


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ftbptt-")


def _temporary_if_any() -> str | None:
    return _temporary().name if _temporary.cache_info().currsize else None


def _use_temporary(folder: str) -> dict[str, str | None]:
    """Has all compilers write elsewhere than in the folder. What the environment said before."""
    before = {name: os.environ.get(name) for name in (_NAME, _TRITON)}
    os.environ[_NAME] = _temporary().name
    if Path(before[_TRITON] or folder).is_relative_to(folder):
        os.environ[_TRITON] = os.path.join(_temporary().name, "triton")
    return before


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _may_be_the_caches(error: BaseException, folder: str) -> bool:
    """Whether somewhere below a file could not be read or written, or a compiler failed.

    Or a file of the folder is what could not be imported.
    """
    return any(
        isinstance(e, (OSError, KernelBuildError))
        or type(e).__name__ == "CppCompileError"  # of torch's compiler, which may not be imported
        or folder in str(e)
        or _ran(folder, e)
        for e in _chain(error)
    )


def _ran(folder: str, error: BaseException) -> bool:
    """Whether an error passed through Python that lies in the folder."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename.startswith(folder) for frame, _ in frames)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@cache
def _remove_cut_libraries(folder: str) -> None:
    """Deletes libraries that a killed build has left unfinished.

    torch takes them for whole, and to load one ends the process.
    """
    for library in Path(folder).glob("*/*.main.so") if sys.platform == "linux" else ():
        try:
            if _is_cut(library):
                key = library.name.partition(".")[0]
                with FileLock(Path(folder, "locks", f"{key}.lock"), timeout=0):
                    library.unlink()
        except (OSError, Timeout):
            pass  # another process builds it, or it is noticed when it is needed


def _is_cut(library: Path) -> bool:
    """Whether it is no whole ELF file: one of 64 bits ends with its table of sections."""
    with library.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:4] != b"\x7fELF":
        return True
    start, size, count = (int.from_bytes(head[a:b], "little") for a, b in _TABLE)
    return library.stat().st_size < start + size * count


_TABLE = ((40, 48), (58, 60), (60, 62))  # where its place, the size of an entry, and how many are
