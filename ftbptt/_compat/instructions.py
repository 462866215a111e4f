"""The processor's vector instructions, as Inductor is told of them on x86.

Inductor asks for them by up to six test programs, which it compiles and runs one after the other:
a third of a cold start. Imported late, as all of Inductor is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch._inductor import config, cpu_vec_isa


class _Avx512(cpu_vec_isa.VecAVX512):  # type: ignore[misc]
    __hash__ = cpu_vec_isa.VecISA.__hash__  # type: ignore[assignment]

    def __bool__(self) -> bool:  # type: ignore[override]
        return True


class _Avx2(cpu_vec_isa.VecAVX2):  # type: ignore[misc]
    __hash__ = cpu_vec_isa.VecISA.__hash__  # type: ignore[assignment]

    def __bool__(self) -> bool:  # type: ignore[override]
        return True


@contextmanager
def reported_instructions() -> Iterator[None]:
    """Within it, Inductor believes what the processor reports, instead of asking the compiler.

    AMX and VNNI are left out, which only Inductor's own matrix products use: no program here has
    one. What Inductor has found out for other programs of the process stays as it is.
    """
    reported = cpu_vec_isa.x86_isa_checker()
    known = [isa for isa in (_Avx512(), _Avx2()) if str(isa) in reported]
    listed = (lambda: known) if known else cpu_vec_isa.valid_vec_isa_list
    with (
        patch.object(cpu_vec_isa, "valid_vec_isa_list", listed),
        config.patch({"cpp.vec_isa_ok": True}),
    ):
        yield
