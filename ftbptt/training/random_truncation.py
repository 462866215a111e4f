"""Unbiased truncation: cut at random, and make up for it where it was not cut."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._layout import SharedLayout
from .._make_segment import check_made
from .._output import SegmentOutput
from .._segment import TrainSegment
from .._trees import tree_leaves, tree_map
from .chunk import Chunk
from .learner import differentiable
from .segments import Segments
from .window_stats import share

Tree = Any


class Cuts(NamedTuple):
    """``pieces`` are (first step, after the last); the gradient that goes back from a step to the
    one before it is multiplied by the step's entry in ``factors``."""

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

    Truncation without bias: the mean of its gradients over many draws is the gradient of the whole
    segment, though none of its pieces may be as long. A segment of K steps is run in pieces of
    random lengths, one after the other, so that it takes the memory of the longest. Where it might
    have been cut with probability c and was not, the gradient is multiplied by 1 / (1 - c)::

        since = 0
        for t in range(1, K):
            since += 1
            c = (tail - 1) / ((tail - 2) * mean_length + since)
            if rand() < c: cut before step t; since = 0
            else: the gradient that crosses from t to t - 1 is multiplied by 1 / (1 - c)

    ``tail``
        How soon long pieces become rare: lengths above n have a probability like n^(1 - tail).
        ``math.inf``: c is always 1 / mean_length, and the factors grow exponentially with the
        length, and so does the variance.
    ``generator``
        Of the random numbers; None: torch's own, on the CPU.

    The result is called as ``train_segment`` is, and can be trained on a stream with
    :func:`train_stream`. Its loss is the mean over the steps, so that of ``train_segment`` must be
    one, or one value per step. Raises TypeError and ValueError for invalid arguments.

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
    for name, used in (
        ("taps", train_segment.tapped),
        ("window", recipe.window is not None),
        ("context", bool(recipe.context)),
    ):
        if used:
            raise ValueError(
                f"train_segment: was made with {name}=, which has no meaning in pieces of random "
                "length. Make it without."
            )
    if not (mean_length > 1 and math.isfinite(mean_length)):
        raise ValueError(f"mean_length: expected a number of steps above 1, found {mean_length}.")
    if not tail > 2:
        raise ValueError(f"tail: expected above 2, where lengths have a mean, found {tail}.")
    return RandomTruncation(train_segment, mean_length, tail, generator)


class RandomTruncation:
    """params, state, x[K, ...], y[K, ...] -> SegmentOutput, unbiased: :func:`random_truncation`."""

    def __init__(
        self,
        train_segment: TrainSegment,
        mean_length: float,
        tail: float,
        generator: torch.Generator | None,
    ) -> None:
        self.train_segment, self.mean_length, self.tail = train_segment, mean_length, tail
        self.generator = generator
        self._scaled: dict[int, TrainSegment] = {}  # by the axis of time

    def probability(self, since: int) -> float:
        """Of a cut so many steps after the last one."""
        if math.isinf(self.tail):
            return 1 / self.mean_length
        return (self.tail - 1) / ((self.tail - 2) * self.mean_length + since)

    def draws(self, steps: int) -> list[float]:
        """A random number from 0 to 1 for each step."""
        return torch.rand(steps, generator=self.generator, dtype=torch.float64).tolist()

    def cuts(self, steps: int) -> Cuts:
        """Draws where so many steps are cut."""
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
        # Of this call: the next one's data may have another layout.
        segments, chunk = Segments(self.train_segment), Chunk(x, y, reset, mask)
        axes, layout = segments.axes(x), segments.layout(x)
        cuts = self.cuts(axes.length(chunk))
        if layout.time_dim not in self._scaled:
            self._scaled[layout.time_dim] = self.train_segment.variant(
                factors=True, time_dim=layout.time_dim
            )
        run, first = self._scaled[layout.time_dim], tree_leaves(x)[0]
        wide = next((leaf for leaf in tree_leaves(params) if differentiable(leaf)), first)
        dtype = wide.dtype.to_real() if wide.is_complex() else wide.dtype
        factors = torch.tensor(cuts.factors, dtype=dtype, device=first.device)
        total: Any = 0
        mean, outs = None, []  # of (loss, grads)
        for start, end in cuts.pieces:
            part = axes.cut(chunk, start, end)
            own = factors[start:end].clone()
            own[0] = 1.0  # goes into the detached state
            if isinstance(layout, SharedLayout):
                rows = first.shape[layout.x_dim]
                own = layout.sequence_back(own.unsqueeze(1).expand(-1, rows))
            else:
                own = own.reshape(*(1,) * layout.time_dim, -1)
            result = run(params, state, (part.x, own), part.y, reset=part.reset, mask=part.mask)
            state = result.state
            weight, _ = segments.weigh(part, state, 0)
            total = total + weight
            piece = (result.loss, result.grads)
            mean = piece if mean is None else _with_piece(mean, piece, share(weight, total))
            outs.append(result.out)
        assert mean is not None
        loss, grads = mean
        out = tree_map(lambda *parts: torch.cat(parts, axes.x), *outs)
        return SegmentOutput(grads, state, loss, out)

    def evaluate(self, *args: Tree, **flags: Tensor | None) -> SegmentOutput:
        """As :meth:`TrainSegment.evaluate`: nothing is cut where there is no gradient."""
        return self.train_segment.evaluate(*args, **flags)


def _with_piece(mean: Tree, piece: Tree, weight: float | Tensor) -> Tree:
    """The weighted mean of (loss, grads) with another piece, which has ``weight`` in it.

    Sums over steps would overflow in half precision.
    """

    def add(a: Tensor, b: Tensor) -> Tensor:
        if not differentiable(a):
            return a
        return a + ((b - a) * weight).to(a.dtype)

    return tree_map(add, mean, piece)
