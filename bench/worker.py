"""One process for one peer in one case: it answers commands over a pipe.

Separate processes isolate the peers: a cold compile is cold, and one library's spinning threads or
freed memory do not show in another's figures. Waiting for a command costs no CPU time, so the
parent can let the peers take turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from .calls import Call, Skip, one_line
from .cases import Case, build
from .peers import find
from .turns import gc_off

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # in glibc's malloc.h
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")


def serve(pipe: Connection, case: Case, peer: str, cache: str) -> None:
    """Answers "start", "result", "memory" and ("time", seconds) until "stop" or the pipe closes.

    An answer is ("ok", value), ("skip", reason) or ("error", text). ``cache`` is an empty folder
    for everything that compilers keep on disk.
    """
    for name in CACHES:
        os.environ[name] = os.path.join(cache, name.lower())
    _tell_malloc(M_ARENA_MAX, 1)  # only what lies in the main arena can be given back
    call: Call | None = None
    while True:
        try:
            command, *arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if command == "stop":
            return
        try:
            if command == "start":
                call, answer = _start(case, peer)
            else:
                assert call is not None, "start comes first"
                answer = COMMANDS[command](call, *arguments)
            pipe.send(("ok", answer))
        except Skip as reason:
            pipe.send(("skip", str(reason)))
        except KeyboardInterrupt:
            return
        except Exception as error:  # the parent reports it beside the others
            pipe.send(("error", one_line(error)))


def _start(case: Case, peer: str) -> tuple[Call, dict[str, float]]:
    """The call, after its first run; how long that took, and how long it takes once warm."""
    named_peer = find(peer)
    if named_peer.threads:  # before anything is compiled: programs are made for a number of threads
        torch.set_num_threads(named_peer.threads)
    problem = build(case)
    if peer == "jax" and importlib.util.find_spec("jax"):
        import jax.numpy  # noqa: F401  (imports are no part of a compile)
    start = time.perf_counter()
    call = named_peer.make(problem)
    call()
    first = time.perf_counter() - start
    call()
    return call, {"first_s": first, "warm_s": statistics.median(_time(call, 0.1))}


def arrays(call: Call) -> tuple[Any, dict[str, Any]]:
    """The call's result, in numpy."""

    def numpy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().float().numpy()  # numpy has no bfloat16
        return np.asarray(value)

    value, grads = call()
    return numpy(value), {name: numpy(grad) for name, grad in grads.items()}


def _time(call: Call, seconds: float) -> list[float]:
    """Seconds of each call for about ``seconds``, at least one, after one that does not count."""
    call()
    times: list[float] = []
    with gc_off():
        ends = time.perf_counter() + seconds
        while not times or time.perf_counter() < ends:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return times


def peak_memory(call: Call) -> int | None:
    """Bytes by which a warm call raises the process's resident memory; None without Linux's /proc.

    Comes last: it changes how the process allocates.
    """
    if not os.path.exists("/proc/self/clear_refs"):
        return None
    _tell_malloc(M_MMAP_THRESHOLD, 1 << 16)  # freed tensors go back: their reuse would not show
    call()
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts again from here
    before = memory_of_process("VmRSS")
    result = call()
    peak = memory_of_process("VmHWM")
    del result
    return max(peak - before, 0)


def _tell_malloc(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(option, value)


COMMANDS: dict[str, Callable[..., Any]] = {
    "result": arrays,
    "memory": peak_memory,
    "time": _time,
}


def memory_of_process(name: str) -> int:
    """Bytes by Linux's /proc: "VmRSS" are resident now, "VmHWM" were at most."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])
