"""What ``train_segment`` means, in eager torch: a plain loop with autograd.

This is the oracle of the tests and the eager baseline of the bench. It shares with
the compiler only the reading of ``step``, the layout of the data, the choice by rows, and the
averaging of a loss per step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._checks import check_initial_state, check_int, check_time_dim
from .._trees import (
    Tree,
    differentiable,
    in_order_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from .as_step import as_step
from .layout import Layout, where_rows
from .loss import Loss, segment_loss
from .output import SegmentOutput
from .step import Step, StepFunction, start_of


@torch.inference_mode(False)
@torch.enable_grad()
def reference_segment(
    step: nn.Module | StepFunction | Step,
    loss: Loss,
    params: Tree,
    state: Tree,
    x: Tree,
    y: Tree,
    *,
    reset: Tensor | None = None,
    mask: Tensor | None = None,
    time_dim: int | None = None,
    initial_state: Tree | Callable[[Tree], Tree] | None = None,
    context: int = 0,
) -> SegmentOutput:
    """reference_segment : params, state, x[K, ...], y[K, ...] -> SegmentOutput

    The eager loop that defines ``train_segment``. Arguments as there and for
    :func:`make_train_segment`. Any step that runs in eager torch runs here; nothing is compiled.

    Raises TypeError or ValueError for an option that is invalid and for a step that is none. A
    state that a step returns in another structure, dtype or shape than it was given, which
    ``make_train_segment`` refuses, is carried on as it is.

    >>> cell, x, h = nn.GRUCell(3, 5), torch.randn(7, 2, 3), torch.zeros(2, 5)
    >>> loss = lambda out, y: (out - y).square().mean()
    >>> params, y = dict(cell.named_parameters()), torch.ones(7, 2, 5)
    >>> result = reference_segment(cell, loss, params, h, x, y)
    >>> result.state.shape
    torch.Size([2, 5])
    """
    check_time_dim(time_dim)
    check_initial_state(initial_state)
    context = check_int("context", context, 0)
    step = as_step(step)
    params, state, x, y, reset, mask = map(_usable, (params, state, x, y, reset, mask))
    layout = Layout.of(step, time_dim, x)
    x, y = layout.time_first(x), layout.time_first(y)
    steps = tree_leaves(x)[0].shape[0]
    if steps == 0:
        raise ValueError("x: has 0 steps; a segment needs at least one. Skip an empty segment.")
    reset_t, mask_t = (None if f is None else layout.flags_first(f) for f in (reset, mask))

    leaves, spec = tree_flatten(params)
    trained = [i for i, p in enumerate(leaves) if differentiable(p)]
    leaves = [p.detach().requires_grad_(i in trained) for i, p in enumerate(leaves)]
    params = tree_unflatten(leaves, spec)
    buffers = _usable(step.buffers())

    initial = initial_state(params) if callable(initial_state) else _usable(initial_state)
    if state is None:  # the gradient flows into a start that is learned
        state = start_of(step, initial, params, tree_map(lambda leaf: leaf[0], x))
    else:
        state = tree_map(torch.Tensor.detach, state)
    outs = []
    for t in range(steps):
        x_t = tree_map(lambda leaf, t=t: leaf[t], x)
        if reset_t is not None:
            start = initial if initial is not None else tree_map(torch.zeros_like, state)
            start = in_order_of(state, start)
            state = where_rows(reset_t[t], start, state, step.row_axis)
        out_t, after = step.apply(params, buffers, x_t, state)
        after = in_order_of(state, after)
        if mask_t is not None:
            after = where_rows(mask_t[t], after, state, step.row_axis)
        outs.append(out_t)
        state = after

    out = tree_map(lambda *steps: torch.stack(steps), *outs)
    value = segment_loss(
        loss, layout.time_back(out), layout.time_back(y), mask, layout.time_dim, context
    )
    wanted = [leaves[i] for i in trained]
    grads = list(map(torch.zeros_like, leaves))
    if value.requires_grad:
        # What a step checkpoints (torch.utils.checkpoint) runs again with the module's tensors.
        found = step.holding(
            params, buffers, lambda: torch.autograd.grad(value, wanted, allow_unused=True)
        )
        for i, grad in zip(trained, found, strict=True):
            grads[i] = grads[i] if grad is None else grad
    return SegmentOutput(
        tree_unflatten([g.detach() for g in grads], spec),
        tree_map(torch.Tensor.detach, state),
        value.detach(),
        tree_map(torch.Tensor.detach, layout.time_back(out)),
    )


def _usable(tree: Tree) -> Tree:
    """The tree, with copies of tensors of inference mode, which autograd does not take."""
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) and t.is_inference() else t, tree)
