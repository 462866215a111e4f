"""How far apart in memory the elements are that a vectorized loop reads, as Inductor asks of sympy.

Imported late, as all of Inductor is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import sympy
import torch._inductor.codegen.cpp
from torch._inductor import sizevars

# The module of both functions (2.11 and 2.12; 2.13 and 2.14).
_MODULE: Any = sizevars
if not hasattr(sizevars, "simplify_index_in_vec_range"):
    _MODULE = torch._inductor.codegen.cpp


@contextmanager
def polynomial_strides() -> Iterator[None]:
    """Within it, an index that is a polynomial is expanded, where Inductor would simplify it.

    ``sympy.simplify`` tries dozens of rewrites, and comes to the same: this was a quarter of the
    time that a program with loops took to be compiled.
    """
    simplify: Callable[..., Any] = _MODULE.simplify_index_in_vec_range
    stride_at: Callable[..., Any] = _MODULE.stride_at

    @lru_cache
    def simplified(index: Any, variable: Any, length: int) -> Any:
        return index.expand() if _is_polynomial(index) else simplify(index, variable, length)

    @lru_cache
    def stride(index: Any, variable: Any) -> Any:
        if not _is_polynomial(index):
            return stride_at(index, variable)
        return (index.xreplace({variable: variable + 1}) - index).expand()

    with (
        patch.object(_MODULE, "simplify_index_in_vec_range", simplified),
        patch.object(_MODULE, "stride_at", stride),
    ):
        yield


def _is_polynomial(index: Any) -> bool:
    """Without a quotient or a remainder, of which more is known for a vectorized loop."""
    return isinstance(index, sympy.Expr) and bool(index.is_polynomial())
