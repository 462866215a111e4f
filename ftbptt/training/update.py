"""What an update gives to its caller."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.utils import get_total_norm

Tree = Any


class Update:
    """One update of the parameters.

    ``index`` counts from 0; ``epoch`` too; ``position`` is how many steps of the epoch are done.
    ``loss`` is the mean over the valid steps of the update, on the device: reading it waits for
    that. ``steps`` is how many valid steps those were, all rows together, ``state`` the carried
    state after them, ``params`` the parameters after the update, ``tokens_per_second`` the speed
    since the last report.
    """

    __slots__ = (
        "_grads", "_norm", "epoch", "index", "loss", "params", "position", "state", "steps",
        "tokens_per_second",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        epoch: int,
        position: int,
        loss: Tensor,
        steps: Any,
        params: Tree,
        state: Tree,
        tokens_per_second: float,
        grads: list[Tensor],
        norm: Tensor | None,
    ) -> None:
        self.index, self.epoch, self.position = index, epoch, position
        self.loss, self.steps, self.params, self.state = loss, steps, params, state
        self.tokens_per_second = tokens_per_second
        self._grads, self._norm = grads, norm

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients together, before clipping by norm. Computed when asked for."""
        if self._norm is None:
            self._norm = get_total_norm(self._grads)
        return self._norm

    def __repr__(self) -> str:
        return f"Update(index={self.index}, epoch={self.epoch}, position={self.position})"
