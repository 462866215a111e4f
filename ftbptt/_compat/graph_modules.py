"""Graphs as modules, whose Python is written when it is first called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import fx, nn

# _use_lazy_graph_module, for what make_fx returns: writing a graph's Python takes a fifth of
# tracing, and most graphs are changed or taken apart before they are called. _forward_from_src, as
# GraphModule itself uses it (both 2.11 to 2.14).
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.graph_module import _forward_from_src

__all__ = ["GraphModule", "tracing_without_code"]

_WRITING = threading.RLock()


class GraphModule(fx.GraphModule):
    """``torch.fx.GraphModule`` that several threads may call for the first time.

    All are of one class. torch makes a class for each, and whenever tracing patches
    ``nn.Module``, Python goes through all its subclasses: with thousands, a quarter of tracing.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> GraphModule:
        return nn.Module.__new__(cls)

    def recompile(self) -> None:  # type: ignore[override]
        """Its Python will be written anew."""
        self.__dict__.pop("_written", None)

    def forward(self, *args: Any) -> Any:
        return self._function()(self, *args)

    def _function(self) -> Callable[..., Any]:
        function = self.__dict__.get("_written")
        if function is None:
            with _WRITING:  # torch changes how the nodes print while it writes
                code = self.graph.python_code("self")
                function = self.__dict__["_written"] = _forward_from_src(code.src, code.globals)
        return function

    @property
    def code(self) -> str:
        return self.graph.python_code("self").src


def tracing_without_code() -> Any:
    """A context in which ``make_fx`` writes no Python for the graph that it returns."""
    return _use_lazy_graph_module(True)
