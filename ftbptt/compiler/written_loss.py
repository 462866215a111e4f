"""A loss that is not traced: it runs as it is written, with autograd, between the two loops.

Such as ``ctc_loss``, whose result depends on values, and a loss that decides by its values in
Python. The loops are compiled all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from .._autograd_graph import leaves_behind
from .._callers_code import callers_code
from .._compat.tracing import FakeTensorMode
from .._warnings import warn
from .flat_loss import PARAMETERS_IN_LOSS, FlatLoss
from .loss import ANY_STEPS, EXAMPLE_STEPS, LossProgram
from .signature import Level
from .tracing.step_checks import untrained


class WrittenLoss:
    """In the place of a :class:`SegmentLoss`."""

    is_traced = False
    is_constant = False  # as far as is known without running it

    def __init__(self, loss: FlatLoss) -> None:
        self.with_grad = [leaf.is_differentiable for leaf in loss.outs]
        self.example_steps = loss.recipe.context + EXAMPLE_STEPS
        self.copied: list[tuple[Tensor, Tensor]] = []
        self.value, self.joint = WrittenGraph(loss, None), WrittenGraph(loss, self.with_grad)

    def computes_as(self, other: object) -> bool:
        """Whether it is the same: the function runs at each call, whatever it reads."""
        return isinstance(other, WrittenLoss)

    def graphs_for(self, steps: int) -> WrittenLoss:
        """The loss of K steps: itself."""
        return self

    def program(self, with_grad: bool) -> LossProgram:
        return LossProgram(self.joint if with_grad else self.value, [], ANY_STEPS)


@dataclass(eq=False)
class WrittenGraph:
    """``(*outs, *ys, *mask) -> [loss, *d_out]``, a gradient for each output ``with_grad``.

    ``-> [loss]`` where that is None. The loss gets copies: it may write to them, and the outputs
    and targets are the caller's.
    """

    loss: FlatLoss
    with_grad: list[bool] | None
    is_checked: bool = False

    def __call__(self, *args: Tensor) -> list[Tensor]:
        with torch.inference_mode(False), callers_code():
            usable = [a.clone() if a.is_inference() else a for a in args]  # by autograd
            return self._over_axes(usable, self.loss.axes)

    def _over_axes(
        self, args: Sequence[Tensor], axes: Sequence[tuple[Level, list[bool]]]
    ) -> list[Tensor]:
        """For each index of the axes in turn."""
        if not axes:
            return self._value(args) if self.with_grad is None else self._with_gradient(args)
        *inner, (level, flags) = axes
        results = [
            self._over_axes(
                [a.select(1, i) if flag else a for a, flag in zip(args, flags, strict=True)], inner
            )
            for i in range(level.size)
        ]
        values, *grads = zip(*results, strict=True)
        value, stacked = torch.stack(values), [torch.stack(grad, 1) for grad in grads]
        if level is self.loss.signature.mean_axis:
            return [value.mean(), *(grad / level.size for grad in stacked)]
        return [value, *stacked]

    def _value(self, args: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return self.loss(*map(torch.clone, args))

    @torch.enable_grad()
    def _with_gradient(self, args: Sequence[Tensor]) -> list[Tensor]:
        flags = self.with_grad or []
        outs, others = args[: len(flags)], args[len(flags) :]
        leaves = [o.detach().requires_grad_(flag) for o, flag in zip(outs, flags, strict=True)]
        wanted = list(compress(leaves, flags))
        (value,) = self.loss(*map(torch.clone, (*leaves, *others)))
        if not self.is_checked:
            _check_gradient(value, wanted)
            self.is_checked = True
        if not value.requires_grad:
            return [value.detach(), *map(torch.zeros_like, wanted)]
        grads = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
        return [value.detach(), *(grad.contiguous() for grad in grads)]

    def without_data(self, args: Sequence[Tensor]) -> list[Tensor]:
        """What a call returns, as fake tensors."""
        flags = self.with_grad or []
        outs = compress(args[: len(flags)], flags)
        levels = [level.size for level in reversed(self.loss.signature.levels)]
        with FakeTensorMode():
            likes = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in outs]
            value = torch.empty(levels, device=args[0].device)
        return [value, *likes]


def _check_gradient(value: Tensor, outs: Sequence[Tensor]) -> None:
    """Raises ValueError for a loss with parameters of its own; warns of one without a gradient."""
    own = {id(out) for out in outs}
    for name, leaf in leaves_behind([value]).items():
        if name not in own:
            raise untrained("loss", leaf, PARAMETERS_IN_LOSS)
    if not value.requires_grad:
        warn(
            "ftbptt: the loss has no gradient with respect to its outputs, so all gradients are "
            "zeros: it is detached, or made of whole numbers (argmax, a comparison).",
            RuntimeWarning,
        )
