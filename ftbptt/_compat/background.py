"""What Inductor writes in C++, compiled while it writes the next program."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def compiling_in_background() -> Iterator[None]:
    """Programs that Inductor makes within may be called when it ends.

    Raises then what the compiler raised, or the loading of a library. Inductor (2.11 to 2.14) has
    the compiler work in the background for kernels only, not for programs with a wrapper in C++;
    and it first precompiles a header for each of the wrapper and the kernels, once on a machine.
    """
    from torch._inductor import codecache

    libraries: Any = codecache.CppWrapperCodeCache
    programs: list[Callable[[], Callable[..., Any]]] = []  # each waits until it can be called
    headers: list[Future[None]] = []

    def load(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        # Not to look whether headers have changed takes half a second less, where all is compiled.
        new: list[Any] = []
        with patch.object(codecache, "_precompile_header", lambda *_, **__: ""):
            program = libraries.load_pybinding_async(*args, **kwargs, submit_fn=new.append)
        if new:
            libraries.cache.popitem()
            program = libraries.load_pybinding_async(*args, **kwargs, submit_fn=compilers.submit)
        programs.append(program)
        return lambda *inputs: program()(*inputs)

    def compile_cpp(lock_path: str, builders: Sequence[Any]) -> None:
        if builders[0].get_target_file_path().endswith((".gch", ".pch")):
            headers.append(header_compilers.submit(_compile, lock_path, builders))
            return
        for header in [*headers]:
            header.result()
        _compile(lock_path, builders)

    at_a_time = max(1, (os.cpu_count() or 1) // 2)  # programs, of two files each
    with ExitStack() as stack:
        compilers = stack.enter_context(ThreadPoolExecutor(at_a_time, "ftbptt-compile"))
        header_compilers = stack.enter_context(ThreadPoolExecutor(4, "ftbptt-headers"))
        stack.enter_context(patch.object(libraries, "load_pybinding", load))
        stack.enter_context(patch.object(codecache, "_worker_compile_cpp", compile_cpp))
        try:
            yield
            for program in programs:
                program()
        except BaseException:
            compilers.shutdown(wait=False, cancel_futures=True)
            libraries.cache.clear()  # which keeps what failed
            raise


def _compile(lock_path: str, builders: Sequence[Any]) -> None:
    """As ``_worker_compile_cpp``, with the object files of a program at the same time."""
    from torch._inductor.codecache import LOCK_TIMEOUT
    from torch.utils._filelock import FileLock

    with FileLock(lock_path, timeout=LOCK_TIMEOUT), ThreadPoolExecutor() as compilers:
        *objects, library = builders
        list(compilers.map(_build_if_new, objects))
        _build_if_new(library)


def _build_if_new(builder: Any) -> None:
    if not os.path.exists(builder.get_target_file_path()):
        builder.build()
