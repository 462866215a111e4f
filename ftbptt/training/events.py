"""What a caller can be told of while a stream is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ParamSpec

from torch import Tensor

from .._output import SegmentOutput
from .chunk import Chunk, TimeAxes
from .cursor import Span
from .report import Report
from .update import Update
from .windows import Window

P = ParamSpec("P")
Calls = Callable[P, object] | Sequence[Callable[P, object]]


@dataclass(frozen=True)
class SequenceEnd:
    """A sequence ended in ``row`` before step ``position`` of the epoch.

    ``row`` is None where all rows restart together.
    """

    position: int
    row: int | None


@dataclass
class Events:
    """Functions to call, at each moment one or a sequence of them.

    ``before_window(window, chunk)`` and ``after_window(window, output)``
        around each segment with a gradient; with micro-batches around each of them.
    ``before_update(grads)``
        the list of gradients that the optimizer is about to see, unscaled and clipped.
    ``after_update(update)``
        what the iteration gives.
    ``sequence_end(end)``
        a row restarts, or the data ends. Found from ``reset``, so keep that on the CPU.
    ``epoch_start(epoch)`` and ``epoch_end(epoch)``
        the epoch counts from 0.
    ``report(report)``
        the losses were read from the device.

    Raises TypeError for what cannot be called.
    """

    before_window: Calls[[Window, Chunk]] = ()
    after_window: Calls[[Window, SegmentOutput]] = ()
    before_update: Calls[[list[Tensor]]] = ()
    after_update: Calls[[Update]] = ()
    sequence_end: Calls[[SequenceEnd]] = ()
    epoch_start: Calls[[int]] = ()
    epoch_end: Calls[[int]] = ()
    report: Calls[[Report]] = ()

    def __post_init__(self) -> None:
        for own in fields(self):
            given = getattr(self, own.name)
            one = callable(given) or not isinstance(given, Iterable)
            calls = (given,) if one else tuple(given)
            for call in calls:
                if not callable(call):
                    raise TypeError(f"Events: {own.name} has {call!r}, which cannot be called.")
            setattr(self, own.name, calls)


def tell_sequence_ends(events: Events, span: Span, seen: int, axes: TimeAxes) -> None:
    """The rows that restart in the steps of a span that no window before has seen."""
    if span.chunk.reset is None:
        return
    reset = span.chunk.reset.cpu()
    if reset.dim() > 1:
        reset = reset.movedim(axes.x, 0)
    # What restarts at the very start has no sequence before it; steps in a gap are not read.
    skip = max(seen, 1, span.first) - span.first
    for at in reset[skip:].nonzero().tolist():
        row = at[1] if len(at) > 1 else None
        emit(events.sequence_end, SequenceEnd(span.first + skip + at[0], row))


def emit(calls: Any, *args: Any) -> None:
    """Calls each of them."""
    for call in calls:
        call(*args)
