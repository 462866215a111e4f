"""The oracle: what a segment returns, compared leaf by leaf with the eager loop in float64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves

from ftbptt import SegmentOutput, reference_segment

from .cells.problems import Problem

Tree = Any
TOLERANCE = 1e-10  # relative, in float64
SMALLEST_SCALE = 1e-3  # leaves of smaller numbers are compared as if they were this large
TIMES_EAGER = 3.0  # in lower precision: error from float64, against that of the eager loop


def reference(problem: Problem, steps: int, **options: Any) -> SegmentOutput:
    """The eager loop on the problem, in the problem's own dtype."""
    options.setdefault("time_dim", problem.time_dim or None)
    with warnings.catch_warnings():
        # torch says so of a float32 nn.LSTM(proj_size=...), in eager mode too.
        warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
        # cuDNN's, of parameters that are given one by one.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous")
        return reference_segment(problem.step, problem.loss, *problem.data(steps), **options)


def check(
    train_segment: Callable[..., SegmentOutput], problem: Problem, steps: int, **options: Any
) -> SegmentOutput:
    """Runs both, and asserts all that the contract says of the result. float64.

    ``reset`` and ``mask`` go to both, ``initial_state`` and ``time_dim`` to the reference alone:
    the segment was made with them.
    """
    rows = {name: options[name] for name in ("reset", "mask") if name in options}
    given = problem.data(steps)
    with unchanged(*given, *rows.values()):
        found = train_segment(*given, **rows)
    assert_form(found, problem.params, problem.state)
    assert_close(found, reference(problem, steps, **options))
    return found


def check_low_precision(
    train_segment: Callable[..., SegmentOutput], problem: Problem, *steps: int, **options: Any
) -> None:
    """The segment errs from float64 at most 3x what the eager loop in the same dtype errs.

    The error is the root mean square over a leaf, and over all ``steps``: a maximum over so few
    numbers is a lottery, and so is the error of one number, the loss.
    """
    rows = {name: options[name] for name in ("reset", "mask") if name in options}
    errors: dict[str, list[tuple[float, float, float]]] = {}  # by path, for each K
    for count in steps:
        given = problem.data(count)
        with unchanged(*given, *rows.values()):
            found = train_segment(*given, **rows)
        assert_form(found, problem.params, problem.state)
        eager = reference(problem, count, **options)
        exact = reference(problem.to(torch.float64), count, **options)
        assert_same_structure(found, eager)
        leaves = zip(_paths(found), tree_leaves(eager), tree_leaves(exact), strict=True)
        for (path, a), b, c in leaves:
            if not (a.is_floating_point() or a.is_complex()):
                assert torch.equal(a, b), f"{path}: differs for {count} steps"
                continue
            floor = torch.finfo(a.dtype).eps * max(_rms(c), SMALLEST_SCALE)
            found_error, eager_error = (_rms(leaf.to(c.dtype) - c) for leaf in (a, b))
            errors.setdefault(path, []).append((found_error, eager_error, floor))
    wrong = []
    for path, of_path in errors.items():
        error, eager_error, floor = (math.hypot(*e) for e in zip(*of_path, strict=True))
        allowed = TIMES_EAGER * eager_error + floor
        if not error <= allowed:
            wrong.append(f"{path}: errs {error:.2e}, allowed {allowed:.2e}")
    assert not wrong, "\n".join(wrong)


def assert_close(found: Tree, expected: Tree, tolerance: float = TOLERANCE) -> None:
    """Same structure, shapes and dtypes; every leaf within ``tolerance`` of its own scale."""
    assert_same_structure(found, expected)
    wrong = []
    for (path, a), b in zip(_paths(found), tree_leaves(expected), strict=True):
        if not (b.is_floating_point() or b.is_complex()):
            if not torch.equal(a, b):
                wrong.append(f"{path}: expected {b.tolist()}, found {a.tolist()}")
        elif b.numel() and not torch.allclose(a, b, rtol=0, atol=tolerance * _scale(b)):
            error = (a - b).abs().max().item()
            wrong.append(f"{path}: off by {error:.2e}, allowed {tolerance * _scale(b):.2e}")
    assert not wrong, "\n".join(wrong)


def assert_same_structure(found: Tree, expected: Tree) -> None:
    assert tree_flatten(found)[1] == tree_flatten(expected)[1]
    for (path, a), b in zip(_paths(found), tree_leaves(expected), strict=True):
        assert a.shape == b.shape, f"{path}: shape {list(a.shape)}, expected {list(b.shape)}"
        assert a.dtype == b.dtype, f"{path}: {a.dtype}, expected {b.dtype}"
        assert a.device == b.device, f"{path}: on {a.device}, expected {b.device}"


def assert_form(found: SegmentOutput, params: Tree, state: Tree) -> None:
    """What holds for any result: structures, detached, nothing shared that a user might write."""
    assert isinstance(found, SegmentOutput)
    if found.grads is not None:
        assert_same_structure(found.grads, params)
        memory = [leaf.untyped_storage().data_ptr() for leaf in tree_leaves(found.grads)]
        assert len(set(memory)) == len(memory), "two gradients share their memory"
        assert not {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(params)} & {*memory}
        # An optimizer and clip_grad_norm_ write into them: no expanded or overlapping memory.
        assert all(leaf.is_contiguous() for leaf in tree_leaves(found.grads))
    assert_same_structure(found.state, state)
    for path, leaf in _paths(found):
        assert (leaf.requires_grad, leaf.grad_fn) == (False, None), f"{path} is not detached"
    for path, leaf in _paths(found.state):
        whole, own = leaf.untyped_storage().nbytes(), leaf.numel() * leaf.element_size()
        assert whole <= own, f"state{path} keeps {whole} bytes alive for its own {own}"


@contextmanager
def unchanged(*trees: Tree) -> Iterator[None]:
    """Asserts that no tensor in the trees is written, given a gradient, or marked in any way."""
    leaves = [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]
    before = [
        (leaf.detach().clone(), leaf._version, leaf.requires_grad, leaf.grad) for leaf in leaves
    ]
    yield
    for leaf, (value, version, requires_grad, grad) in zip(leaves, before, strict=True):
        assert leaf._version == version, f"a tensor of shape {list(leaf.shape)} was written"
        assert torch.equal(leaf.detach().nan_to_num(), value.nan_to_num())
        assert leaf.requires_grad == requires_grad
        assert leaf.grad is grad


def _scale(leaf: Tensor) -> float:
    return max(leaf.abs().max().item(), SMALLEST_SCALE)


def _rms(leaf: Tensor) -> float:
    return leaf.abs().square().mean().sqrt().item() if leaf.numel() else 0.0


def _paths(tree: Tree) -> list[tuple[str, Tensor]]:
    leaves = tree_flatten_with_path(tree)[0]
    return [(keystr(path), leaf) for path, leaf in leaves if leaf is not None]
