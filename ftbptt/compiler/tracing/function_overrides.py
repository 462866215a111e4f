"""Functions of torch that cannot be traced, replaced by compositions of functions that can.

Some read values to validate them, some read a number out of a tensor, some have no vmap rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._compat.functions import as_custom_operator
from ..._compat.running import is_from_outside, may_have_tangent
from ..._compat.tracing import UNTRACEABLE
from ..._trees import differentiable, tree_leaves, tree_map
from ..straight_through import with_gradient_of
from .custom_gradient import apply_operator
from .detached_writes import DATA, DETACH, HiddenAliases, written_outside, written_tensor
from .embedding_bag import embedding, embedding_bag
from .gradient_flags import GradientFlags
from .rnn import RECURRENT


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    """Without the check for negative variances."""
    var = torch.as_tensor(var, dtype=input.dtype, device=input.device)
    if var.dim() and var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    bounded = with_gradient_of(var.clamp(min=eps), var)  # as in torch, the clamp passes it on
    loss = 0.5 * (bounded.log() + (input - target).square() / bounded)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduced(loss, reduction)


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    """torch's writes into the norms, which functionalize refuses for those of a constant."""
    if x1.dtype != x2.dtype or not x1.is_floating_point():
        return NotImplemented
    parts = torch.broadcast_tensors(x1, x2)
    norms = [torch.linalg.vector_norm(part, dim=dim, keepdim=True) for part in parts]
    # As in torch, the bound passes the gradient on.
    bounded = [with_gradient_of(norm.clamp(min=eps), norm) for norm in norms]
    return (parts[0] / bounded[0] * (parts[1] / bounded[1])).sum(dim)


def _multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    """torch's decomposition (2.11 to 2.13) takes other classes for targets."""
    if size_average is not None or reduce is not None:
        return NotImplemented
    is_listed = (target < 0).cumsum(-1) == 0  # the classes before the first that is negative
    listed = target.clamp(min=0)
    is_target = torch.zeros_like(target).scatter_add(-1, listed, is_listed.long()) > 0
    margins = (1 - input.gather(-1, listed).unsqueeze(-1) + input.unsqueeze(-2)).relu()
    counted = is_listed.unsqueeze(-1) & ~is_target.unsqueeze(-2)
    return _reduced(torch.where(counted, margins, 0.0).sum((-2, -1)) / input.shape[-1], reduction)


def _batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """In eval mode: torch's has no gradient by the statistics, which an ensemble has in params."""
    if training or running_mean is None or running_var is None:
        return NotImplemented
    shape = (1, -1) + (1,) * (input.dim() - 2)
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    result = (input - running_mean.reshape(shape)) * scale.reshape(shape)
    return (result if bias is None else result + bias.reshape(shape)).to(input.dtype)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _cov(input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Without the validation of weights, which also runs if there are none."""
    if input.dim() > 2 or fweights is not None or aweights is not None:
        return NotImplemented
    x = input.reshape(1, -1) if input.dim() < 2 else input
    centered = x - x.mean(1, keepdim=True)
    return (centered @ centered.mH / max(x.shape[1] - correction, 0)).squeeze()


def _corrcoef(input: Tensor) -> Any:
    """By the covariance above."""
    if input.dim() > 2 or input.is_complex():
        return NotImplemented
    covariance = _cov(input)
    if not covariance.dim():
        return covariance / covariance
    deviation = covariance.diagonal().sqrt()
    return (covariance / deviation[:, None] / deviation).clip(-1, 1)


def _hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """torch has no meta function for the gradients of hardshrink and softshrink."""
    return torch.where((input >= -lambd) & (input <= lambd), 0.0, input)


def _softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    small = torch.where(input < -lambd, input + lambd, input * 0)
    return torch.where(input > lambd, input - lambd, small)


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    """torch keeps the slopes for the gradient in memory that functionalize loses."""
    slope: Any = (lower + upper) / 2
    if training:
        drawn = torch.rand(input.shape, dtype=input.dtype, device=input.device)
        slope = drawn * (upper - lower) + lower
    result = torch.where(input > 0, input, input * slope)
    return input.copy_(result) if inplace else result


def _complex(real: Tensor, imag: Tensor) -> Tensor:
    """The strides of torch's result are read as numbers by Inductor, which fixes K."""
    return torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imag), -1))


def _polar(abs: Tensor, angle: Tensor) -> Tensor:
    # torch's gradient by a negative abs has the other sign.
    abs = with_gradient_of(abs, abs, abs.detach().sign())
    return _complex(abs * angle.cos(), abs * angle.sin())


