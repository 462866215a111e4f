"""``gradient_horizon``: how far back gradients reach, and the truncation length this allows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .._checks import check_int, check_number, check_positive
from .._trees import Tree, differentiable
from ..compiler.plan import Plan
from ..compiler.signature import without_autocast
from ..segment.make_segment import check_made
from ..segment.train_segment import TrainSegment
from ..training.data.chunk import Chunk
from ..training.data.layout import DataLayout
from .lags import gradients_by_reach, norms_by_lag


@dataclass(frozen=True)
class GradientHorizon:
    """How the gradient of one step's loss with respect to the state decays with the lag.

    ``print`` shows a table, :meth:`plot` draws it.

    - ``norms``: for each state leaf that the loss depends on a tensor ``[max_lag, losses, B]``.
      Entry ``[k - 1, i, b]`` is the norm of d loss_t / d state_{t-k} in row b, where loss_t is step
      t's share of the segment's loss and state_s is the state after step s. Without a batch axis, B
      is 1.
    - ``reached``: for each k2 the norm of the parameters' gradient if each loss reaches back k2
      steps.
    - ``bias``: for each k2 that gradient's distance from the one of the largest k2, relative to the
      latter's norm.

    >>> import ftbptt
    >>> cell, x = torch.nn.RNNCell(3, 5), torch.randn(12, 2, 3)
    >>> train_segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: out.square().mean(), backend="eager"
    ... )
    >>> params = dict(cell.named_parameters())
    >>> horizon = gradient_horizon(train_segment, params, None, x, None, max_lag=4)
    >>> horizon.norms["state"].shape, list(horizon.bias), horizon.bias[5]
    (torch.Size([4, 8, 2]), [1, 2, 4, 5], 0.0)
    """

    norms: dict[str, Tensor]
    reached: dict[int, float]
    bias: dict[int, float]
    _gain: float  # M in the paper: the most that lags add to the gradient, per norm of theirs

    @property
    def max_lag(self) -> int:
        """The number of lags in ``norms``."""
        return len(next(iter(self.norms.values())))

    def mean(self, leaf: str | None = None) -> Tensor:
        """mean : a state leaf's name, or None for the full state -> [max_lag], over steps and B

        Raises ValueError for a leaf that has no gradient, with the names of those that have one.
        """
        return self._of(leaf).flatten(1).mean(1)

    def quantile(self, q: float, leaf: str | None = None) -> Tensor:
        """quantile : q from 0 to 1, leaf as for :meth:`mean` -> [max_lag], over steps and B"""
        check_number("q", q)
        if not 0 <= q <= 1:
            raise ValueError(f"q: expected a number from 0 to 1, found {q}.")
        return torch.stack([lag.flatten().quantile(q) for lag in self._of(leaf)])

    def _of(self, leaf: str | None) -> Tensor:
        if leaf is None:
            return torch.stack(list(self.norms.values())).square().sum(0).sqrt()
        if leaf not in self.norms:
            names = ", ".join(self.norms)
            raise ValueError(f"leaf: the state has no {leaf!r} with a gradient; it has {names}.")
        return self.norms[leaf]

    @property
    def decay(self) -> float:
        """The factor by which the mean norm changes per lag, fitted to the last half of the lags.

        Above 1 the norm grows. 0 if a norm among them is zero, NaN if there is only one.
        """
        mean = self.mean().double().cpu()
        lags = torch.arange(1, len(mean) + 1, dtype=torch.float64, device="cpu")
        last_half = lags > len(mean) // 2
        lags, mean = lags[last_half], mean[last_half]
        if not (mean > 0).all():
            return 0.0
        if len(lags) < 2:
            return math.nan
        lags = lags - lags.mean()
        slope = (lags * mean.log()).sum() / lags.square().sum()
        return math.exp(float(slope))

    def suggest_k2(self, tolerance: float = 0.1) -> int:
        """suggest_k2 : the tolerated relative bias of the gradient -> k2

        Returns the smallest k2 whose estimated bias is below ``tolerance``. The bias is bounded by
        M times the norms of the lags that are cut off, extrapolated beyond ``max_lag`` with
        ``decay``, relative to the norm of the gradient. M is measured: the largest ratio of what a
        range of lags adds to the parameters' gradient to the sum of their norms. As an upper bound
        this often gives a larger k2 than necessary; ``bias`` holds the measured values.

        Raises ValueError if ``tolerance`` is not above 0, and if the gradient does not decay within
        ``max_lag``, so that it cannot be extrapolated.

        Aicher, Foti and Fox, Adaptively truncating backpropagation through time to control gradient
        bias, 2019, section 3.
        """
        check_positive("tolerance", tolerance)
        decay, mean = self.decay, self.mean().double()
        if math.isnan(decay):
            raise ValueError(
                f"max_lag: how the gradient fades cannot be seen within {self.max_lag} steps, so "
                "k2 cannot be estimated. Give at least 3, and better many more."
            )
        if not decay < 1:
            raise ValueError(
                f"max_lag: within {self.max_lag} steps the gradient does not fade (a factor of "
                f"{decay:.3g} from lag to lag), so k2 cannot be estimated. Give a longer "
                "segment and a larger max_lag."
            )
        beyond_max_lag = self._gain * float(mean[-1]) * decay / (1 - decay)
        # from_lag[k - 1]: the bound on what lags k and above add to the gradient.
        from_lag = self._gain * mean.flip(0).cumsum(0).flip(0) + beyond_max_lag

        def bound(k2: int) -> float:
            if k2 <= self.max_lag:
                return float(from_lag[k2 - 1])
            return beyond_max_lag * decay ** (k2 - self.max_lag - 1)

        # A lower bound on the norm of the gradient without truncation.
        least_norm = max(norm - bound(k2) for k2, norm in self.reached.items())
        if least_norm <= 0:
            raise ValueError(
                f"max_lag: what may lie beyond {self.max_lag} steps is as large as the gradient "
                f"itself (a factor of {decay:.3g} from lag to lag), so k2 cannot be estimated. "
                "Give a longer segment and a larger max_lag."
            )
        k2 = 1
        while bound(k2) / least_norm >= tolerance:
            k2 += 1
        return k2

    def __str__(self) -> str:
        lags = _powers_of_two(self.max_lag)
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

        Writes a PNG of the norms over the lag: for each state leaf the mean and the band between
        the 10 % and 90 % quantiles, and the decay fitted to the full state. Needs matplotlib.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        lags = torch.arange(1, self.max_lag + 1, device="cpu")
        for leaf in self.norms:
            (line,) = axes.plot(lags, self.mean(leaf).cpu(), label=leaf)
            low, high = (self.quantile(q, leaf).cpu().numpy() for q in (0.1, 0.9))
            axes.fill_between(
                lags.numpy(), low, high, alpha=0.2, color=line.get_color(), linewidth=0
            )
        if 0 < self.decay < math.inf:
            half = self.max_lag // 2
            lags, mean = lags[half:], self.mean().double().cpu()[half:]
            geometric_mean = mean.log().mean().exp()
            fitted = geometric_mean * self.decay ** (lags - lags.double().mean())
            label = f"fitted: {self.decay:.3g} from lag to lag"
            axes.plot(lags, fitted, "k--", linewidth=1, label=label)
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

    Measures how far back gradients reach. Backpropagates the loss of each step separately over
    ``max_lag`` steps (default: half of K), all of them in parallel, and records the norm of the
    gradient with respect to the state at each lag. ``suggest_k2(tolerance)`` of the result turns
    this into a truncation length.

    Arguments are those of the segment. Of steps with fewer than ``max_lag`` steps before them in
    the segment there are no norms. Raises what the segment raises; ValueError if ``max_lag`` is
    below 1 or too large for the segment, if no state leaf has a gradient, or if a gradient is not
    finite; TypeError if ``max_lag`` is no whole number.

    >>> import torch, ftbptt
    >>> cell = torch.nn.GRUCell(3, 5)
    >>> train_segment = ftbptt.make_train_segment(cell, lambda out, y: (out - y).square().mean())
    >>> params, x, y = dict(cell.named_parameters()), torch.randn(60, 2, 3), torch.randn(60, 2, 5)
    >>> horizon = gradient_horizon(train_segment, params, torch.zeros(2, 5), x, y, max_lag=20)
    >>> horizon.mean().shape, 0 < horizon.decay < 1, horizon.suggest_k2(0.1) > 1
    (torch.Size([20]), True, True)
    """
    check_made(train_segment)
    data = DataLayout(train_segment, None)
    chunk = Chunk(x, y, reset, mask)
    max_lag = _check_max_lag(max_lag, data.axes(x).length(chunk), train_segment.context)
    with torch.no_grad():
        plan, groups = train_segment.plan(params, state, x, y, reset=reset, mask=mask)
        if not plan.loops.trained_carries:
            raise ValueError("state: the loss depends on no leaf of it: no gradient reaches back.")
        first_loss = max(max_lag, train_segment.context)
        row_axes = _row_axes(data, chunk, plan)
        reaches = _powers_of_two(max_lag + 1)
        with without_autocast(plan.signature.autocast):
            norms = norms_by_lag(plan, groups, first_loss, max_lag, row_axes)
            gradients = gradients_by_reach(plan, groups, reaches)
    full_norm = _norm(gradients[-1])
    if not (math.isfinite(full_norm) and all(leaf.isfinite().all() for leaf in norms.values())):
        raise ValueError(
            "params, state, x, y: a gradient of the loss is not finite, so its norms say nothing. "
            "Look at out and loss of the segment first."
        )
    reached, bias = {}, {}
    for k2, gradient in zip(reaches, gradients, strict=True):
        distance = _distance(gradient, gradients[-1])
        reached[k2] = _norm(gradient)
        bias[k2] = distance / full_norm if distance else 0.0
    horizon = GradientHorizon(norms, reached, bias, _gain=0.0)
    return replace(horizon, _gain=_largest_gain(horizon.mean().double(), reaches, gradients))


