"""``compare_to_reference``: what a segment returns, beside the plain loop in float64."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._layout import Layout, SharedLayout
from .._make_segment import check_made
from .._output import SegmentOutput
from .._reference import reference_segment
from .._segment import TrainSegment
from .._step import Step
from .._trees import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten
from ..compiler.signature import Recipe

Tree = Any
_TIMES_EAGER = 3.0  # how much more than the eager loop a result may be off, in lower precision
_FLOAT64 = 1e-10  # relative, in float64
_SMALLEST_SCALE = 1e-3  # leaves of smaller numbers are compared as if they were this large


@dataclass(frozen=True)
class ComparedLeaf:
    """One leaf of a result. ``scale`` is the root mean square of its exact value.

    ``off`` is that of the error of the segment, ``eager_off`` of the eager loop in the dtype of the
    data; of integers both are 0 or infinite.
    """

    path: str
    shape: tuple[int, ...]
    scale: float
    off: float
    eager_off: float
    agrees: bool


@dataclass(frozen=True)
class Comparison:
    """A result beside the exact one, leaf by leaf; to print. ``agrees`` if all leaves do."""

    segment: str
    steps: int
    leaves: list[ComparedLeaf]

    @property
    def agrees(self) -> bool:
        return all(leaf.agrees for leaf in self.leaves)

    def __str__(self) -> str:
        wrong = [leaf for leaf in self.leaves if not leaf.agrees]
        verdict = "agrees with" if not wrong else f"{len(wrong)} leaves differ from"
        width = max(len("leaf"), *(len(leaf.path) for leaf in self.leaves))
        shapes = {leaf.path: "x".join(map(str, leaf.shape)) or "scalar" for leaf in self.leaves}
        wide = max(len("shape"), *map(len, shapes.values()))
        lines = [
            f"{self.segment}, {self.steps} steps: {verdict} the eager loop in float64",
            f"{'leaf':{width}}  {'shape':{wide}}  {'size':>9}  {'off by':>9}  {'eager loop':>10}",
        ]
        for leaf in self.leaves:
            numbers = f"{leaf.scale:9.2e}  {leaf.off:9.2e}  {leaf.eager_off:10.2e}"
            mark = "" if leaf.agrees else "  differs"
            lines.append(f"{leaf.path:{width}}  {shapes[leaf.path]:{wide}}  {numbers}{mark}")
        return "\n".join(lines)


def compare_to_reference(
    train_segment: TrainSegment,
    params: Tree,
    state: Tree,
    x: Tree,
    y: Tree,
    *,
    reset: Tensor | None = None,
    mask: Tensor | None = None,
) -> Comparison:
    """compare_to_reference : train_segment, params, state, x[K, ...], y[K, ...] -> Comparison

    In doubt about a result? Runs the segment; the plain eager loop that defines it, in float64; and
    that loop in the dtype of the data, whose rounding says how much a result may be off. A leaf
    agrees if it is off by at most 3 times as much, or, in float64, by 1e-10 of its size.

    Arguments are those of the segment. Raises as that does, and ValueError for a segment that the
    plain loop does not define: with ``taps=`` or ``window=``, or with random numbers.

    >>> import torch, ftbptt
    >>> cell = torch.nn.GRUCell(3, 5)
    >>> train_segment = ftbptt.make_train_segment(cell, lambda out, y: (out - y).square().mean())
    >>> params, x, y = dict(cell.named_parameters()), torch.randn(60, 2, 3), torch.randn(60, 2, 5)
    >>> compare_to_reference(train_segment, params, torch.zeros(2, 5), x, y).agrees
    True
    """
    check_made(train_segment)
    for name, used in (
        ("taps", train_segment.tapped),
        ("window", train_segment.recipe.window is not None),
    ):
        if used:
            raise ValueError(
                f"train_segment: was made with {name}=, which the plain loop does not have. "
                "Compare the same segment without it."
            )
    plan, groups = train_segment.plan(params, state, x, y, reset=reset, mask=mask)
    found = train_segment(params, state, x, y, reset=reset, mask=mask)
    step, layout = train_segment.recipe.step, train_segment.layout(x)
    state_dim = layout.state_dim if isinstance(layout, SharedLayout) else None
    if state is None:  # then the plan says what that means
        state, state_dim = tree_unflatten(groups["state"], plan.signature.specs[1]), None
        reset = _time_back(layout, groups["reset"])
    loop = _Loop(train_segment.recipe, layout, state_dim, reset, mask)
    given = (params, state, x, y)
    before = torch.get_rng_state()
    eager = loop.run(step, *given)
    if not torch.equal(torch.get_rng_state(), before):
        raise ValueError(
            "step: draws random numbers, so that no two runs are alike. Call module.eval(), which "
            "turns dropout off, and compare that."
        )
    device = tree_leaves(x)[0].device.type
    try:
        with torch.autocast(device, enabled=False):
            exact = loop.run(_in_float64(step), *map(_doubles, given))
    except Exception as error:
        error.add_note(
            "while the eager loop ran in float64. A tensor that the step or the loss makes or "
            "closes over must follow the dtype of its inputs: .to(x.dtype)."
        )
        raise
    leaves = []
    for (path, a), b, c in zip(
        tree_flatten_with_path(found)[0], tree_leaves(eager), tree_leaves(exact), strict=True
    ):
        leaves.append(_compared(keystr(path).removeprefix("."), a, b, c))
    return Comparison(repr(train_segment), groups["x"][0].shape[0], leaves)


@dataclass(frozen=True)
class _Loop:
    """The plain loop as a segment calls it.

    ``state_dim``: where the sequences of ``in_dims`` lie in the state; None if all begin alike.
    """

    recipe: Recipe
    layout: Layout
    state_dim: int | None
    reset: Tensor | None
    mask: Tensor | None

    def run(self, step: Step, params: Tree, state: Tree, x: Tree, y: Tree) -> SegmentOutput:
        """The loop; for a segment with ``in_dims`` its mean over the sequences."""
        layout, start = self.layout, self.recipe.initial_state
        if start is not None and not callable(start):
            start = tree_map(lambda own, leaf: own.to(leaf.dtype), start, state)

        def call(state: Tree, x: Tree, y: Tree, reset: Tree, mask: Tree) -> SegmentOutput:
            return reference_segment(
                step, self.recipe.loss, params, state, x, y, reset=reset, mask=mask,
                time_dim=layout.time_dim, initial_state=start, context=self.recipe.context,
            )  # fmt: skip

        given = (state, x, y, self.reset, self.mask)
        if not isinstance(layout, SharedLayout):
            return call(*given)
        dims = (self.state_dim, layout.x_dim, layout.y_dim, layout.x_dim, layout.x_dim)
        count = tree_leaves(x)[0].shape[layout.x_dim]
        outputs = [
            call(*(_select(tree, dim, i) for tree, dim in zip(given, dims, strict=True)))
            for i in range(count)
        ]
        grads, states, losses, outs = zip(*outputs, strict=True)
        return SegmentOutput(
            tree_map(lambda *own: torch.stack(own).sum(0) / count, *grads),
            tree_map(lambda *own: torch.stack(own, layout.state_dim or 0), *states),
            torch.stack(losses).mean(),
            tree_map(lambda *own: torch.stack(own, layout.x_dim), *outs),
        )


def _time_back(layout: Layout, reset: list[Tensor]) -> Tensor | None:
    """A ``reset`` of the plan in the caller's layout."""
    if not reset or reset[0].dim() < 2:
        return reset[0] if reset else None
    if isinstance(layout, SharedLayout):
        return layout.sequence_back(reset[0])
    return layout.time_back(reset[0])


