"""``gradient_horizon``: how far gradients reach back, and which truncation that allows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._arguments import whole
from .._make_segment import check_made
from .._segment import TrainSegment
from ..compiler.plan import Plan
from ..compiler.signature import as_traced
from ..training.chunk import Chunk
from ..training.segments import Segments
from .lags import gradients_by_reach, norms_by_lag

Tree = Any


@dataclass(frozen=True)
class GradientHorizon:
    """How the gradient of one step's loss by the state fades with the lag; to print and to plot.

    ``norms`` has by leaf of the state ``[max_lag, losses, rows]``: entry ``[k - 1, i, b]`` is the
    norm of d loss_t / d state_{t-k} in row b, where loss_t is the share of step t in the segment's
    loss and state_s the state after step s. ``reached`` has by k2 the norm of the parameters'
    gradient in which each loss reaches back k2 steps, and ``bias`` how far that is off the one with
    the longest reach, relative to it.
    """

    norms: dict[str, Tensor]
    reached: dict[int, float]
    bias: dict[int, float]
    _gain: float  # the largest share of a lag in the gradient over its norm: M in the paper

    @property
    def max_lag(self) -> int:
        return len(next(iter(self.norms.values())))

    def mean(self, leaf: str | None = None) -> Tensor:
        """mean : a leaf's name, or None for all together -> [max_lag], over steps and rows"""
        return self._of(leaf).flatten(1).mean(1)

    def quantile(self, q: float, leaf: str | None = None) -> Tensor:
        """quantile : q from 0 to 1, a leaf's name or None for all -> [max_lag], as ``mean``"""
        return torch.stack([lag.flatten().quantile(q) for lag in self._of(leaf)])

    def _of(self, leaf: str | None) -> Tensor:
        if leaf is None:
            return torch.stack(list(self.norms.values())).square().sum(0).sqrt()
        if leaf not in self.norms:
            known = ", ".join(self.norms)
            raise ValueError(f"leaf: the state has no {leaf!r} with a gradient; it has {known}.")
        return self.norms[leaf]

    @property
    def decay(self) -> float:
        """The factor by which the mean norm falls from lag to lag, fitted to the last half.

        Above 1 it grows. 0 if nothing reaches so far.
        """
        mean = self.mean().double().cpu()
        lags = torch.arange(1, len(mean) + 1, dtype=torch.float64)
        last = lags > len(mean) // 2
        lags, mean = lags[last], mean[last]
        if not (mean > 0).all():
            return 0.0
        if len(lags) < 2:
            return math.nan
        lags = lags - lags.mean()
        return math.exp(float((lags * mean.log()).sum() / lags.square().sum()))

    def suggest_k2(self, tolerance: float = 0.1) -> int:
        """suggest_k2 : the relative bias of the gradient that is tolerable -> k2

        The smallest k2 for which the bias is estimated to be below: what lags after it can add
        is at most M times their norms, extrapolated beyond ``max_lag`` by the fitted decay, and is
        compared with the norm of the gradient. M is measured here, as the largest share of lags in
        the parameters' gradient over the sum of their norms. It is a bound, so often more than is
        needed: ``bias`` has what was measured.

        Raises ValueError for a tolerance that is not above 0, and if the gradient does not fade
        within ``max_lag``, so that there is nothing to extrapolate.

        Aicher, Foti and Fox, Adaptively truncating backpropagation through time to control gradient
        bias, 2019, section 3.
        """
        if not tolerance > 0:
            raise ValueError(f"tolerance: expected a number above 0, found {tolerance}.")
        decay, mean = self.decay, self.mean().double()
        if not decay < 1:
            raise ValueError(
                f"max_lag: within {self.max_lag} steps the gradient does not fade (a factor of "
                f"{decay:.3g} from lag to lag), so k2 cannot be estimated. Give a longer "
                "segment and a larger max_lag."
            )
        # beyond[k - 1]: of lags k and more, all together.
        beyond = self._gain * mean.flip(0).cumsum(0).flip(0)
        behind = self._gain * float(mean[-1]) * decay / (1 - decay)
        beyond = beyond + behind

        def bound(k2: int) -> float:
            if k2 <= self.max_lag:
                return float(beyond[k2 - 1])
            return behind * decay ** (k2 - self.max_lag - 1)

        whole = max(norm - bound(k2) for k2, norm in self.reached.items())
        if whole <= 0:
            raise ValueError(
                f"max_lag: what may lie beyond {self.max_lag} steps is as large as the gradient "
                f"itself (a factor of {decay:.3g} from lag to lag), so k2 cannot be estimated. "
                "Give a longer segment and a larger max_lag."
            )
        k2 = 1
        while bound(k2) / whole >= tolerance:
            k2 += 1
        return k2

    def __str__(self) -> str:
        lags = [k for k in _powers_of_two(self.max_lag) if k <= self.max_lag]
        lines = [
            f"gradient horizon over {self.max_lag} lags: a factor of {self.decay:.3g} from lag to "
            "lag in the last half",
            f"{'lag':>6} {'mean':>10} {'10 %':>10} {'50 %':>10} {'90 %':>10}",
        ]
        for leaf in self.norms:
            lines.append(f"{leaf}: norm of d loss_t / d state_(t-lag)")
            columns = [self.mean(leaf), *(self.quantile(q, leaf) for q in (0.1, 0.5, 0.9))]
            for k in lags:
                lines.append(f"{k:6} " + " ".join(f"{float(c[k - 1]):10.3g}" for c in columns))
        lines.append("bias of the gradient if each loss reaches back k2 steps, measured:")
        lines += [f"{k2:6} {bias:10.3g}" for k2, bias in self.bias.items()]
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """plot : file name -> None

        The norms over the lag as a PNG: for each leaf of the state the mean, a band from the 10 %
        to the 90 % quantile, and the fitted decay of all together. Needs matplotlib.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        lags = torch.arange(1, self.max_lag + 1)
        for leaf in self.norms:
            (line,) = axes.plot(lags, self.mean(leaf).cpu(), label=leaf)
            low, high = (self.quantile(q, leaf).cpu().numpy() for q in (0.1, 0.9))
            axes.fill_between(
                lags.numpy(), low, high, alpha=0.2, color=line.get_color(), linewidth=0
            )
        if 0 < self.decay < math.inf:
            half = self.max_lag // 2
            last, mean = lags[half:], self.mean().double().cpu()[half:]
            middle = mean.log().mean().exp()
            fitted = middle * self.decay ** (last - last.double().mean())
            label = f"fitted: {self.decay:.3g} from lag to lag"
            axes.plot(last, fitted, "k--", linewidth=1, label=label)
        axes.set_yscale("log")
        axes.set_xlabel("lag k, steps")
        axes.set_ylabel("norm of d loss_t / d state_(t-k)")
        axes.grid(alpha=0.3)
        axes.legend()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


def gradient_horizon(
    train_segment: TrainSegment,
    params: Tree,
    state: Tree,
    x: Tree,
    y: Tree,
    *,
    max_lag: int | None = None,
    reset: Tensor | None = None,
    mask: Tensor | None = None,
) -> GradientHorizon:
    """gradient_horizon : train_segment, params, state, x[K, ...], y[K, ...] -> GradientHorizon

    How far back do gradients reach? Takes the loss of each step on its own, runs its reverse loop
    over ``max_lag`` steps (default: half of K), all of them side by side, and measures the gradient
    by the state at each lag. ``suggest_k2(tolerance)`` of the result is the truncation for that.

    Arguments are those of the segment. The steps that have fewer than ``max_lag`` before them in
    the segment are left out. Raises TypeError and ValueError as the segment does, and for a
    ``max_lag`` that the segment has not got.

    >>> import torch, ftbptt
    >>> cell = torch.nn.GRUCell(3, 5)
    >>> train_segment = ftbptt.make_train_segment(cell, lambda out, y: (out - y).square().mean())
    >>> params, x, y = dict(cell.named_parameters()), torch.randn(60, 2, 3), torch.randn(60, 2, 5)
    >>> horizon = gradient_horizon(train_segment, params, torch.zeros(2, 5), x, y, max_lag=20)
    >>> horizon.mean().shape, 0 < horizon.decay < 1, horizon.suggest_k2(0.1) > 1
    (torch.Size([20]), True, True)
    """
    check_made(train_segment)
    segments = Segments(train_segment)
    chunk = Chunk(x, y, reset, mask)
    steps = segments.axes(x).length(chunk)
    max_lag = _checked(max_lag, steps, train_segment.context)
    with torch.no_grad():
        plan, groups = train_segment.plan(params, state, x, y, reset=reset, mask=mask)
        if not plan.loops.trained_carries:
            raise ValueError("state: no leaf of it has a gradient, so none reaches back.")
        first = max(max_lag, train_segment.context)
        reaches, rows = _powers_of_two(max_lag + 1), _row_axes(segments, chunk, plan)
        with as_traced(plan.signature.autocast):
            norms = norms_by_lag(plan, groups, first, max_lag, rows)
            gradients = gradients_by_reach(plan, groups, reaches)
    off = [_distance(own, gradients[-1]) for own in gradients]
    whole = _norm(gradients[-1])
    if not (math.isfinite(whole) and all(own.isfinite().all() for own in norms.values())):
        raise ValueError(
            "params, state, x, y: a gradient of the loss is not finite, so its norms say nothing. "
            "Look at out and loss of the segment first."
        )
    horizon = GradientHorizon(
        norms,
        reached={k2: _norm(own) for k2, own in zip(reaches, gradients, strict=True)},
        bias={k2: d / whole if d else 0.0 for k2, d in zip(reaches, off, strict=True)},
        _gain=0.0,
    )
    mean, gain = horizon.mean().double(), 0.0
    for i in range(1, len(reaches)):
        lags = float(mean[reaches[i - 1] - 1 : reaches[i] - 1].sum())
        share = _distance(gradients[i], gradients[i - 1])
        gain = max(gain, share / lags if lags else 0.0)
    return replace(horizon, _gain=gain)


def _row_axes(segments: Segments, chunk: Chunk, plan: Plan) -> list[int] | None:
    """Where the rows lie in each leaf of the state; None for data without rows."""
    leaves = [torch.empty(leaf.shape, device="meta") for leaf in plan.signature.state]
    if segments.rows(chunk, leaves) is None:
        return None
    return [segments.row_axis(leaf) for leaf in leaves]


def _checked(max_lag: int | None, steps: int, context: int) -> int:
    if max_lag is None:
        max_lag = max(1, steps // 2)
    max_lag = whole("max_lag", max_lag, 1)
    if steps <= max(max_lag, context):
        raise ValueError(
            f"max_lag: no step of the {steps} in x has {max_lag} before it. Give a longer segment, "
            "or a smaller max_lag."
        )
    return max_lag


def _powers_of_two(last: int) -> list[int]:
    """1, 2, 4, ..., and ``last``."""
    return sorted({1 << i for i in range(last.bit_length())} | {last})


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    return _norm([p - q for p, q in zip(a, b, strict=True)])


def _norm(gradients: list[Tensor]) -> float:
    own = [g for g in gradients if g.is_floating_point() or g.is_complex()]
    return float(torch.stack([torch.linalg.vector_norm(g).double() for g in own]).norm())
