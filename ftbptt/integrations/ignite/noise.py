"""Replaces a model's random numbers by constants, so that two ways of running it compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compat.tracing import TorchDispatchMode
from ..._trees import tree_leaves
from .agreement import Outcome, difference, not_stepwise

# Operations that return nothing but random numbers: replacing their values loses no gradient.
_GENERATORS = frozenset(
    ("bernoulli", "bernoulli_", "rand", "rand_like", "randn", "randn_like", "normal", "normal_",
     "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "randint", "randint_like",
     "random", "random_")
)  # fmt: skip


# (value, flag) of a ConstantNoise. With one of these a mask made of random numbers keeps all
# elements, whether it keeps those above its rate or those below.
CONSTANTS = ((0.999, True), (0.001, True), (0.999, False), (0.001, False))


class ConstantNoise(TorchDispatchMode):
    """Within this mode random numbers are ``value``, random booleans and integers ``flag``.

    ``drawn`` counts the random numbers. ``unsupported`` names an operation that mixes random
    numbers into its result, so that they cannot be replaced; None if there was none.
    """

    def __init__(self, value: float, flag: bool) -> None:
        super().__init__()
        self.value, self.flag = value, flag
        self.drawn = 0
        self.unsupported: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == "native_dropout":  # keep everything
            x, p, train = (*args, *(kwargs or {}).values())[:3]
            if train is not False and p:
                self.drawn += x.numel()
                return x / (1 - p), torch.ones_like(x, dtype=torch.bool)
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        if name not in _GENERATORS:
            self.unsupported = name
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.drawn += leaf.numel()
                is_flag = name.startswith("bernoulli") or not leaf.is_floating_point()
                leaf.fill_(self.flag if is_flag else self.value)
        return result


class Trial(NamedTuple):
    """A chunk run in one call and step by step, each with the noise that replaced its own."""

    chunk: Outcome
    stepwise: Outcome
    chunk_noise: ConstantNoise
    stepwise_noise: ConstantNoise


def noise_difference(
    trials: Iterable[Trial], expected: Outcome, autocast: torch.dtype | None
) -> str | None:
    """Why the noise of a chunk is not that of its steps; None if it is.

    The steps must draw as many numbers as the chunk: a mask that they share is drawn once. And for
    every nonzero gradient of ``expected``, the chunk with its random noise, a trial must have a
    nonzero one, or it was not compared.
    """
    not_compared = _nonzero(expected)
    for chunk, stepwise, chunk_noise, stepwise_noise in trials:
        unsupported = chunk_noise.unsupported or stepwise_noise.unsupported
        if unsupported is not None:
            return f"it draws random numbers inside {unsupported}"
        if chunk_noise.drawn != stepwise_noise.drawn:
            return (
                f"a chunk draws {chunk_noise.drawn} random numbers, but its steps one by one "
                f"{stepwise_noise.drawn}: several steps share them"
            )
        message = difference(stepwise, chunk, autocast)
        if message is not None:
            return not_stepwise(message)
        not_compared -= _nonzero(chunk)
        if not not_compared:
            return None
    return f"with constant random numbers {min(not_compared)} has no gradient to compare"


def _nonzero(outcome: Outcome) -> set[str]:
    grads = outcome.grads.items()
    return {name for name, grad in grads if grad is not None and bool(grad.any())}
