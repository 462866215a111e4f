"""The values of small tensors that a step makes of numbers alone, for a trace that needs them.

Solvers of differential equations have such ones: points of time, which they compare and count. In a
graph they are tensors that it holds, so a trace knows them only if it fails without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._compat.tracing import LARGEST_KNOWN, not_traced
from ..graphs import aten


def _known(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        with not_traced():
            value = make(*args, **kwargs)
        if value.numel() > LARGEST_KNOWN:
            return NotImplemented
        return torch.ops.aten.lift_fresh_copy(value)

    return made


FACTORIES: dict[Any, Callable[..., Any]] = {
    operation: _known(operation)
    for operation in (
        aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default,
        aten.logspace.default, aten.eye.default, aten.zeros.default, aten.ones.default,
        aten.full.default, aten.scalar_tensor.default,
    )
}  # fmt: skip
