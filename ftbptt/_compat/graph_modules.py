"""Graphs as modules, whose Python is written when it is first called."""

from __future__ import annotations

import threading
from typing import Any

# Writing a graph's Python takes a fifth of tracing, and most graphs are changed or taken apart
# before they are called. Inductor uses the same class for that reason (2.11 to 2.13).
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

__all__ = ["GraphModule", "tracing_without_code"]

_WRITING = threading.RLock()


class GraphModule(_LazyGraphModule):
    """``torch.fx.GraphModule`` that several threads may call for the first time."""

    def real_recompile(self) -> None:
        with _WRITING:  # torch changes how the nodes print while it writes
            super().real_recompile()

    def _lazy_forward(self, *args: Any) -> Any:
        self.real_recompile()
        return self.forward(*args)  # a call of the module would print errors

    forward = _lazy_forward


def tracing_without_code() -> Any:
    """A context in which ``make_fx`` writes no Python for the graph that it returns."""
    return _use_lazy_graph_module(True)
