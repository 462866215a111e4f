"""Gradients of all ranks as one, in a few flat buckets, each sent as soon as it is there."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks

# A message costs about what a megabyte does. The first bucket has no more, so that it is on its way
# while the others are still being computed.
_LEAST_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20


def buckets_of(leaves: list[Tensor]) -> list[list[int]]:
    """Which leaves are in each bucket, of one dtype and one device, the last leaves first.

    The reverse loop is done with the last layer first.
    """
    kinds: dict[Any, list[int]] = {}
    for i in reversed(range(len(leaves))):
        kinds.setdefault((leaves[i].dtype, leaves[i].device), []).append(i)
    buckets: list[list[int]] = []
    for own in kinds.values():
        first, size = len(buckets), 0
        buckets.append([])
        for i in own:
            if size >= (_BUCKET_BYTES if len(buckets) > first + 1 else _LEAST_BYTES):
                buckets.append([])
                size = 0
            buckets[-1].append(i)
            size += leaves[i].nbytes
        if size < _LEAST_BYTES and len(buckets) > first + 1:  # not worth a message
            rest = buckets.pop()
            buckets[-1] += rest
    return buckets


class Reduction:
    """The gradients of one update, each rank's times its ``weight``, added up over the ranks.

    Buckets are sent in the order of :func:`buckets_of`, by all ranks; with the last one go a few
    ``numbers`` that all are to know.
    """

    def __init__(
        self, ranks: Ranks, like: list[Tensor], dtype: torch.dtype | None, numbers: int
    ) -> None:
        self.ranks, self.like, self.dtype, self.numbers = ranks, like, dtype, numbers
        self.buckets = buckets_of(like)
        self.nbytes = 0  # what this rank has sent up to now
        self._flats: list[Tensor] = []
        self._works: list[dist.Work] = []

    def give(self, grads: list[Tensor] | None, weight: float) -> None:
        """The gradients of the next bucket; None: this rank has nothing to add to it."""
        places = self.buckets[len(self._flats)]
        own = [leaf.detach() for leaf in (grads or [self.like[i] for i in places])]
        parts = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in own]
        is_last = len(self._flats) == len(self.buckets) - 1
        room = [parts[0].new_empty(self.numbers)] if is_last else []
        flat = torch.cat([part.reshape(-1) for part in (*parts, *room)])
        if grads is None or not weight:  # 0 times NaN would be NaN
            flat.zero_()
        else:
            flat *= weight
        flat = flat if self.dtype is None else flat.to(self.dtype)
        if not is_last:
            self._send(flat)
        self._flats.append(flat)

    def finish(
        self, grads: list[Tensor] | None, weight: float, numbers: list[float]
    ) -> list[float]:
        """Gives what is left, from the gradients of all leaves; the sums of the numbers.

        Those that are whole are exact below 2**24. Raises :class:`RankFailed`.
        """
        for places in self.buckets[len(self._flats) :]:
            self.give(None if grads is None else [grads[i] for i in places], weight)
        last, own = self._flats[-1], torch.tensor(numbers, dtype=torch.float64)
        if last.dtype in (torch.float32, torch.float64):
            told = last[-len(numbers) :]
            told.copy_(own)
        else:  # in so few bits they would not be right
            told = own.to(last.device)
            self._flats[-1] = last = last[: -len(numbers)]
            self._send(told)
        self._send(last)
        for work in self._works:
            self.ranks.wait(work)
        sums: list[float] = told.tolist()
        return sums

    def mean(self, total: float) -> list[Tensor]:
        """The sums of the gradients, divided by the weight of all ranks."""
        found: dict[int, Tensor] = {}
        for places, flat in zip(self.buckets, self._flats, strict=True):
            first = self.like[places[0]]
            sizes = [self.like[i].numel() for i in places]
            count = sum(sizes) * (2 if first.is_complex() else 1)
            own = flat[:count].to(first.dtype.to_real()).div_(total)
            own = torch.view_as_complex(own.view(-1, 2)) if first.is_complex() else own
            for i, part in zip(places, own.split(sizes), strict=True):
                found[i] = part.reshape(self.like[i].shape)
        return [found[i] for i in range(len(self.like))]

    def _send(self, tensor: Tensor) -> None:
        self.nbytes += tensor.nbytes
        self._works.append(self.ranks.add_up(tensor))