def _is_position(entry: Any) -> bool:
    """Whether it is a tensor of one index, such as the position in a ring buffer."""
    if not isinstance(entry, Tensor) or entry.dim() or entry.dtype is torch.bool:
        return False
    return not differentiable(entry)


class _TensorIndex(NamedTuple):
    """An index like ``[:, t, 2:]`` with one tensor ``t``, which is ``entries[dim]``."""

    entries: list[Any]
    dim: int  # also the axis that it indexes: no ellipsis is left


def _as_tensor_index(x: Tensor, index: Any) -> _TensorIndex | None:
    """None if it is another kind of index."""
    entries = list(index) if isinstance(index, tuple) else [index]
    positions = [i for i, entry in enumerate(entries) if _is_position(entry)]
    others = [entry for i, entry in enumerate(entries) if i not in positions]
    plain = all(
        entry is ... or (isinstance(entry, (slice, int)) and not isinstance(entry, bool))
        for entry in others
    )
    if len(positions) != 1 or not plain:
        return None
    (dim,) = positions
    ellipses = [i for i, entry in enumerate(entries) if entry is ...]
    if ellipses:
        (ellipsis,) = ellipses
        added = x.dim() - len(entries)  # the axes that the ellipsis stands for, less one
        entries[ellipsis : ellipsis + 1] = [slice(None)] * (added + 1)
        dim += added if dim > ellipsis else 0
    return _TensorIndex(entries, dim)


def _row_numbers(x: Tensor, index: _TensorIndex) -> Tensor:
    """``[1]``: the position along its axis, counted from the start."""
    position = index.entries[index.dim].reshape(1).long()
    return torch.where(position < 0, position + x.shape[index.dim], position)


def _within_row(index: _TensorIndex) -> tuple[Any, ...]:
    """The same index into the one row that was selected, which keeps the axis."""
    return (*index.entries[: index.dim], 0, *index.entries[index.dim + 1 :])


def _getitem(x: Tensor, index: Any) -> Any:
    """``x[:, t]``, for which torch reads the number in Python if t is a tensor of one number."""
    tensor_index = _as_tensor_index(x, index)
    if tensor_index is None:
        return NotImplemented
    row = x.index_select(tensor_index.dim, _row_numbers(x, tensor_index))
    return row[_within_row(tensor_index)]


def _setitem(x: Tensor, index: Any, value: Any) -> Any:
    """``x[:, t] = value``, see :func:`_getitem`."""
    tensor_index = _as_tensor_index(x, index)
    if tensor_index is None:
        return NotImplemented
    numbers = _row_numbers(x, tensor_index)
    row = x.index_select(tensor_index.dim, numbers)
    row[_within_row(tensor_index)] = value
    x.index_copy_(tensor_index.dim, numbers, row)
    return x


def _grid_sample(
    x: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Any:
    """Not by cuDNN, whose operation has no rule for a batch; torch would choose it on a GPU."""
    if (x.dim(), mode, padding_mode, align_corners) != (4, "bilinear", "zeros", True):
        return NotImplemented
    return torch.ops.aten.grid_sampler_2d(x, grid, 0, 0, align_corners)


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = function(x, *args, **kwargs)
        if not torch.can_cast(result.dtype, x.dtype):  # copy_ would, without a word
            raise RuntimeError(f"result type {result.dtype} can't be cast to {x.dtype}")
        return x.copy_(result)

    return write


def _selu(input: Tensor, inplace: bool = False) -> Any:
    return input.copy_(torch.selu(input)) if inplace else NotImplemented


def _fill_diagonal(x: Tensor, fill_value: Any, wrap: bool = False) -> Any:
    if x.dim() != 2 or wrap:
        return NotImplemented
    x.diagonal().fill_(fill_value)
    return x


# Other names, mostly, of functions that write in place: functionalize has a rule for these only.
_WRITTEN = [
    "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "clip",
    "divide", "fix", "float_power", "greater", "greater_equal", "less", "less_equal", "multiply",
    "negative", "not_equal", "polygamma", "selu", "square", "subtract", "true_divide",
]  # fmt: skip

_COMPOSED: dict[Any, Callable[..., Any]] = {
    **{
        getattr(owner, f"{name}_"): _in_place(getattr(owner, name))
        for owner in (torch, Tensor)
        for name in _WRITTEN
        if hasattr(owner, f"{name}_")
    },
    F.selu: _selu,
    Tensor.fill_diagonal_: _fill_diagonal,
    **RECURRENT,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    F.batch_norm: _batch_norm,
    F.cosine_similarity: _cosine_similarity,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.multilabel_margin_loss: _multilabel_margin_loss,
    F.grid_sample: _grid_sample,
    F.hardshrink: _hardshrink,
    torch.hardshrink: _hardshrink,
    Tensor.hardshrink: _hardshrink,
    F.softshrink: _softshrink,
    F.rrelu: _rrelu,
    torch.rrelu: _rrelu,
    torch.complex: _complex,
    torch.polar: _polar,
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
}


# These hand a tensor's values to Python or NumPy: a fake tensor would give wrong ones silently.
_LEAVES_TORCH = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__}


