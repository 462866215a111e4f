"""``make_train_segment``: what the caller asks for, checked, as a :class:`TrainSegment`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from .._checks import (
    check_bool,
    check_function,
    check_initial_state,
    check_int,
    check_one_of,
    check_time_dim,
)
from .._compat.functions import is_left_to_python
from .._trees import Tree
from ..backends import NAMES
from ..compiler.signature import Recipe
from ..contract.as_step import as_step
from ..contract.layout import InDims
from ..contract.loss import Loss, of_first
from ..contract.step import Step, StepFunction
from .train_segment import TrainSegment


def make_train_segment(
    step: nn.Module | StepFunction | Step,
    loss: Loss,
    *,
    backend: str = "auto",
    time_dim: int | None = None,
    initial_state: Tree | Callable[[Tree], Tree] | None = None,
    recompute: bool = False,
    in_dims: InDims | None = None,
    context: int = 0,
    taps: bool | Sequence[str] = False,
    window: int | None = None,
    stride: int = 1,
    reuse_output: bool = False,
) -> TrainSegment:
    """make_train_segment : step, loss -> TrainSegment

    Makes ``train_segment(params, state, x, y)``, which runs K steps forward, the truncated
    backward, and returns ``SegmentOutput(grads, state, loss, out)``. It means this loop, and is
    compiled from it::

        state = detach(state)
        for t in range(K):
            state = where(reset[t], initial_state, state)
            out[t], new = step(params, x[t], state)
            state = where(mask[t], new, state)             # padding: the state stays
        value = loss(out, y)                               # with a mask: its mean over valid steps
        grads = grad(value, params); state = detach(state)

    ``step``
        A module called ``module(x_t, state) -> (out_t, state)``; one of torch's recurrent cells
        or layers; a function ``step(params, x_t, state) -> (out_t, state)``; or what
        :func:`as_step` makes of a module that takes whole chunks.
    ``loss``
        ``loss(out, y)`` sees the whole segment, ``[K, ...]``, and returns a scalar or one value
        per step and row, ``[K]`` or ``[K, B]``, which is averaged over the valid ones. One that
        cannot be traced, such as ``ctc_loss``, runs as it is written between the compiled loops,
        with a warning; without one after ``torch.compiler.disable(loss)``.
    ``backend``
        "fused" (generated kernels for the loops, C++ on a CPU and Triton on a GPU, Inductor around
        them), "compile" (Inductor alone), "cudagraph" (each loop's step compiled once; a segment
        as one CUDA graph on a GPU, as those of "fused" are), "eager" (operation by operation), or
        "auto": "fused", with one warning and "eager" (on a GPU first "cudagraph") if that fails.
    ``time_dim``
        The axis of time in ``x``, ``y``, ``out``, and in a ``reset`` or ``mask`` of ``[K, B]``.
        None: 1 for batched data of a ``batch_first`` module, else 0.
    ``initial_state``
        Where a reset restarts, and what ``state=None`` means: zeros (None), a state, or a
        function of ``params``, whose gradient then flows.
    ``recompute``
        Keep only the carried state of each step for the backward, and compute the rest again:
        less memory, about a third more work.
    ``in_dims``
        ``(None, state, x, y)``: the batch axes of a step and loss that were written for one
        sequence. The parameters are shared; the result is the mean over the sequences, and no
        gradient per sequence is ever made. ``reset`` and ``mask`` have the axis of ``x``.
    ``context``
        How many steps at the start of a segment have no loss. Their gradient flows: they give the
        steps after them something to reach back to.
    ``taps``
        Names of tensors inside the step (True: all) whose value and gradient at every step come
        back as ``taps``, the fifth part of a :class:`TappedOutput`: what the step marks with
        :func:`tap`, and of torch's recurrent layers and cells the states and what goes into each
        gate: ``h``, ``c`` and ``i``, ``f``, ``g``, ``o`` of an LSTM, ``h`` and ``r``, ``z``, ``n``
        of a GRU, ``h`` and ``a`` of a plain layer, as in ``cells.0.h`` or ``lstm.l1.f``.
    ``window``, ``stride``
        A sliding window in the gradient: each step's loss reaches back ``window`` steps, itself
        included, whereas in a plain segment the first steps' reach back less far than the last
        ones'. There is one forward and one reverse loop, in which all windows run side by side.
        With a ``stride`` above 1 so many steps share a window, which ends with the last of them.
    ``reuse_output``
        On a GPU, where a segment is a CUDA graph, a call may overwrite what the one before it with
        the same number of steps returned: one copy less of everything, but memory that no other
        graph shares. Elsewhere it changes nothing.

    Truncated backpropagation through time: Williams and Peng, 1990. The loops are split as in
    loop distribution: Allen and Kennedy, 1987.

    Raises TypeError or ValueError for invalid arguments; ``train_segment`` raises
    TypeError for structure and dtype, ValueError for shapes and lengths, RuntimeError for a step
    that cannot be traced.

    >>> import torch
    >>> def step(params, x_t, h):
    ...     h = torch.tanh(x_t @ params["w"] + h @ params["u"])
    ...     return h, h
    >>> params = {"w": torch.randn(3, 5), "u": torch.randn(5, 5)}
    >>> train_segment = make_train_segment(step, lambda out, y: (out - y).square().mean())
    >>> x, y, h = torch.randn(7, 2, 3), torch.randn(7, 2, 5), torch.zeros(2, 5)
    >>> grads, h, loss, out = train_segment(params, h, x, y)
    >>> grads["u"].shape, h.shape, loss.shape, out.shape
    (torch.Size([5, 5]), torch.Size([2, 5]), torch.Size([]), torch.Size([7, 2, 5]))
    """
    check_one_of("backend", backend, NAMES)
    check_function("loss", loss, "(out, y)")
    check_time_dim(time_dim)
    if in_dims is not None:
        _check_in_dims(in_dims)
    check_initial_state(initial_state)
    check_bool("recompute", recompute)
    check_bool("reuse_output", reuse_output)
    context = check_int("context", context, 0)
    window, stride = _window(window, stride)
    step, tapped, traces_loss = as_step(step), taps is not False, not is_left_to_python(loss)
    if tapped and window is not None:
        raise ValueError(
            "taps, window: a tensor has a gradient in each of the windows that hold it. Ask for "
            "one of the two."
        )
    if tapped:
        step, loss = step.with_taps(_names(taps)), of_first(loss)
    recipe = Recipe(
        step, loss, initial_state, recompute, context, window, stride, time_dim=time_dim,
        in_dims=in_dims, traces_loss=traces_loss,
    )  # fmt: skip
    return TrainSegment(recipe, backend, tapped=tapped, reuse_output=reuse_output)


def _window(window: int | None, stride: int) -> tuple[int | None, int]:
    """Both, checked."""
    window = None if window is None else check_int("window", window, 1)
    stride = check_int("stride", stride, 1)
    if window is None and stride != 1:
        raise ValueError(f"stride: {stride} has no meaning without window=, the reach of a loss.")
    if window is not None and stride > window:
        raise ValueError(
            f"stride: {stride} is more than window={window}, so some steps would be in no window."
        )
    return window, stride


def _names(taps: bool | Sequence[str]) -> list[str] | None:
    if taps is True:
        return None
    is_text = isinstance(taps, str)
    if is_text or not isinstance(taps, Collection) or not all(isinstance(n, str) for n in taps):
        raise TypeError(f"taps: expected True or a list of names, found {taps!r}.")
    if not taps:
        raise ValueError("taps: expected at least one name, found none. taps=True takes all.")
    return list(taps)


def _check_in_dims(in_dims: Any) -> None:
    if not (isinstance(in_dims, tuple) and len(in_dims) == 4):
        raise TypeError(
            f"in_dims: expected (None, state, x, y), the batch axis of each, found {in_dims!r}."
        )
    if in_dims[0] is not None:
        raise ValueError(
            f"in_dims: the parameters are shared, so in_dims[0] is None, found {in_dims[0]!r}. For "
            "a model per row use torch.func.vmap(train_segment, in_dims=(0, ...))."
        )
    if in_dims[2] is None:
        raise ValueError("in_dims: x must have a batch axis, found None for it.")
    for name, axis in zip(("state", "x", "y"), in_dims[1:], strict=True):
        if isinstance(axis, bool) or not isinstance(axis, int | None):
            raise TypeError(
                f"in_dims: expected an axis for {name}, the same in each of its leaves, or None, "
                f"found {axis!r}."
            )
        if axis is not None and axis < 0:
            raise ValueError(
                f"in_dims: expected an axis of {name} counted from the front, since its leaves may "
                f"have different numbers of axes, found {axis}."
            )


def check_made(train_segment: Any) -> None:
    """Raises TypeError if it is something else than :func:`make_train_segment` returns."""
    if not isinstance(train_segment, TrainSegment):
        raise TypeError(
            "train_segment: expected what make_train_segment returns, found "
            f"{type(train_segment).__name__}."
        )
