"""What a segment returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .taps import Tap


class SegmentOutput(NamedTuple):
    """SegmentOutput(grads, state, loss, out), everything detached.

    - ``grads``: d loss / d params, in the structure of ``params``. A parameter that the step never
      reads, or of an integer dtype, has a gradient of zeros. None from ``evaluate``, ``()`` from
      it under vmap.
    - ``state``: the state after the segment, in the structure of the state that went in.
    - ``loss``: a scalar.
    - ``out``: the outputs of all K steps, time where it is in ``x``.

    >>> import torch, ftbptt
    >>> cell, x = torch.nn.GRUCell(3, 5), torch.randn(7, 2, 3)
    >>> train_segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: out.square().mean(), backend="eager"
    ... )
    >>> result = train_segment(dict(cell.named_parameters()), None, x, None)
    >>> result.grads["bias_hh"].shape, result.state.shape, result.out.shape
    (torch.Size([15]), torch.Size([2, 5]), torch.Size([7, 2, 5]))
    """

    grads: Any
    state: Any
    loss: Tensor
    out: Any


class TappedOutput(NamedTuple):
    """TappedOutput(grads, state, loss, out, taps): a :class:`SegmentOutput` and what was tapped.

    ``taps``: by name a :class:`Tap` with the tensor's ``value`` and ``grad`` at every step, time
    where it is in ``out``.

    >>> import torch, ftbptt
    >>> cell, x = torch.nn.GRUCell(3, 5), torch.randn(7, 2, 3)
    >>> train_segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: out.square().mean(), backend="eager", taps=["r", "z"]
    ... )
    >>> result = train_segment(dict(cell.named_parameters()), None, x, None)
    >>> {name: tap.grad.shape for name, tap in result.taps.items()}
    {'r': torch.Size([7, 2, 5]), 'z': torch.Size([7, 2, 5])}
    """

    grads: Any
    state: Any
    loss: Tensor
    out: Any
    taps: dict[str, Tap]


class EarlyGradients(NamedTuple):
    """Gradients that are handed over in ``parts`` as soon as each is there, such as to be sent.

    ``parts`` are numbers of the parameters' leaves. ``ready`` is called with the loss and the
    gradients of a part, for each of them in order; the segment returns the same numbers.
    """

    parts: list[list[int]]
    ready: Callable[[Tensor, list[Tensor]], None]