def _largest_gain(mean: Tensor, reaches: list[int], gradients: list[list[Tensor]]) -> float:
    """The largest ratio of what the lags between two reaches add to the gradient to their norms."""
    gain = 0.0
    for i in range(1, len(reaches)):
        norms = float(mean[reaches[i - 1] - 1 : reaches[i] - 1].sum())
        added = _distance(gradients[i], gradients[i - 1])
        gain = max(gain, added / norms if norms else 0.0)
    return gain


def _row_axes(data: DataLayout, chunk: Chunk, plan: Plan) -> list[int] | None:
    """The batch axis of each state leaf; None for data without a batch.

    Also for a state of which all rows share a part: the norms of that have no rows.
    """
    leaves = [torch.empty(leaf.shape, device="meta") for leaf in plan.signature.state]
    axes = [data.row_axis(leaf) for leaf in leaves]
    are_shared = [leaf.dim() <= axis for leaf, axis in zip(leaves, axes, strict=True)]
    return None if data.rows(chunk, leaves) is None or any(are_shared) else axes


def _check_max_lag(max_lag: int | None, steps: int, context: int) -> int:
    max_lag = max(1, steps // 2) if max_lag is None else check_int("max_lag", max_lag, 1)
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
    norms = [
        torch.linalg.vector_norm(gradient).double()
        for gradient in gradients
        if differentiable(gradient)
    ]
    return float(torch.stack(norms).norm()) if norms else 0.0
