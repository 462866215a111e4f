"""Unbiased truncation: cut at random, and reweight the gradients that cross uncut steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import check_number
from .._trees import Tree, differentiable, tree_leaves, tree_map
from ..contract.layout import InDimsLayout, Layout
from ..contract.output import SegmentOutput
from ..segment.make_segment import check_made
from ..segment.train_segment import TrainSegment
from .data.chunk import Chunk
from .data.layout import DataLayout
from .updates.window_stats import moved_mean, share


class Cuts(NamedTuple):
    """``pieces`` are ``(first step, step after the last)``. ``factors`` has a factor for each step,
    for the gradient that goes back from it to the step before."""

    pieces: list[tuple[int, int]]
    factors: list[float]


def random_truncation(
    train_segment: TrainSegment,
    mean_length: float,
    *,
    tail: float = 6.0,
    generator: torch.Generator | None = None,
) -> RandomTruncation:
    """random_truncation : train_segment, mean length of a piece -> function like train_segment

    Truncation without bias: the mean of its gradients over all draws is the gradient of the full
    segment, even if every piece is shorter. A segment of K steps runs in pieces of random lengths,
    one after the other, so it takes the memory of the longest piece. At a step where it could have
    been cut with probability c and was not, the gradient is multiplied by 1 / (1 - c)::

        since = 0
        for t in range(1, K):
            since += 1
            c = (tail - 1) / ((tail - 2) * mean_length + since)
            if rand() < c: cut before step t; since = 0
            else: the gradient that crosses from t to t - 1 is multiplied by 1 / (1 - c)

    ``mean_length``
        The mean length of a piece, in steps; more than 1.
    ``tail``
        The exponent of the lengths' distribution: P(length > n) falls like n^(1 - tail). With
        ``math.inf``, c is always 1 / mean_length; the factors then grow exponentially with the
        length, and so does the variance.
    ``generator``
        Draws the cuts; None: torch's default generator, on the CPU.

    The result is called as ``train_segment`` is, and can be trained with :func:`train_stream`;
    under ``torch.func.vmap`` with ``randomness="same"``, all sequences cut at the same steps. Its
    loss is the mean of the pieces' losses, weighted by their valid steps, so the loss must be a
    mean over steps or return one value per step. (With ``in_dims`` and a ``mask``, a segment's loss
    is a mean over sequences of each one's mean, and the result is the mean of that over pieces.)
    Raises TypeError for anything but what :func:`ftbptt.make_train_segment` returns, ValueError for
    numbers out of range and for a segment with ``taps``, ``window`` or ``context``.

    ARTBP: Tallec and Ollivier, Unbiasing truncated backpropagation through time, 2017.

    >>> import torch, ftbptt
    >>> cell = torch.nn.GRUCell(3, 5)
    >>> train_segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: (out - y).square().mean(), backend="eager"
    ... )
    >>> unbiased = random_truncation(train_segment, mean_length=16)
    >>> params, x, y = dict(cell.named_parameters()), torch.randn(60, 2, 3), torch.randn(60, 2, 5)
    >>> grads, state, loss, out = unbiased(params, torch.zeros(2, 5), x, y)
    >>> out.shape
    torch.Size([60, 2, 5])
    """
    check_made(train_segment)
    recipe = train_segment.recipe
    for name, is_used in (
        ("taps", train_segment.tapped),
        ("window", recipe.window is not None),
        ("context", bool(recipe.context)),
    ):
        if is_used:
            raise ValueError(
                f"train_segment: was made with {name}=, which has no meaning in pieces of random "
                "length. Make it without."
            )
    check_number("mean_length", mean_length)
    check_number("tail", tail)
    if not (mean_length > 1 and math.isfinite(mean_length)):
        raise ValueError(f"mean_length: expected a number of steps above 1, found {mean_length}.")
    if not tail > 2:
        raise ValueError(
            f"tail: expected a number above 2, so that lengths have a mean, found {tail}."
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator: expected a torch.Generator, found {generator!r}. One with a seed is "
            "torch.Generator().manual_seed(0)."
        )
    return RandomTruncation(train_segment, mean_length, tail, generator)


class RandomTruncation:
    """params, state, x[K, ...], y[K, ...] -> SegmentOutput, with unbiased gradients

    Made by :func:`random_truncation`. Takes ``reset`` and ``mask`` as :class:`TrainSegment` does.

    >>> import ftbptt
    >>> train_segment = ftbptt.make_train_segment(
    ...     torch.nn.GRUCell(3, 5), lambda out, y: out.square().mean(), backend="eager"
    ... )
    >>> unbiased = random_truncation(train_segment, mean_length=20, tail=math.inf)
    >>> unbiased.probability(1), unbiased.probability(7)
    (0.05, 0.05)
    """

    def __init__(
        self,
        train_segment: TrainSegment,
        mean_length: float,
        tail: float,
        generator: torch.Generator | None,
    ) -> None:
        self.train_segment, self.mean_length, self.tail = train_segment, mean_length, tail
        self.generator = generator
        self._with_factors: dict[int, TrainSegment] = {}  # variants, by the time axis

    def probability(self, since: int) -> float:
        """The probability of a cut ``since`` steps after the last one."""
        if math.isinf(self.tail):
            return 1 / self.mean_length
        return (self.tail - 1) / ((self.tail - 2) * self.mean_length + since)

    def draws(self, steps: int) -> list[float]:
        """A random number from 0 to 1 for each step."""
        generator = self.generator
        device = torch.device("cpu") if generator is None else generator.device
        numbers = torch.rand(steps, generator=generator, dtype=torch.float64, device=device)
        return numbers.tolist()

    def cuts(self, steps: int) -> Cuts:
        """Draws where a segment of ``steps`` steps is cut."""
        pieces, factors, start = [], [1.0], 0
        draws = self.draws(steps)
        for t in range(1, steps):
            c = self.probability(t - start)
            if draws[t] < c:
                pieces.append((start, t))
                factors.append(1.0)
                start = t
            else:
                factors.append(1 / (1 - c))
        return Cuts([*pieces, (start, steps)], factors)

    def __call__(
        self,
        params: Tree,
        state: Tree,
        x: Tree,
        y: Tree,
        *,
        reset: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> SegmentOutput:
        # It keeps the layout of its data, which may be another in the next call.
        data, chunk = DataLayout(self.train_segment, None), Chunk(x, y, reset, mask)
        axes, layout = data.axes(x), data.layout(x)
        cuts = self.cuts(axes.length(chunk))
        run = self._variant_with_factors(layout.time_dim)
        x_leaf = tree_leaves(x)[0]
        factors = torch.tensor(cuts.factors, dtype=_real_dtype(params, x_leaf),
                               device=x_leaf.device)  # fmt: skip
        total: int | Tensor = 0
        mean: tuple[Tensor, Tree] | None = None  # of the pieces' losses and gradients so far
        outs = []
        for start, end in cuts.pieces:
            part = axes.cut(chunk, start, end)
            part_factors = _laid_out(factors[start:end], layout, x_leaf)
            result = run(
                params, state, (part.x, part_factors), part.y, reset=part.reset, mask=part.mask
            )
            state = result.state
            weight = data.count(part, state, 0).weight
            total = total + weight
            piece = (result.loss, result.grads)
            mean = piece if mean is None else _running_mean(mean, piece, share(weight, total))
            outs.append(result.out)
        assert mean is not None
        loss, grads = mean
        out = tree_map(lambda *parts: torch.cat(parts, axes.x), *outs)
        return SegmentOutput(grads, state, loss, out)

    def _variant_with_factors(self, time_dim: int) -> TrainSegment:
        if time_dim not in self._with_factors:
            self._with_factors[time_dim] = self.train_segment.variant(
                factors=True, time_dim=time_dim
            )
        return self._with_factors[time_dim]

    def evaluate(self, *args: Tree, **flags: Tensor | None) -> SegmentOutput:
        """As :meth:`TrainSegment.evaluate`: without gradients there is nothing to cut."""
        return self.train_segment.evaluate(*args, **flags)


def _real_dtype(params: Tree, x_leaf: Tensor) -> torch.dtype:
    """The real dtype of gradients: that of the first parameter that has one."""
    leaf = next((leaf for leaf in tree_leaves(params) if differentiable(leaf)), x_leaf)
    return leaf.dtype.to_real() if leaf.is_complex() else leaf.dtype


def _laid_out(factors: Tensor, layout: Layout, x_leaf: Tensor) -> Tensor:
    """``factors[K]`` as a leaf of ``x``: time and the rows of ``in_dims`` as in x."""
    if isinstance(layout, InDimsLayout):
        rows = x_leaf.shape[layout.x_dim]
        factors = factors.unsqueeze(1).expand(-1, rows)
        return layout.sequence_back(factors.reshape(*factors.shape, *(1,) * (x_leaf.dim() - 2)))
    return factors.reshape(*(1,) * layout.time_dim, -1)


def _running_mean(
    mean: tuple[Tensor, Tree], piece: tuple[Tensor, Tree], piece_share: float | Tensor
) -> tuple[Tensor, Tree]:
    """A weighted mean of losses and gradients, with one more piece in it."""

    def update(a: Tensor, b: Tensor) -> Tensor:
        return moved_mean(a, b, piece_share) if differentiable(a) else a

    updated: tuple[Tensor, Tree] = tree_map(update, mean, piece)
    return updated
