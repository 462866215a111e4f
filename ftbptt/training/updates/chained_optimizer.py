"""Several optimizers of torch as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from .optimizers import Sharded, load_optimizer


class ChainedOptimizer(Optimizer):
    """ChainedOptimizer : optimizers -> one that steps them all, each with tensors of its own

    For optimizers that are meant for some parameters, such as ``torch.optim.Muon`` for matrices. A
    scheduler changes the learning rates of all; a tensor may be in one of them only.

    Raises TypeError for what is no optimizer of torch, one that is sharded over ranks, and LBFGS.

    >>> module = torch.nn.Linear(3, 4)
    >>> ChainedOptimizer(
    ...     torch.optim.Muon([p for p in module.parameters() if p.ndim == 2], lr=0.02),
    ...     torch.optim.AdamW([p for p in module.parameters() if p.ndim != 2], lr=0.001),
    ... ).param_groups[1]["lr"]
    0.001
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        for i, optimizer in enumerate(optimizers):
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, Sharded | LBFGS):
                raise TypeError(
                    f"optimizers[{i}]: expected a torch.optim.Optimizer that is not sharded over "
                    "ranks, and evaluates the loss once in a step, found "
                    f"{type(optimizer).__name__}."
                )
        self.optimizers = optimizers
        super().__init__(self._groups(), {})

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of each, after the closure if there is one, whose result it returns."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError for a group that is in none of the optimizers: none would step it."""
        if not any(param_group is group for group in self._groups()):
            raise ValueError(
                "param_group: it is not known which of the optimizers is to train it. Add it to "
                "that one, and make a new ChainedOptimizer."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The states of all, in their order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError for the state of another number of optimizers."""
        states = state_dict.get("optimizers", [])
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"state_dict: expected the states of {len(self.optimizers)} optimizers, found "
                f"{len(states)}."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_optimizer(optimizer, state)
        self.param_groups = self._groups()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"optimizers": self.optimizers}
