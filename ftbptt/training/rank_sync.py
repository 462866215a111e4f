"""Updates of several processes together: one gradient, the mean over the valid steps of all.

Each rank trains on rows of its own. For an update the ranks add up their gradients, each times its
valid steps, and then the numbers that all must agree on: whether anybody still has data, whether
losses are to be read now, whether somebody has to stop.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._interrupt import uninterrupted
from .._output import EarlyGradients
from ..distributed.ranks import RankFailed, Ranks
from ..distributed.reduction import Reduction
from .learner import Learner
from .window_stats import WindowStats

_STOPS, _FAILED = 1, 2  # what a rank can say of itself
_TOLD = 8  # numbers that a rank tells, besides one for each of them
_BASE = 4096  # of the steps of all ranks in two numbers, each exact in float32


class Joined(NamedTuple):
    """What the ranks made together. ``measured`` is None if no rank had a window that counts.

    ``more``: some rank had one at all. ``due``: losses are to be read. ``seconds``: how long the
    run took, by the first rank's clock. ``stopping`` and ``failed`` are the ranks that said so.
    """

    measured: WindowStats | None
    more: bool
    grads: list[Tensor]
    due: bool
    seconds: float
    stopping: list[int]
    failed: list[int]


class RankSync:
    """A learner's share in the updates of all ranks."""

    def __init__(self, ranks: Ranks, learner: Learner, dtype: torch.dtype | None) -> None:
        self.ranks, self.learner, self.dtype = ranks, learner, dtype
        self.bytes_reduced = 0  # what this rank has put into reductions of gradients
        self.left = False  # this rank has said so
        self._begun: Reduction | None = None  # of the update at work

    def early(
        self, weight: float | Tensor, is_sound: Callable[[Tensor], bool]
    ) -> EarlyGradients | None:
        """How the gradients of a window that is an update of its own are sent as they come.

        None if they go in one message, for which all have to be there.
        """
        reduction = self._new()
        if len(reduction.buckets) == 1:
            return None
        self._begun = reduction
        number = float(weight)

        def ready(loss: Tensor, grads: list[Tensor]) -> None:
            with uninterrupted():  # a bucket that is sent has to be known as such
                reduction.give(grads if is_sound(loss) else None, number)

        places = self.learner.trained_places
        return EarlyGradients([[places[i] for i in own] for own in reduction.buckets], ready)

    def _new(self) -> Reduction:
        return Reduction(self.ranks, self.learner.trained, self.dtype, _TOLD + self.ranks.size)

    def update(
        self,
        measured: WindowStats | None,
        more: bool,
        index: int,
        due: bool,
        stops: bool,
        seconds: float = 0.0,
    ) -> Joined:
        """The windows of all ranks, from this one's; the learner has their gradient then.

        ``measured`` is None without a window that counts, ``more`` false without any. Raises
        :class:`RankFailed` if another rank has left the run.
        """
        learner, grads = self.learner, None
        if measured is not None and learner.gathered is not None:
            grads = learner.gathered[0]
        joined = self.join(grads, measured, more=more, due=due, stops=stops, seconds=seconds)
        if joined.failed:
            self.left = True
            said = self.ranks.gather(None)
            raise RankFailed(f"rank {joined.failed[0]} has left the run: {said[joined.failed[0]]}")
        if joined.stopping and not stops:
            warnings.warn(
                f"ftbptt: rank {joined.stopping[0]} stops the run before update {index}.",
                RuntimeWarning,
                stacklevel=2,
            )
        learner.gathered = None
        if joined.measured is not None:
            learner.gathered = joined.grads, joined.measured.weight
        return joined

    def check(self, index: int, stops: bool) -> bool:
        """Before update ``index``: whether some rank has come to its end, as this one if ``stops``.

        Raises :class:`RankFailed` if one has left.
        """
        return bool(self.update(None, False, index, False, stops).stopping)

    def close(self, index: int) -> None:
        """The run has ended before update ``index``, and ends on all ranks.

        Raises :class:`RankFailed` if one has left it by an error.
        """
        while not self.left:
            joined = self.update(None, False, index, False, True)
            self.left = len(joined.stopping) == self.ranks.size

    def tell(self, words: str) -> None:
        """This rank leaves the run while the others wait for it: they learn why.

        Raises :class:`RankFailed` if they cannot be told.
        """
        if self.left or not self.ranks.alive:
            return
        self.left = True
        self.join(None, None, failed=True)
        self.ranks.gather(words)

    def join(
        self,
        grads: list[Tensor] | None,
        measured: WindowStats | None,
        *,
        more: bool = False,
        due: bool = False,
        stops: bool = False,
        failed: bool = False,
        seconds: float = 0.0,
    ) -> Joined:
        """Every rank's part of an update; to be called by all of them.

        ``grads`` and ``measured`` are None where this rank has no window that counts. ``due`` and
        ``seconds`` are asked of the first rank alone.
        """
        weight, loss = 0.0, 0.0
        if measured is not None:
            if measured.loss.dim():
                raise ValueError(
                    "mesh: ranks share the mean of one loss, but the segment returns one of shape "
                    f"{list(measured.loss.shape)}. An ensemble needs no mesh: each rank trains its"
                    " own, ftbptt.distributed.own_models."
                )
            weight, loss = float(measured.weight), float(measured.loss)
        tokens = 0 if measured is None else measured.tokens
        ranks, like = self.ranks, self.learner.trained
        reduction = self._begun = self._begun or self._new()
        own = [0] * ranks.size
        own[ranks.rank] = _FAILED if failed else _STOPS * stops
        high, low = divmod(weight, _BASE)
        told = [high, low, weight * loss if weight else 0.0, tokens, measured is not None, more,
                due and ranks.rank == 0, seconds if ranks.rank == 0 else 0.0, *own]  # fmt: skip
        sums = reduction.finish(grads, weight, told)
        self._begun = None  # only now: what an error leaves undone, tell() brings to its end
        self.bytes_reduced += reduction.nbytes
        high, low, weighted, all_tokens, windows, had_one, due_for_all, first_seconds, *said = sums
        total = high * _BASE + low
        all_steps = max(total, 1.0)
        joined = None
        if windows:
            mean = torch.tensor(weighted / all_steps, dtype=like[0].dtype.to_real())
            steps = 0 if measured is None else measured.steps
            joined = WindowStats(mean, int(total), steps, int(all_tokens))
        return Joined(
            joined,
            bool(had_one),
            reduction.mean(all_steps),
            bool(due_for_all),
            first_seconds,
            [rank for rank, word in enumerate(said) if word == _STOPS],
            [rank for rank, word in enumerate(said) if word == _FAILED],
        )
