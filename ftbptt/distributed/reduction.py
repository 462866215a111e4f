"""Sums gradients over the ranks in a few flat buckets, each sent as soon as it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks

# A message costs about as much as a megabyte of data. The first bucket is no larger, so that it is
# sent while the others are still being computed.
_LEAST_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20


def buckets_of(leaves: Sequence[Tensor]) -> list[list[int]]:
    """The indices of the leaves in each bucket, the last leaves first.

    That is the order in which the backward pass finishes layers. A bucket has one dtype and one
    device.
    """
    kinds: dict[Any, list[int]] = {}
    for i in reversed(range(len(leaves))):
        kinds.setdefault((leaves[i].dtype, leaves[i].device), []).append(i)
    buckets: list[list[int]] = []
    for indices in kinds.values():
        first, size = len(buckets), 0
        buckets.append([])
        for i in indices:
            if size >= (_BUCKET_BYTES if len(buckets) > first + 1 else _LEAST_BYTES):
                buckets.append([])
                size = 0
            buckets[-1].append(i)
            size += leaves[i].nbytes
        if size < _LEAST_BYTES and len(buckets) > first + 1:  # too small for a message
            remainder = buckets.pop()
            buckets[-1] += remainder
    return buckets


class Reduction:
    """The sum over the ranks of the gradients of an update, each rank's times its ``weight``.

    All ranks send the buckets in the order of :func:`buckets_of`. The last one also carries
    ``numbers`` scalars, which are summed too.
    """

    def __init__(
        self, ranks: Ranks, like: list[Tensor], dtype: torch.dtype | None, numbers: int
    ) -> None:
        self.ranks, self.like, self.dtype, self.numbers = ranks, like, dtype, numbers
        self.buckets = buckets_of(like)
        self.nbytes = 0  # sent by this rank so far
        self._flats: list[Tensor] = []
        self._works: list[dist.Work] = []

    def add_bucket(self, grads: list[Tensor] | None, weight: float) -> None:
        """Sends the next bucket: its gradients, or zeros if this rank has none (None).

        The last bucket waits for the numbers, in :meth:`finish`.
        """
        indices = self.buckets[len(self._flats)]
        leaves = [leaf.detach() for leaf in (grads or [self.like[i] for i in indices])]
        parts = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
        is_last = len(self._flats) == len(self.buckets) - 1
        numbers = [parts[0].new_empty(self.numbers)] if is_last else []
        flat = torch.cat([part.reshape(-1) for part in (*parts, *numbers)])
        if flat.dtype == torch.float16:  # times the steps, and summed, gradients would overflow
            flat = flat.float()
        if grads is None or not weight:  # 0 times NaN would be NaN
            flat.zero_()
        else:
            flat *= weight
        flat = flat if self.dtype is None else flat.to(self.dtype)
        if not is_last:
            self._send(flat)
        self._flats.append(flat)

    def complete(self, grads: list[Tensor] | None, weight: float) -> None:
        """Adds the buckets that are not there yet; ``grads`` are the gradients of all leaves."""
        for indices in self.buckets[len(self._flats) :]:
            self.add_bucket(None if grads is None else [grads[i] for i in indices], weight)

    def finish(self, numbers: Tensor) -> Tensor:
        """Sends the last bucket, and waits for all; returns the sums of the numbers, of float64.

        Those of whole numbers are exact below 2**24. Raises :class:`RankFailed`.
        """
        last = self._flats[-1]
        if last.dtype in (torch.float32, torch.float64):
            sums = last[-len(numbers) :]
            sums.copy_(numbers)
        else:  # half precision would round the numbers: they go in a message of their own
            sums = numbers.to(last.device)
            self._flats[-1] = last = last[: -len(numbers)]
            self._send(sums)
        self._send(last)
        for work in self._works:
            self.ranks.wait(work)
        return sums

    def mean(self, total: float) -> list[Tensor]:
        """The mean gradients of all leaves: their sums, divided by the ``total`` weight."""
        means: dict[int, Tensor] = {}
        for indices, flat in zip(self.buckets, self._flats, strict=True):
            first = self.like[indices[0]]
            sizes = [self.like[i].numel() for i in indices]
            count = sum(sizes) * (2 if first.is_complex() else 1)
            dtype = first.dtype.to_real()
            wide = torch.promote_types(flat.dtype, dtype)
            mean = flat[:count].to(wide).div_(total).to(dtype)
            mean = torch.view_as_complex(mean.view(-1, 2)) if first.is_complex() else mean
            for i, part in zip(indices, mean.split(sizes), strict=True):
                means[i] = part.reshape(self.like[i].shape)
        return [means[i] for i in range(len(self.like))]

    def _send(self, tensor: Tensor) -> None:
        self.nbytes += tensor.nbytes
        self._works.append(self.ranks.start_sum(tensor))
