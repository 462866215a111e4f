"""Whether a module that takes chunks computes each step by itself, as a segment calls it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._messages import first_line
from .._trees import Tree, differentiable, tree_leaves, tree_map
from ..contract.step import Step

_MOST_STEPS = 16
_TF32_ROUNDING = 2**-8  # of a few layers
# What torch replaces tensors in while a module runs with others.
_OF_A_MODULE = {"_parameters", "_buffers", "_modules", "_flat_weights"}


def check_steps_are_alone(step: Step, params: Tree, state: Tree, x: Tree) -> bool:
    """Whether that was seen; it is not in a single step, nor in many of one token. ``x[K, ...]``.

    Runs the first few steps at once and one after the other, on a copy of the module in eval mode.
    Of a module that fails for one step too, or draws random numbers, nothing can be said here.

    Raises ValueError if it fails for the steps at once, or gives other numbers.
    """
    if step.has_gradient_factors:
        x, _ = x
    step = step.wrapped or step
    if step.module is None or step.call_chunk is None:
        return True
    x = tree_map(lambda leaf: leaf.detach()[:_MOST_STEPS], x)
    steps = tree_leaves(x)[0].shape[0]
    if steps < 2:
        return False
    failure: Exception | None = None
    devices = {leaf.device for leaf in tree_leaves(x) if leaf.device.type == "cuda"}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), _without_cudnn():
            x = _varied(x)
            copied = replace(step, module=_copy_of(step.module).eval())
            one_by_one = _one_by_one(copied, params, state, x, steps)
            try:
                at_once, again = (_at_once(copied, params, state, x) for _ in range(2))
            except torch.OutOfMemoryError:
                return True
            except Exception as error:
                failure = error
            else:
                is_random, off = _off(again, at_once) > 0, _off(at_once, one_by_one)
    except Exception:
        return True
    if failure is not None:
        raise ValueError(
            f"step: {step.name} takes {steps} steps one after the other, but fails for them at "
            f"once ({type(failure).__name__}: {first_line(failure)}). Layers that have time on "
            "another axis take the rows of a step for steps: give them and the segment the same "
            "one (batch_first of the layers; time_dim, or batch_first of as_step)."
        ) from failure
    if off > 1 and not is_random:
        raise ValueError(
            f"step: {step.name} gives other numbers for {steps} steps at once than for one after "
            "the other, so a layer of it mixes steps (a convolution or attention over time, a "
            "norm over the chunk). A segment calls it with one step at a time. Take that layer out "
            "of it, and apply it to the data before or to the outputs in the loss."
        )
    return _is_varied(x)


def _is_varied(x: Tree) -> bool:
    return any(bool((leaf != leaf[:1]).any()) for leaf in tree_leaves(x))


def _varied(x: Tree) -> Tree:
    """In steps that are all the same, such as silence, layers that mix steps would not show."""
    if _is_varied(x):
        return x
    return tree_map(
        lambda leaf: leaf + torch.randn_like(leaf) if leaf.is_floating_point() else leaf, x
    )


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """For cuDNN a recurrent layer moves the caller's parameters into memory of its own."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def _copy_of(root: nn.Module) -> nn.Module:
    """The module and its submodules anew, with the same tensors and whatever else they hold."""
    held: list[Any] = [*root.parameters(), *root.buffers()]
    for module in root.modules():
        held += [value for name, value in vars(module).items() if name not in _OF_A_MODULE]
    # A forward may append to a list: to a list of the copy.
    containers = (list, dict, set)
    memo = {id(v): copy.copy(v) if isinstance(v, containers) else v for v in held}
    return copy.deepcopy(root, memo)


def _at_once(step: Step, params: Tree, state: Tree, x: Tree) -> list[Tensor]:
    call, module, state = step.call_chunk, step.module, tree_map(torch.clone, state)
    assert call is not None
    assert module is not None
    return tree_leaves(step.holding(params, step.buffers(), lambda: call(module, x, state)))


def _one_by_one(step: Step, params: Tree, state: Tree, x: Tree, steps: int) -> list[Tensor]:
    outs, state = [], tree_map(torch.clone, state)
    for t in range(steps):
        x_t = tree_map(lambda leaf, t=t: leaf[t], x)
        out, state = step.apply(params, step.buffers(), x_t, state)
        outs.append(out)
    return tree_leaves((tree_map(lambda *leaves: torch.stack(leaves), *outs), state))


def _off(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, where 1 is more than rounding explains; inf if one only is NaN."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if differentiable(b) and b.numel():
            rounding = torch.finfo(b.dtype).eps ** 0.5
            # Under autocast a layer may return in float32 what it has computed in 16 bits.
            if torch.is_autocast_enabled(b.device.type):
                narrow = torch.get_autocast_dtype(b.device.type)
                rounding = max(rounding, torch.finfo(narrow).eps ** 0.5)
            # Products of one step and of many may be of other precisions.
            if b.is_cuda and b.dtype == torch.float32:
                rounding = max(rounding, _TF32_ROUNDING)
            allowed = rounding * (1 + b.abs().nan_to_num(0.0).max())
            # max() of Python would pass over a NaN, as the spread of a single step is one.
            same = (a == b) | (a.isnan() & b.isnan())
            gap = (a - b).abs().masked_fill(same, 0.0).nan_to_num(math.inf)
            worst = max(worst, float((gap / allowed).max()))
    return worst
