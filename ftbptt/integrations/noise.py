"""A model's random numbers made constant, so that two ways of running it can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import TorchDispatchMode
from .._trees import tree_leaves
from .agreement import Outcome, disagreement

# What gives nothing but random numbers: their values can be replaced without losing a gradient.
_GENERATORS = frozenset(
    ("bernoulli", "bernoulli_", "rand", "rand_like", "randn", "randn_like", "normal", "normal_",
     "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "randint", "randint_like",
     "random", "random_")
)  # fmt: skip


# A mask made of them, of what is above a rate or of what is below it, keeps all in one of these.
CONSTANTS = ((0.999, True), (0.001, True), (0.999, False), (0.001, False))


class ConstantNoise(TorchDispatchMode):
    """While it is on, random numbers are ``value``, and draws of yes or no are ``yes``.

    ``drawn``: how many were asked for. ``unknown`` names an operation that mixes random numbers
    into its result by itself.
    """

    def __init__(self, value: float, yes: bool) -> None:
        super().__init__()
        self.value, self.yes = value, yes
        self.drawn = 0
        self.unknown: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == "native_dropout":  # nothing dropped
            x, p, train = (*args, *(kwargs or {}).values())[:3]
            if train is not False and p:
                self.drawn += x.numel()
                return x / (1 - p), torch.ones_like(x, dtype=torch.bool)
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        if name not in _GENERATORS:
            self.unknown = name
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.drawn += leaf.numel()
                by_yes = name.startswith("bernoulli") or not leaf.is_floating_point()
                leaf.fill_(self.yes if by_yes else self.value)
        return result


class Trial(NamedTuple):
    """A chunk as one and step by step, with the noise that each saw."""

    whole: Outcome
    stepwise: Outcome
    noise: ConstantNoise
    stepwise_noise: ConstantNoise


def noise_differs(
    trials: Iterable[Trial], expected: Outcome, autocast: torch.dtype | None
) -> str | None:
    """Why the noise of a chunk is not that of its steps, in words; None if it is.

    Steps must draw as many numbers one by one: a mask that they share is drawn once for all. And
    every gradient of ``expected``, the chunk with its own noise, must be seen in a trial.
    """
    left = _nonzero(expected)
    for whole, stepwise, noise, stepwise_noise in trials:
        unknown = noise.unknown or stepwise_noise.unknown
        if unknown is not None:
            return f"it draws random numbers inside {unknown}"
        if noise.drawn != stepwise_noise.drawn:
            return (
                f"a chunk draws {noise.drawn} random numbers, but its steps one by one "
                f"{stepwise_noise.drawn}: several steps share them"
            )
        words = disagreement(stepwise, whole, autocast)
        if words is not None:
            return words
        left -= _nonzero(whole)
        if not left:
            return None
    return f"with constant random numbers {min(left)} has no gradient that could be compared"


def _nonzero(outcome: Outcome) -> set[str]:
    grads = outcome.grads.items()
    return {name for name, grad in grads if grad is not None and bool(grad.any())}
