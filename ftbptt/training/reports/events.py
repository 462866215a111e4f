"""The events of a run: functions of the caller that are called while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ParamSpec

from torch import Tensor

from ...contract.layout import Layout
from ...contract.output import SegmentOutput
from ..data.chunk import Chunk
from ..data.cursor import Span
from ..data.windows import Window
from ..updates.update import Update
from .report import Report

P = ParamSpec("P")
Calls = Callable[P, object] | Sequence[Callable[P, object]]


@dataclass(frozen=True)
class SequenceEnd:
    """A sequence ended in ``row`` before step ``position`` of the epoch.

    ``position`` counts steps from 0; ``row`` is None if all rows restart together, by a ``reset``
    of ``[T]`` or because the data ends.

    >>> def note(end):
    ...     print(f"row {end.row} ended before step {end.position}")
    >>> events = Events(sequence_end=note)                    # for train_stream(..., events=events)
    >>> note(SequenceEnd(position=7, row=1))
    row 1 ended before step 7
    """

    position: int
    row: int | None


@dataclass
class Events:
    """Functions to call during a run: for each event one, or a sequence of them.

    ``before_window(window, chunk)``, ``after_window(window, output)``
        Before and after each segment with a gradient; with micro-batches, for each of them. They
        get a :class:`Window`, its :class:`Chunk` and a :class:`~ftbptt.SegmentOutput`, whose
        gradients a ``scaler`` has scaled. The update clips and unscales these in place: copy what
        is to be kept of them.
    ``before_update(grads)``
        Before the optimizer's step, with its list of gradients, unscaled and clipped.
    ``after_update(update)``
        After it, with the :class:`Update` that the iteration returns.
    ``sequence_end(end)``
        With a :class:`SequenceEnd`, when a row restarts or the data ends. This reads ``reset`` in
        each window, so keep it on the CPU.
    ``epoch_start(epoch)``, ``epoch_end(epoch)``
        With the number of the epoch, from 0.
    ``report(report)``
        With a :class:`Report`, when the losses were read from the device.

    Raises TypeError for a value that cannot be called.

    >>> Events(epoch_end=lambda epoch: print("epoch", epoch), report=[print]).report
    (<built-in function print>,)
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
        for field in fields(self):
            value = getattr(self, field.name)
            is_one = callable(value) or not isinstance(value, Iterable)
            functions = (value,) if is_one else tuple(value)
            for function in functions:
                if not callable(function):
                    raise TypeError(
                        f"Events: {field.name} has {function!r}, which cannot be called."
                    )
            setattr(self, field.name, functions)


def tell_sequence_ends(events: Events, span: Span, seen: int, layout: Layout) -> None:
    """Emits ``sequence_end`` for rows that restart in the span, from step ``seen`` on."""
    if span.chunk.reset is None:
        return
    reset = layout.flags_first(span.chunk.reset.cpu())
    if reset.dim() > 2:  # with in_dims: of a sequence, whichever of its own rows restarts
        reset = reset.flatten(2).any(2)
    # At step 0 no sequence ends; with ``fresh``, steps in a gap between windows are not read.
    skip = max(seen, 1, span.first) - span.first
    for step, *row in reset[skip:].nonzero().tolist():
        end = SequenceEnd(span.first + skip + step, row[0] if row else None)
        emit(events.sequence_end, end)


def emit(functions: Any, *args: Any) -> None:
    """Calls each of the functions."""
    for function in functions:
        function(*args)
