"""Functions of torch that cannot be traced as they are, composed of ones that can be.

Some look at values to check them, some read a number out of a tensor, some have no rule for vmap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._straight_through import with_gradient_of
from .._trees import tree_map
from .detached_writes import DATA, Hidden, written
from .rnn import RECURRENT
from .signature import differentiable


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Any = None, max_norm: Any = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean",
    sparse: bool = False, per_sample_weights: Any = None, include_last_offset: bool = False,
    padding_idx: Any = None,
) -> Any:  # fmt: skip
    """A bag for each row of ``input``; of bags of unequal lengths the shapes depend on values."""
    if input.dim() != 2 or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    found = F.embedding(input, weight)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    counts = torch.ones_like(input) if padding_idx is None else (input != padding_idx).long()
    if mode == "max":
        there = counts.bool().unsqueeze(-1)
        largest = found.masked_fill(~there, -math.inf).amax(1)
        return torch.where(there.any(1), largest, torch.zeros_like(largest))
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    total = (found * counts.unsqueeze(-1)).sum(1)
    return total if mode == "sum" else total / counts.sum(1, keepdim=True).clamp(min=1)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    """Without the look at whether a variance is negative."""
    var = torch.as_tensor(var, dtype=input.dtype, device=input.device)
    if var.dim() and var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    bounded = with_gradient_of(var.clamp(min=eps), var)  # it passes, as in torch
    loss = 0.5 * (bounded.log() + (input - target).square() / bounded)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _cov(input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Without the look at whether weights that were not given are sound."""
    if input.dim() > 2 or fweights is not None or aweights is not None:
        return NotImplemented
    x = input.reshape(1, -1) if input.dim() < 2 else input
    apart = x - x.mean(1, keepdim=True)
    return (apart @ apart.mH / max(x.shape[1] - correction, 0)).squeeze()


def _hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """torch has no meta function for the gradient of this one, nor of the next."""
    return torch.where((input >= -lambd) & (input <= lambd), 0.0, input)


def _softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    small = torch.where(input < -lambd, input + lambd, input * 0)
    return torch.where(input > lambd, input - lambd, small)


def _complex(real: Tensor, imag: Tensor) -> Tensor:
    """torch's own has strides that Inductor reads as numbers, which fixes K."""
    return torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imag), -1))


def _polar(abs: Tensor, angle: Tensor) -> Tensor:
    # Of a negative one torch's gradient has the other sign.
    abs = with_gradient_of(abs, abs, abs.detach().sign())
    return _complex(abs * angle.cos(), abs * angle.sin())


def _is_place(entry: Any) -> bool:
    """Whether it is a tensor that stands for one index, as the place in a ring buffer."""
    if not isinstance(entry, Tensor) or entry.dim() or entry.dtype is torch.bool:
        return False
    return not (entry.is_floating_point() or entry.is_complex())


def _place_in(x: Tensor, index: Any) -> tuple[list[Any], int] | None:
    """The entries of an index with one place in it, and the axis of that; None for another."""
    entries = list(index) if isinstance(index, tuple) else [index]
    places = [i for i, entry in enumerate(entries) if _is_place(entry)]
    others = [entry for i, entry in enumerate(entries) if i not in places]
    plain = all(
        entry is ... or (isinstance(entry, (slice, int)) and not isinstance(entry, bool))
        for entry in others
    )
    if len(places) != 1 or not plain:
        return None
    dots = [i for i, entry in enumerate(entries) if entry is ...]
    if dots:
        (at,) = dots
        entries[at : at + 1] = [slice(None)] * (x.dim() - len(entries) + 1)
        places = [places[0] + (x.dim() - len(others) - 1 if places[0] > at else 0)]
    return entries, places[0]


def _rows_at(x: Tensor, dim: int, place: Tensor) -> Tensor:
    """``place`` as the index of one row, which may count from the end."""
    place = place.reshape(1).long()
    return torch.where(place < 0, place + x.shape[dim], place)


def _getitem(x: Tensor, index: Any) -> Any:
    """``x[:, t]`` reads the number t in Python if t is a tensor of one number."""
    found = _place_in(x, index)
    if found is None:
        return NotImplemented
    entries, dim = found
    row = x.index_select(dim, _rows_at(x, dim, entries[dim]))
    entries[dim] = 0
    return row[tuple(entries)]


def _setitem(x: Tensor, index: Any, value: Any) -> Any:
    """``x[:, t] = value``, see :func:`_getitem`."""
    found = _place_in(x, index)
    if found is None:
        return NotImplemented
    entries, dim = found
    rows = _rows_at(x, dim, entries[dim])
    entries[dim] = 0
    row = x.index_select(dim, rows)
    row[tuple(entries)] = value
    x.index_copy_(dim, rows, row)
    return x


_COMPOSED: dict[Any, Callable[..., Any]] = {
    **RECURRENT,
    F.embedding_bag: _embedding_bag,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.hardshrink: _hardshrink,
    torch.hardshrink: _hardshrink,
    Tensor.hardshrink: _hardshrink,
    F.softshrink: _softshrink,
    torch.complex: _complex,
    torch.polar: _polar,
    torch.cov: _cov,
    Tensor.cov: _cov,
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
}


# What reads a tensor outside of torch, where a fake one would give a wrong value silently.
_LEAVES_TORCH = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__}


_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class Composed(TorchFunctionMode):
    """Within it, these functions, torch's recurrent layers and dropout run as plain operations.

    ``argument`` says what runs, "step" or "loss".
    """

    def __init__(self, argument: str) -> None:
        super().__init__()
        self.argument, self.hidden = argument, Hidden(argument)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LEAVES_TORCH:
            raise RuntimeError(f"{func.__name__}() of a tracing tensor")
        if func is Tensor.register_hook:
            raise RuntimeError(
                f"{self.argument}: Tensor.register_hook cannot be compiled, and would be ignored. "
                "Scale the gradient in the forward (x * s + x.detach() * (1 - s)), or change the "
                "gradients that the segment returns."
            )
        if func == _REQUIRES_GRAD:  # a fake tensor has none; in the loop that is meant it would
            return torch.is_grad_enabled() and differentiable(args[0])
        if func is Tensor.requires_grad_:
            # Which torch.func.grad asks for, and may: else nothing depends on it.
            with suppress(RuntimeError):
                func(*args, **kwargs)
            return args[0]
        target = written(func, args, kwargs)
        if target is not None:
            return self.hidden.write(self._run, func, target, args, kwargs)
        result = self._run(func, args, kwargs)
        # What the step keeps from autograd must stay constant when its graph is differentiated.
        if func == DATA or not torch.is_grad_enabled():
            result = tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, result)
        self.hidden.note(self._run, func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result, composed = NotImplemented, _COMPOSED.get(func)
        if composed is not None:
            with self:  # the mode is off inside this method; a layer calls dropout
                result = composed(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result
