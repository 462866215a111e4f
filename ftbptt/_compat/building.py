"""The C++ compiler as Inductor finds it, and the folders that it keeps its work in."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Any


def cpp_command(
    sources: Sequence[str], library: str, include: Sequence[str], header: str = ""
) -> str:
    """The command that makes a shared library of C++ and object files, as Inductor would.

    It names the compiler, vector instructions, OpenMP and torch's headers on each platform, and a
    precompiled header if there is one.
    """
    options = _cpp_options(include)
    options.precompiled_header = header or None
    return str(_cpp_builder(sources, library, options).get_command_line())


def header_command(source: str, output: str, include: Sequence[str]) -> tuple[str, str]:
    """The command that compiles a header, and the file that it makes: ``output`` with an ending."""
    builder = _cpp_builder([source], output, _cpp_options(include, precompiling=True))
    return builder.get_command_line(), builder.get_target_file_path()


def object_command(source: str, output: str, include: Sequence[str]) -> tuple[str, str]:
    """The command that compiles a C++ file without linking, and the file that it makes."""
    builder = _cpp_builder([source], output, _cpp_options(include, compile_only=True))
    return builder.get_command_line(), builder.get_target_file_path()


def _cpp_builder(sources: Sequence[str], output: str, options: Any) -> Any:
    from torch._inductor.cpp_builder import CppBuilder

    folder, name = os.path.split(os.path.splitext(output)[0])
    return CppBuilder(name=name, sources=list(sources), BuildOption=options, output_dir=folder)


def _cpp_options(
    include: Sequence[str], *, precompiling: bool = False, compile_only: bool = False
) -> Any:
    from torch._inductor import cpu_vec_isa
    from torch._inductor.cpp_builder import CppTorchDeviceOptions
    from torch._inductor.exc import InvalidCxxCompiler

    from .instructions import reported_instructions

    try:
        with reported_instructions():
            return CppTorchDeviceOptions(
                vec_isa=cpu_vec_isa.pick_vec_isa(),
                device_type="cpu",
                extra_flags=["-w", *(f"-I{shlex.quote(path)}" for path in include)],
                precompiling=precompiling,
                compile_only=compile_only,
            )
    except InvalidCxxCompiler as error:
        raise RuntimeError(
            f"a kernel needs a C++ compiler, and there is none that works ({error}). Install g++ "
            "or clang++, or name one in the environment variable CXX; backend='eager' needs none."
        ) from error


def compile_cache_dir() -> str:
    """Where Inductor keeps what it compiles: TORCHINDUCTOR_CACHE_DIR, or a folder of the user's.

    Inductor makes the folder when it is imported, and so fails if that is not possible.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return os.path.abspath(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(default_cache_dir())


def forget_compile_paths() -> None:
    """Inductor remembers where it has begun to compile something, even if that failed."""
    from torch._inductor.utils import clear_caches

    clear_caches()
