"""In place of a kernel's functions in assembly, which Triton's interpreter does not know."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrived(arrivals):  # type: ignore[no-untyped-def]
    return tl.atomic_add(arrivals, 0, sem="acquire")
