"""A model's random numbers made constant, so that two ways of running it can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._compat import TorchDispatchMode, tree_leaves

# What gives nothing but random numbers: their values can be replaced without losing a gradient.
_GENERATORS = frozenset(
    ("bernoulli", "bernoulli_", "rand", "rand_like", "randn", "randn_like", "normal", "normal_",
     "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "randint", "randint_like",
     "random", "random_")
)  # fmt: skip


class ConstantNoise(TorchDispatchMode):
    """While it is on, random numbers are constants; ``drawn`` of them were asked for.

    ``unknown`` names an operation that mixes random numbers into its result by itself.
    """

    def __init__(self) -> None:
        super().__init__()
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
                leaf.fill_(0.5 if leaf.is_floating_point() and name[:4] != "bern" else 1)
        return result
