"""Which steps of a stream each update reads, differentiates and learns from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..._checks import check_bool, check_int


@dataclass(slots=True)  # not frozen, which takes twice as long to make: each update makes two
class Window:
    """Window(index, warm, start, end): the steps of one update, counted from the epoch's first.

    Steps ``[warm, start)`` run without a gradient, ``[start, end)`` with one. Where a carried state
    comes from an earlier step than ``warm``, as with ``k2`` below ``k1``, the steps up to there run
    without a gradient too. ``index`` counts the windows of an epoch from 0.

    >>> Truncation(k1=4, k2=8, burn_in=2).window(3)
    Window(index=3, warm=6, start=8, end=16)
    """

    index: int
    warm: int
    start: int
    end: int


@dataclass(frozen=True)
class Truncation:
    """TBPTT(k1, k2): an update every ``k1`` steps, with gradients over the last ``k2``.

    ``states[t]`` is the state before step t, from the last window that ran it; each window leaves
    the one that the next window starts from. Steps that are in no window, with ``k2`` below ``k1``,
    run without a gradient, but for those at the end of the data, which are left out. In full::

        for end in range(k1, T + k1, k1):                                 # carried state
            start = max(0, end - k2); warm = max(0, start - burn_in); end = min(end, T)
            state = states[warm]
            for t in range(warm, start): state = step(params, x[t], state)        # no gradient
            grads, state, loss, out = train_segment(params, state, x[start:end], y[start:end])
            params = update(params, grads)

        for warm in range(0, T, k1):                                      # fresh=True
            start = warm + burn_in; end = min(start + k2, T)
            state = initial_state
            ...                                                           # the same three lines
            if end == T: break

    The loss of a window leaves out its first ``context`` steps; a window with no more steps than
    that, as at the start of the data, makes no update. With ``context = k2 - k1`` each step's loss
    counts once, in the first window that reaches it, as in BPTT(h; h') of Williams and Peng, 1990;
    but those of the first ``context`` steps of the data do not, which have them there. Burn-in from
    a stored state: Kapturowski et al., 2019.

    >>> Truncation(k1=4, k2=8).window(1)
    Window(index=1, warm=0, start=0, end=8)
    """

    k1: int
    k2: int
    burn_in: int = 0
    context: int = 0
    fresh: bool = False

    @classmethod
    def of(cls, k1: int, k2: int | None, burn_in: int, context: int, fresh: bool) -> Truncation:
        """From checked arguments; ``k2=None`` is ``k1``.

        Raises TypeError for anything but integers and a bool, ValueError for integers out of range.

        >>> Truncation.of(4, None, 0, 0, False)
        Truncation(k1=4, k2=4, burn_in=0, context=0, fresh=False)
        """
        k1 = check_int("k1", k1, 1)
        k2 = k1 if k2 is None else check_int("k2", k2, 1)
        check_bool("fresh", fresh)
        burn_in, context = check_int("burn_in", burn_in, 0), check_int("context", context, 0)
        if context >= k2:
            raise ValueError(
                f"context: {context} of the k2={k2} steps of a window leave none with a loss. Use "
                "a smaller context or a larger k2."
            )
        return cls(k1, k2, burn_in, context, fresh)

    def window(self, index: int) -> Window:
        """Window ``index`` of a stream without an end."""
        if self.fresh:
            warm = index * self.k1
            start = warm + self.burn_in
            return Window(index, warm, start, start + self.k2)
        end = (index + 1) * self.k1
        start = max(0, end - self.k2)
        return Window(index, max(0, start - self.burn_in), start, end)

    def next_start(self, window: Window) -> int:
        """The step before which the state is that the next window starts from.

        That can be before the window's gradient, within it, or at its end: with a gap, the next
        window first runs the steps in it. (``fresh``: the next window starts from no such state.)
        """
        if self.fresh:
            return window.end
        start = (window.index + 2) * self.k1 - self.k2 - self.burn_in
        return min(max(0, start), window.end)

    def learns(self, window: Window) -> bool:
        """Whether any step of the window has a loss."""
        return window.end - window.start > self.context

    def cut(self, window: Window, total: int) -> Window | None:
        """The window in a stream of ``total`` steps; None if an earlier one reaches its end."""
        last_end = self.window(window.index - 1).end if window.index else 0
        return replace(window, end=min(window.end, total)) if last_end < total else None

    def updates(self, total: int) -> int:
        """The number of updates on a stream of ``total`` steps.

        >>> Truncation(k1=4, k2=8).updates(10)
        3
        """
        if total < 1:
            return 0
        if self.fresh:
            windows = 1 + max(0, -((self.burn_in + self.k2 - total) // self.k1))
            without_loss = 0
        else:
            windows = -(-total // self.k1)
            # The first windows are shorter than k2: those within the context have no loss.
            without_loss = min(windows, self.context // self.k1)
        last = self.cut(self.window(windows - 1), total)
        is_last_too_short = windows > without_loss and (last is None or not self.learns(last))
        return windows - without_loss - is_last_too_short


def kept_within(window: Window, next_start: int) -> int | None:
    """The start of the next window as a step of this one's gradient, if it is within that."""
    return next_start - window.start if window.start < next_start < window.end else None