_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class FunctionOverrides(TorchFunctionMode):
    """While active, the functions above and torch's recurrent layers run as plain operations.

    ``argument``: what runs, "step" or "loss", for errors. ``constants``: those of its arguments
    that require no gradient.
    """

    def __init__(self, argument: str, constants: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.argument, self.hidden = argument, HiddenAliases(argument)
        self._flags = GradientFlags(constants)
        self._refused: Exception | None = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is None and self._refused is not None:  # caught: only that branch was traced
            raise self._refused

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LEAVES_TORCH:
            raise self._refusal(RuntimeError(f"{func.__name__}() of a tracing tensor"))
        if func is Tensor.register_hook:
            raise self._refusal(
                RuntimeError(
                    f"{self.argument}: Tensor.register_hook cannot be compiled, and would be "
                    "ignored. Scale the gradient in the forward (x * s + x.detach() * (1 - s)), or "
                    "change the gradients that the segment returns."
                )
            )
        if func == _REQUIRES_GRAD:  # False for fake tensors, but not in the loop they stand for
            return bool(func(*args, **kwargs)) or self._flags.of(args[0])
        if func is Tensor.requires_grad_ and differentiable(args[0]):
            # It only matters to torch.func.grad, which may call it; elsewhere it fails.
            with suppress(RuntimeError):
                func(*args, **kwargs)
            self._flags.require(args[0])
            return args[0]
        target = written_tensor(func, args, kwargs)
        if target is not None:
            if is_from_outside(target):  # it would be written to now
                raise self._refusal(written_outside(self.argument))
            self._flags.note_write(target, (args, kwargs))
            return self.hidden.write(self._run, func, target, args, kwargs)
        self._forbid_sparse(args, kwargs)
        try:
            result = self._run(func, args, kwargs)
        except UNTRACEABLE as error:
            self._refusal(error)
            raise
        self._forbid_sparse(result)
        # What the step hides from autograd must be constant when its graph is differentiated.
        hides = func == DATA or not torch.is_grad_enabled()
        if hides:
            result = tree_map(lambda v: self._detached(v) if isinstance(v, Tensor) else v, result)
        self.hidden.note(self._run, func, args, kwargs, result)
        self._flags.note((args, kwargs), result, hides=hides or func in DETACH)
        return result

    def _refusal(self, error: Exception) -> Exception:
        """The error, which is raised again if the caller's code catches it."""
        self._refused = self._refused or error
        return error

    def _detached(self, value: Tensor) -> Tensor:
        if may_have_tangent(value):  # which no_grad leaves, but detach drops
            raise RuntimeError(
                f"{self.argument}: torch.func.jvp (jacfwd, hessian) around or inside of no_grad "
                "cannot be compiled. Call it without no_grad, and detach() its results, or what "
                "is to be constant inside."
            )
        return value.detach()

    def _forbid_sparse(self, *values: Any) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
                raise self._refusal(
                    RuntimeError(
                        f"{self.argument}: computes with a tensor of layout {leaf.layout}, which "
                        "cannot be compiled. Take a dense one (value.to_dense(), before the first "
                        "call); a weight keeps its zeros as weight * mask."
                    )
                )

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise self._refusal(
                TypeError(
                    f"{self.argument}: draws from a torch.Generator, which a graph cannot hold. "
                    "Draw from torch's default generator, which torch.manual_seed sets."
                )
            )
        result, composed = NotImplemented, _COMPOSED.get(func)
        if composed is not None:
            with self:  # the mode is off inside this method; a layer calls dropout
                result = composed(*args, **kwargs)
        if result is NotImplemented and (operator := as_custom_operator(func)):
            result = apply_operator(func, operator, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result
