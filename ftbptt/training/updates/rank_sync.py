"""Updates that several processes make together, from the mean gradient over all valid steps.

Each rank trains on its own rows. In an update the ranks sum their gradients, weighted by valid
steps, and with them the numbers that they must agree on: whether any rank still has data, whether
losses are to be read now, whether a rank has to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._interrupt import uninterrupted
from ..._warnings import warn
from ...contract.output import EarlyGradients
from ...distributed.ranks import RankFailed, Ranks
from ...distributed.reduction import Reduction
from .learner import Learner
from .window_stats import WindowStats

# A rank's status; 0 while it goes on. It saves because its caller says so, or because that is due.
_STOPPING, _FAILED, _SAVING, _SAVING_WHEN_DUE = 1, 2, 3, 4
_BASE = 4096  # the steps of all ranks are summed as two digits, each exact in float32


class _Numbers(NamedTuple):
    """What the ranks sum up besides gradients and losses; a status for each rank follows it."""

    weight_high: float  # the valid steps, weight_high * _BASE + weight_low
    weight_low: float
    tokens: float
    has_stats: float  # the rank has a window that counts
    has_mask: float  # and that has a mask
    more: float  # the rank has a window
    due: float  # losses are to be read; only the first rank says so
    seconds: float  # that the run took; of the first rank only

    @staticmethod
    def of(
        stats: WindowStats | None = None,
        *,
        is_first: bool = False,
        more: bool = False,
        due: bool = False,
        seconds: float = 0.0,
    ) -> _Numbers:
        """Those of one rank; ``stats`` is None if it has no window that counts."""
        weight, tokens = 0.0, 0
        if stats is not None:
            weight, tokens = float(stats.weight), stats.tokens
        high, low = divmod(weight, _BASE)
        return _Numbers(
            weight_high=high,
            weight_low=low,
            tokens=tokens,
            has_stats=stats is not None,
            has_mask=stats is not None and isinstance(stats.weight, Tensor),
            more=more,
            due=due and is_first,
            seconds=seconds if is_first else 0.0,
        )

    @property
    def weight(self) -> float:
        return self.weight_high * _BASE + self.weight_low

    @property
    def divisor(self) -> float:
        """What makes a mean of a sum over the valid steps."""
        return max(self.weight, 1.0)

    def stats(self, loss_sum: Tensor, dtype: torch.dtype, steps: int) -> WindowStats | None:
        """The statistics, of ``steps`` steps of time; None if no rank has a window that counts.

        ``loss_sum`` is that of the ranks' losses times their weights.
        """
        if not self.has_stats:
            return None
        loss, weight = (loss_sum.double() / self.divisor).to(dtype), int(self.weight)
        # With a mask on any rank it is a tensor on all, as that of a window is.
        counted = torch.tensor(weight, device="cpu") if self.has_mask else weight
        return WindowStats(loss, counted, steps, int(self.tokens))


def _weighted_loss(stats: WindowStats | None) -> Tensor:
    """The loss times its weight, in float64; 0 without a weight, when the loss may be NaN."""
    if stats is None:
        return torch.zeros((), dtype=torch.float64)
    if stats.loss.dim():
        raise ValueError(
            "mesh: ranks share the mean of one loss, but the segment returns one of shape "
            f"{list(stats.loss.shape)}. An ensemble needs no mesh: each rank trains its own, "
            "ftbptt.distributed.own_models."
        )
    weighted = stats.loss.detach().double() * stats.weight
    if isinstance(stats.weight, Tensor):
        return weighted.masked_fill(stats.weight == 0, 0.0)
    return weighted if stats.weight else torch.zeros_like(weighted)


class JointUpdate(NamedTuple):
    """The result of all ranks.

    ``stats``
        those of the windows of all ranks; None if no rank had a window that counts
    ``more``
        whether a rank had a window at all
    ``grads``
        the mean gradients
    ``due``
        whether losses are to be read
    ``seconds``
        how long the run took, by the first rank's clock
    ``stopping``, ``failed``
        the ranks that stop the run, and those that left it
    ``saving``, ``saving_when_due``
        those that are about to save it because their caller says so, and because that is due
    """

    stats: WindowStats | None
    more: bool
    grads: list[Tensor]
    due: bool
    seconds: float
    stopping: list[int]
    failed: list[int]
    saving: list[int]
    saving_when_due: list[int]


class RankSync:
    """Makes a learner's updates those of all ranks.

    On CPUs the numbers go with the last bucket of gradients. On GPUs they go before it, so that the
    processes know them, and prepare the next window, while the GPUs still work.
    """

    def __init__(self, ranks: Ranks, learner: Learner, dtype: torch.dtype | None) -> None:
        self.ranks, self.learner, self.dtype = ranks, learner, dtype
        self.bytes_reduced = 0  # bytes that this rank has sent in reductions of gradients
        self.has_left = False  # this rank has left the run, and the others know
        self.device = learner.trained[0].device
        self.numbers_ahead = any(ranks.gather(works_aside(self.device)))
        self._begun: Reduction | None = None  # of the update in progress

    def early(
        self, weight: float | Tensor, is_sound: Callable[[Tensor], bool]
    ) -> EarlyGradients | None:
        """Sends the gradients of a window, which is a full update, while they are computed.

        None if there is one bucket only, for which all gradients have to be there.
        """
        reduction = self._new_reduction()
        if len(reduction.buckets) == 1:
            return None
        self._begun = reduction
        number = float(weight)

        def ready(loss: Tensor, grads: list[Tensor]) -> None:
            with uninterrupted():  # a bucket that is sent must be recorded as sent
                reduction.add_bucket(grads if is_sound(loss) else None, number)

        trained = self.learner.trained_indices
        parts = [[trained[i] for i in bucket] for bucket in reduction.buckets]
        return EarlyGradients(parts, ready)

    def _new_reduction(self) -> Reduction:
        others = 0 if self.numbers_ahead else len(_Numbers._fields) + self.ranks.size
        return Reduction(self.ranks, self.learner.trained, self.dtype, 1 + others)

    def update(
        self,
        index: int,
        stats: WindowStats | None = None,
        *,
        more: bool = False,
        due: bool = False,
        stops: bool = False,
        saves: int = 0,
        seconds: float = 0.0,
    ) -> JointUpdate:
        """Joins the windows of all ranks for an update; the learner then has the gradients of all.

        ``stats`` is None if this rank has no window that counts, ``more`` false if it has none at
        all. ``saves``: this is no update, but the rank is about to save; its status. Raises
        :class:`RankFailed` if another rank has left the run, RuntimeError if some ranks save and
        others do not, or only because that is due.
        """
        learner, grads = self.learner, None
        if stats is not None and learner.gathered is not None:
            grads = learner.gathered[0]
        numbers = _Numbers.of(
            stats, is_first=self.ranks.rank == 0, more=more, due=due, seconds=seconds
        )
        joint = self._join(grads, stats, numbers, _STOPPING if stops else saves)
        if joint.failed:
            self.has_left = True
            first = joint.failed[0]
            reasons = self.ranks.gather(None)
            raise RankFailed(f"rank {first} has left the run: {reasons[first]}")
        # What a caller saves is waited for, what is due is not: the two make no common save.
        for saving in (joint.saving, joint.saving_when_due):
            if saving and len(saving) + len(joint.stopping) < self.ranks.size:
                self.has_left = True  # as on all ranks
                raise RuntimeError(
                    f"save: rank {saving[0]} saves the run, but not all ranks do: each writes "
                    "its own part. Call it on all of them, not on the first one alone."
                )
        if joint.stopping and not stops:
            warn(
                f"ftbptt: rank {joint.stopping[0]} stops the run before update {index}.",
                RuntimeWarning,
            )
        learner.gathered = None
        if joint.stats is not None:
            learner.gathered = joint.grads, joint.stats.weight
        return joint

    def check(self, index: int, stops: bool, *, when_due: bool) -> bool:
        """Whether a rank stops the run before update ``index``; ``stops``: this one does.

        All ranks call it before they save, because that is due or because their callers say so.
        Raises as :meth:`update`.
        """
        saves = _SAVING_WHEN_DUE if when_due else _SAVING
        gathered = self.learner.gathered  # a caller may save within an update
        joint = self.update(index, stops=stops, saves=saves)
        self.learner.gathered = gathered
        return bool(joint.stopping)

    def close(self, index: int) -> None:
        """Waits until all ranks end the run, before update ``index``.

        Raises :class:`RankFailed` if one leaves it by an error.
        """
        while not self.has_left:
            joint = self.update(index, stops=True)
            self.has_left = len(joint.stopping) == self.ranks.size

    def leave(self, reason: str) -> None:
        """Tells the other ranks, which wait for the next update, that this rank leaves, and why.

        Raises :class:`RankFailed` if they cannot be reached.
        """
        if self.has_left or not self.ranks.alive:
            return
        self.has_left = True
        self._join(None, None, _Numbers.of(), _FAILED)
        self.ranks.gather(reason)

    def _join(
        self,
        grads: list[Tensor] | None,
        stats: WindowStats | None,
        numbers: _Numbers,
        status: int,
    ) -> JointUpdate:
        """Sums gradients and numbers over the ranks, and gathers their statuses. A collective.

        ``grads`` and ``stats`` are None if this rank has no window that counts.
        """
        weighted_loss = _weighted_loss(stats)
        reduction = self._begun = self._begun or self._new_reduction()
        statuses = [0] * self.ranks.size
        statuses[self.ranks.rank] = status
        own: list[float] = [*numbers, *statuses]
        reduction.complete(grads, numbers.weight)
        if self.numbers_ahead:
            sums = self.ranks.sum_numbers(own, self.device)
            (loss_sum,) = reduction.finish(weighted_loss[None])
        else:
            own.append(float(weighted_loss))
            all_sums = reduction.finish(torch.tensor(own, dtype=torch.float64))
            sums, loss_sum = all_sums[:-1].tolist(), all_sums[-1]
        self._begun = None  # only now: after an error, leave() has to complete the reduction
        self.bytes_reduced += reduction.nbytes
        total, all_statuses = _Numbers(*sums[: len(numbers)]), sums[len(numbers) :]

        def ranks_that(status: int) -> list[int]:
            return [rank for rank, found in enumerate(all_statuses) if found == status]

        dtype = torch.promote_types(self.learner.trained[0].dtype.to_real(), torch.float32)
        return JointUpdate(
            total.stats(loss_sum, dtype, 0 if stats is None else stats.steps),
            more=bool(total.more),
            grads=reduction.mean(total.divisor),
            due=bool(total.due),
            seconds=total.seconds,
            stopping=ranks_that(_STOPPING),
            failed=ranks_that(_FAILED),
            saving=ranks_that(_SAVING),
            saving_when_due=ranks_that(_SAVING_WHEN_DUE),
        )


def works_aside(device: torch.device) -> bool:
    """Whether the device works while its process goes on."""
    return device.type == "cuda"
