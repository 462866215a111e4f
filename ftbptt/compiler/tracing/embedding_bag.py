"""``F.embedding_bag`` as plain operations: torch's has outputs of integers, and no vmap rule.

And ``F.embedding`` with a largest norm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(
    input: Tensor, weight: Tensor, padding_idx: Any = None, max_norm: Any = None,
    norm_type: float = 2.0, *options: Any, **named: Any,
) -> Any:  # fmt: skip
    """With ``max_norm``, which torch writes to the weight where no trace sees that it is hidden."""
    if max_norm is None:
        return NotImplemented
    torch.embedding_renorm_(weight.detach(), input.contiguous(), max_norm, norm_type)
    return F.embedding(input, weight, padding_idx, None, norm_type, *options, **named)


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Any = None, max_norm: Any = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean",
    sparse: bool = False, per_sample_weights: Any = None, include_last_offset: bool = False,
    padding_idx: Any = None,
) -> Any:  # fmt: skip
    """A bag for each row of ``input``, or from each of ``offsets`` to the next.

    The gradient is dense also where it is to be sparse.
    """
    is_weighted = per_sample_weights is not None
    is_of_rows = input.dim() == 2 and offsets is None
    is_of_offsets = input.dim() == 1 and isinstance(offsets, Tensor) and offsets.dim() == 1
    if (
        not (is_of_rows or is_of_offsets)
        or mode not in ("sum", "mean", "max")
        or (is_weighted and (mode != "sum" or per_sample_weights.shape != input.shape))
        or (mode == "max" and (scale_grad_by_freq or sparse))
    ):
        return NotImplemented  # torch says what is wrong
    if scale_grad_by_freq:
        raise RuntimeError(
            "embedding_bag(scale_grad_by_freq=True) cannot be compiled: torch takes the counts of "
            "other tokens (2.11 to 2.15). Use embedding(..., scale_grad_by_freq=True).sum(1)."
        )
    embedded = F.embedding(input, weight, None, max_norm, norm_type)
    if is_weighted:
        embedded = embedded * per_sample_weights.unsqueeze(-1)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    is_counted = torch.ones_like(input) if padding_idx is None else (input != padding_idx).long()
    bags = None if is_of_rows else _Bags(offsets, input.shape[0], include_last_offset)
    if mode == "max":
        return _largest(embedded, is_counted.bool(), bags)
    counted = torch.where(is_counted.unsqueeze(-1).bool(), embedded, 0.0)  # 0 * NaN is NaN
    total = counted.sum(1) if bags is None else bags.sum(counted)
    if mode == "sum":
        return total
    counts = is_counted.sum(1) if bags is None else bags.sum(is_counted)
    return total / counts.clamp(min=1).unsqueeze(-1)


class _Bags:
    """Which of the tokens are in which bag."""

    def __init__(self, offsets: Tensor, tokens: int, has_end: bool) -> None:
        """``has_end``: whether the last offset is the end of the last bag."""
        place = torch.arange(tokens, device=offsets.device)
        self.of_token = (offsets.unsqueeze(1) <= place).sum(0) - 1
        self._offsets = offsets.shape[0]
        self.count = self._offsets - has_end

    def sum(self, values: Tensor) -> Tensor:
        """``values[tokens, ...]`` by bag, ``[bags, ...]``."""
        zeros = values.new_zeros(self._offsets, *values.shape[1:])
        return zeros.index_add(0, self.of_token, values)[: self.count]

    def members(self) -> Tensor:
        """``bool[bags, tokens]``"""
        bag = torch.arange(self.count, device=self.of_token.device)
        return bag.unsqueeze(1) == self.of_token


def _largest(embedded: Tensor, is_counted: Tensor, bags: _Bags | None) -> Tensor:
    """Of each bag, by feature; 0 of an empty one."""
    if bags is not None:
        embedded, is_counted = embedded.unsqueeze(0), bags.members() & is_counted
    largest = torch.where(is_counted.unsqueeze(-1), embedded, -math.inf).max(1).values
    return torch.where(is_counted.any(1, keepdim=True), largest, 0.0)
