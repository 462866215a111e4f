"""Optimizers besides those of ``torch.optim``: what a run needs them to have."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

Tree = Any


@runtime_checkable
class FunctionalOptimizer(Protocol):
    """An optimizer as two pure functions, as is usual in JAX.

    >>> class GradientDescent:
    ...     def init(self, params):
    ...         return None
    ...     def update(self, grads, state, params):
    ...         return {name: p - 0.1 * grads[name] for name, p in params.items()}, state
    >>> isinstance(GradientDescent(), FunctionalOptimizer)
    True
    """

    def init(self, params: Tree) -> Tree:
        """init : params -> the optimizer's state before the first update"""

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """update : grads, state, params -> parameters and state after the update

        ``grads`` has the structure of ``params``, with zeros for leaves without a gradient.
        """


@runtime_checkable
class Sharded(Protocol):
    """An optimizer whose state is sharded over ranks: torch's ``ZeroRedundancyOptimizer``."""

    rank: int

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the state on rank ``to``; a collective."""

    def state_dict(self) -> dict[str, Any]:
        """The full state, on the rank that it was gathered on."""
