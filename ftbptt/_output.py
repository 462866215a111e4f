"""What a segment returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ._taps import Tap


class SegmentOutput(NamedTuple):
    """SegmentOutput(grads, state, loss, out), everything detached.

    - ``grads``: d loss / d params, in the structure of ``params``; None from ``evaluate``. A
      parameter that the step never reads, or of an integer dtype, has a gradient of zeros.
    - ``state``: the state after the segment, in the structure of the state that went in.
    - ``loss``: a scalar.
    - ``out``: the outputs of all K steps, time where it is in ``x``.
    """

    grads: Any
    state: Any
    loss: Tensor
    out: Any


class TappedOutput(NamedTuple):
    """TappedOutput(grads, state, loss, out, taps): a :class:`SegmentOutput` and what was tapped.

    ``taps``: by name a :class:`Tap` with the tensor's ``value`` and ``grad`` at every step, time
    where it is in ``out``.
    """

    grads: Any
    state: Any
    loss: Tensor
    out: Any
    taps: dict[str, Tap]
