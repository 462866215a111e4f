"""The processor's vector instructions, as Inductor is told of them on x86.

Inductor asks for them by up to six test programs, which it compiles and runs one after the other:
a third of a cold start. Imported late, as all of Inductor is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch._inductor import config, cpu_vec_isa


class _Avx512(cpu_vec_isa.VecAVX512):  # type: ignore[misc]
    __hash__ = cpu_vec_isa.VecISA.__hash__  # type: ignore[assignment]

    def __bool__(self) -> bool:  # type: ignore[override]
        return True


class _Avx2(cpu_vec_isa.VecAVX2):  # type: ignore[misc]
    __hash__ = cpu_vec_isa.VecISA.__hash__  # type: ignore[assignment]

    def __bool__(self) -> bool:  # type: ignore[override]
        return True


_counting = Lock()
_within = 0  # threads: kernels are compiled in the background, while Inductor compiles a program
_module: Any = cpu_vec_isa
_inductors: Any = None  # its own function, while there are some


@contextmanager
def reported_instructions() -> Iterator[None]:
    """Within it, Inductor believes what the processor reports, instead of asking the compiler.

    AMX and VNNI are left out, which only Inductor's own matrix products use: no program here has
    one. What Inductor has found out for other programs of the process stays as it is.
    """
    _count(1)
    try:
        with config.patch({"cpp.vec_isa_ok": True}):
            yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    """One more thread is within, or one less: the last of them puts back what the first replaced.

    Each by itself would put back what it found, which may be what another one had put there.
    """
    global _within, _inductors
    with _counting:
        if _within == 0:
            _inductors = _module.valid_vec_isa_list
            reported = cpu_vec_isa.x86_isa_checker()
            known = [isa for isa in (_Avx512(), _Avx2()) if str(isa) in reported]
            if known:
                _module.valid_vec_isa_list = lambda: known
        _within += change
        if _within == 0:
            _module.valid_vec_isa_list = _inductors
