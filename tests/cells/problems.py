"""What a test trains: a step, its parameters, a state, data for any K, and a loss.

A cell of the table is a function ``make(draw) -> Problem`` in float64, registered with ``@cell``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ftbptt import Step

Tree = Any
# Rows, inputs, units, outputs: small, odd, and all different; or all equal, in a process of
# test_equal_sizes.
EQUAL_SIZES = "EQUAL_SIZES" in os.environ
B, D, H, OUT = (5, 5, 5, 5) if EQUAL_SIZES else (3, 5, 7, 4)
HEADS, UNITS = (5, 5) if EQUAL_SIZES else (2, 6)  # of each head
VOCABULARY = 6


@dataclass(frozen=True)
class Problem:
    """``x`` and ``y`` are functions of K; ``rows`` is the B of a ``[K, B]`` reset, if one fits."""

    step: Any
    params: Tree
    state: Tree
    x: Callable[[int], Tree]
    y: Callable[[int], Tree]
    loss: Callable[[Tree, Tree], Tensor]
    rows: int | None = B
    time_dim: int = 0  # where time lies in x, y and out

    def data(self, steps: int) -> tuple[Tree, Tree, Tree, Tree]:
        """The four positional arguments of ``train_segment``."""
        return self.params, self.state, self.x(steps), self.y(steps)

    def to(self, dtype: torch.dtype) -> Problem:
        """The same numbers, rounded to ``dtype``."""
        return self._with(lambda tree: cast(tree, dtype), _module_to(self.step, dtype))

    def on(self, device: str) -> Problem:
        """The same on another device."""

        def move(tree: Tree) -> Tree:
            def to(leaf: Tensor) -> Tensor:
                return leaf.detach().to(device).requires_grad_(leaf.requires_grad)

            return tree_map(to, tree)

        return self._with(move, _module_to(self.step, device))

    def _with(self, change: Callable[[Tree], Tree], step: Any) -> Problem:
        x, y = self.x, self.y
        return replace(
            self,
            step=step,
            params=change(self.params),
            state=change(self.state),
            x=lambda steps: change(x(steps)),
            y=lambda steps: change(y(steps)),
        )


def cast(tree: Tree, dtype: torch.dtype) -> Tree:
    """Floating leaves to ``dtype``, complex ones to its complex companion, the rest as they are."""

    def to(leaf: Tensor) -> Tensor:
        if leaf.is_complex():
            result = leaf.detach().to(dtype.to_complex())
        elif leaf.is_floating_point():
            result = leaf.detach().to(dtype)
        else:
            return leaf
        return result.requires_grad_(leaf.requires_grad)

    return tree_map(to, tree)


def _module_to(step: Any, to: torch.dtype | str) -> Any:
    if isinstance(step, Step) and step.module is not None:
        return replace(step, module=_module_to(step.module, to))
    return copy.deepcopy(step).to(to) if isinstance(step, nn.Module) else step


class Draw:
    """Seeded random tensors in float64."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 0.5) -> Tensor:
        return scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def complex(self, *shape: int, scale: float = 0.5) -> Tensor:
        return torch.complex(self(*shape, scale=scale), self(*shape, scale=scale))

    def module(self, build: Callable[[], nn.Module]) -> nn.Module:
        """The module in float64, every parameter away from its round initial value."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            module = build().double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += self(*parameter.shape, scale=0.1)
        return module

    def sequence(self, *shape: int, time_dim: int = 0) -> Callable[[int], Tensor]:
        """``steps -> tensor`` with ``steps`` on ``time_dim``; a shorter one is a prefix."""
        seed = int(torch.randint(1 << 30, (), generator=self.generator))

        def data(steps: int) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            rows = [
                torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)
            ]
            return torch.stack(rows, time_dim)

        return data

    def tokens(self, vocabulary: int, *shape: int) -> Callable[[int], Tensor]:
        seed = int(torch.randint(1 << 30, (), generator=self.generator))

        def data(steps: int) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            return torch.stack(
                [torch.randint(vocabulary, shape, generator=generator) for _ in range(steps)]
            )

        return data


def named(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


# -- losses: every form that the contract allows ------------------------------------------------


def mse(out: Tree, y: Tree) -> Tensor:
    """A scalar, over all leaves."""
    pairs = zip(tree_leaves(out), tree_leaves(y), strict=True)
    return torch.stack([(o - t).square().mean() for o, t in pairs]).sum()


def per_step(out: Tensor, y: Tensor) -> Tensor:
    """[K]"""
    return (out - y).square().flatten(1).mean(1)


def per_row(out: Tensor, y: Tensor) -> Tensor:
    """[K, B]"""
    return (out - y).square().mean(-1)


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """A scalar; ``y`` are classes."""
    return nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())


def cross_entropy_per_row(out: Tensor, y: Tensor) -> Tensor:
    """[K, B]; ``y`` are classes."""
    return nn.functional.cross_entropy(out.movedim(-1, 1), y, reduction="none")


# -- the registry -------------------------------------------------------------------------------

TABLE: dict[str, Callable[[Draw], Problem]] = {}


def cell(make: Callable[[Draw], Problem]) -> Callable[[Draw], Problem]:
    """Enters a cell in the table under the function's name."""
    assert make.__name__ not in TABLE
    TABLE[make.__name__] = make
    return make
