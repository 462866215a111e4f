"""Data whose order is random, so that a state that is carried goes on in other data."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..._warnings import warn


def shuffling_sampler(data: Any) -> Any:
    """That of a ``DataLoader``, if it gives a random order; None otherwise, as far as is known."""
    sampler = getattr(getattr(data, "batch_sampler", None) or data, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        return sampler if sampler.shuffle else None
    is_random = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    return sampler if is_random else None


def warn_of_shuffling(data: Any) -> None:
    """Warns if a state is carried through chunks in a random order, none of which resets it."""
    if (sampler := shuffling_sampler(data)) is not None:
        warn(
            f"data: the chunks come in a random order, by a {type(sampler).__name__}, but each "
            "goes on with the state after the one before. For chunks of one stream use "
            "shuffle=False. For independent sequences begin each with a reset, Chunk(x, y, reset); "
            "in batches of one length, fresh=True with that length as k1 does it too.",
            RuntimeWarning,
        )
