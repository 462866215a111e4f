"""Random operations without a correct ``vmap`` rule, written with ``rand``, ``randn``, ``randint``.

Applied while a step is traced, before it is differentiated. Noise that is written in place is one
of them: the same numbers would be drawn for all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..graphs import aten


def _drawn(draw: Callable[..., Tensor], like: Tensor, generator: Any) -> Tensor:
    """Random numbers in the shape of a tensor.

    The operation that takes no generator is called where none is given: it holds for any K.
    """
    options = {} if generator is None else {"generator": generator}
    return draw(like.shape, dtype=like.dtype, device=like.device, **options)


def _normal_like(x: Tensor, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    return _drawn(torch.randn, x, generator) * std + mean


def _normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    """With a mean, a standard deviation or both as tensors, which get no gradient from it."""
    like = torch.broadcast_tensors(*(arg for arg in (mean, std) if isinstance(arg, Tensor)))[0]
    return _normal_like(like, mean, std, generator=generator).detach()


def _normal_of_size(
    mean: float,
    std: float,
    size: Sequence[int],
    *,
    generator: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    like = torch.empty(size, dtype=dtype, device=device)
    return _normal_like(like, mean, std, generator=generator)


def _uniform(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Tensor:
    return _drawn(torch.rand, x, generator) * (high - low) + low


def _random(x: Tensor, *bounds: int | None, generator: Any = None) -> Tensor:
    """``x.random_(high)``, ``x.random_(low, high)`` or ``x.random_()``.

    The last draws integers up to the largest that the dtype can tell from its neighbours.
    """
    low = bounds[0] if len(bounds) == 2 else 0
    high = bounds[-1] if bounds else None
    if high is None and x.dtype.is_floating_point:
        high = round(2 / torch.finfo(x.dtype).eps) + 1
    elif high is None and x.dtype is torch.bool:
        high = 2
    elif high is None:  # exclusive, and itself an int64
        high = min(torch.iinfo(x.dtype).max + 1, torch.iinfo(torch.int64).max)
    return _drawn(partial(torch.randint, low, high), x, generator)


def _exponential(x: Tensor, rate: Any = 1.0, *, generator: Any = None) -> Tensor:
    """Above zero, as torch's own: its logarithm is a Gumbel variable."""
    noise = -torch.log1p(-_drawn(torch.rand, x, generator))
    return noise.clamp(min=torch.finfo(x.dtype).eps / 2) / rate


def _log_normal(x: Tensor, mean: Any = 1.0, std: Any = 2.0, *, generator: Any = None) -> Tensor:
    return _normal_like(x, mean, std, generator=generator).exp()


def _cauchy(x: Tensor, median: Any = 0.0, sigma: Any = 1.0, *, generator: Any = None) -> Tensor:
    return median + sigma * torch.tan(torch.pi * (_drawn(torch.rand, x, generator) - 0.5))


def _geometric(x: Tensor, p: float, *, generator: Any = None) -> Tensor:
    """The number of the first success among trials that each succeed with probability ``p``."""
    dtype = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
    trials = _exponential(x.to(dtype), -math.log1p(-p), generator=generator).ceil()
    return trials.clamp(min=1).to(x.dtype)


def _bernoulli(x: Tensor, p: Tensor, *, generator: Any = None) -> Tensor:
    """``x.bernoulli_(p)`` with probabilities ``p`` in a dtype of their own."""
    noise = _drawn(torch.rand, p.expand(x.shape), generator)
    return (noise < p).to(x.dtype)


def _multinomial(
    p: Tensor, samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """The categories with the largest ``p / exponential``, as torch draws them."""
    if replacement and samples > 1:
        p = p.unsqueeze(-2).expand(*p.shape[:-1], samples, p.shape[-1])
        return (p / _exponential(p, generator=generator)).argmax(-1)
    scores = p / _exponential(p, generator=generator)
    return scores.argmax(-1, keepdim=True) if samples == 1 else scores.topk(samples).indices


RANDOM_OPS: dict[Any, Callable[..., Any]] = {
    aten.normal_functional.default: _normal_like,
    aten.normal.float_float: _normal_of_size,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.uniform.default: _uniform,
    aten.exponential.default: _exponential,
    aten.log_normal.default: _log_normal,
    aten.cauchy.default: _cauchy,
    aten.geometric.default: _geometric,
    aten.bernoulli.Tensor: _bernoulli,
    aten.multinomial.default: _multinomial,
    aten.random.default: _random,
    aten.random.to: _random,
    getattr(aten.random, "from"): _random,
}