def _select(tree: Tree, dim: int | None, i: int) -> Tree:
    if tree is None or dim is None:
        return tree
    return tree_map(lambda leaf: leaf.select(dim, i), tree)


def _in_float64(step: Step) -> Step:
    return (
        step if step.module is None else replace(step, module=copy.deepcopy(step.module).double())
    )


def _doubles(tree: Tree) -> Tree:
    return tree_map(_to_float64, tree)


def _to_float64(leaf: Tensor) -> Tensor:
    if leaf.is_complex():
        return leaf.to(torch.complex128)
    return leaf.double() if leaf.is_floating_point() else leaf


def _compared(path: str, found: Tensor, eager: Tensor, exact: Tensor) -> ComparedLeaf:
    if not (exact.is_floating_point() or exact.is_complex()):
        off, eager_off = (0.0 if torch.equal(a, exact) else math.inf for a in (found, eager))
        return ComparedLeaf(path, tuple(found.shape), math.nan, off, eager_off, off == 0)
    finite = exact[exact.isfinite()]
    scale, off, eager_off = _rms(finite), _error(found, exact), _error(eager, exact)
    size = max(scale, _SMALLEST_SCALE)
    double = found.dtype in (torch.float64, torch.complex128)
    floor = (_FLOAT64 if double else torch.finfo(found.dtype).eps) * size
    agrees = off <= _TIMES_EAGER * eager_off + floor
    return ComparedLeaf(path, tuple(found.shape), scale, off, eager_off, agrees)


def _error(found: Tensor, exact: Tensor) -> float:
    """The root mean square of the difference; where both are the same, also NaN, it is none."""
    found = found.to(exact.dtype)
    same = (found == exact) | (found.isnan() & exact.isnan())
    error = _rms(torch.where(same, 0, found - exact))
    return math.inf if math.isnan(error) else error


def _rms(leaf: Tensor) -> float:
    return leaf.abs().square().mean().sqrt().item() if leaf.numel() else 0.0
