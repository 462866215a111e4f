"""The models of an ensemble whose loss was not finite: each stays as it is, the others go on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .ensembles import for_each_model, is_ensemble


class StoppedModels:
    """Flags of the models that have stopped, and what keeps these as they are.

    The flags are on the device: a GPU is waited for only where something is :attr:`new`.
    """

    def __init__(self) -> None:
        self.flags: Tensor | None = None  # of the shape of the loss; None if nothing is watched
        self._told: Tensor | None = None  # those that the user was told of

    def watch(self, value: Tensor, grads: Sequence[Tensor]) -> bool:
        """Stops the models whose ``value``, a loss or a norm, is not finite.

        Does nothing, and returns false, if the ``grads`` are not those of an ensemble.
        """
        if not is_ensemble(grads, value):
            return False
        bad = ~value.detach().isfinite()
        self.flags = bad if self.flags is None else self.flags | bad
        return True

    @property
    def new(self) -> Tensor | None:
        """Flags of the models that have stopped since :meth:`told`; None if there is none."""
        if self.flags is None:
            return None
        new = self.flags if self._told is None else self.flags & ~self._told
        return new if new.any() else None

    def told(self) -> None:
        """The user was told of all that have stopped so far."""
        self._told = self.flags

    @property
    def are_all(self) -> bool:
        """Whether no model is left."""
        return self.flags is not None and bool(self.flags.all())

    @property
    def matter(self) -> bool:
        """Whether any has stopped; on a GPU, whether any may have."""
        return self.flags is not None and (not self.flags.is_cpu or bool(self.flags.any()))

    def marked(self, loss: Tensor) -> Tensor:
        """The loss, NaN for those that have stopped."""
        return loss.masked_fill(self._flags_like(loss), math.nan) if self.matter else loss

    def silence(self, grads: Sequence[Tensor]) -> None:
        """Sets the gradients of those that have stopped to 0, in place."""
        if self.matter:
            for grad in grads:
                grad.masked_fill_(self._flags_like(grad), 0.0)

    def kept(self, before: Tensor, after: Tensor) -> Tensor:
        """A parameter ``after`` a step, but that ``before`` it for those that have stopped."""
        return torch.where(self._flags_like(after), before, after)

    def _flags_like(self, leaf: Tensor) -> Tensor:
        assert self.flags is not None
        return for_each_model(self.flags, leaf)

    def state_dict(self) -> Tensor | None:
        return self.flags

    def load_state_dict(self, flags: Tensor | None, device: torch.device) -> None:
        """Restores what :meth:`state_dict` returned. The user was told of those.

        If none was left the run had ended, and goes on with all: the data may be right this time.
        """
        if flags is not None and flags.all():
            flags = None
        self.flags = self._told = None if flags is None else flags.to(device)
