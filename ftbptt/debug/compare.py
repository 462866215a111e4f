"""``compare_to_reference``: compares a segment's results with the eager loop in float64."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .._random_state import random_state, same_random_state
from .._trees import (
    Tree,
    differentiable,
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
)
from ..contract.output import SegmentOutput
from ..segment.train_segment import TrainSegment
from .eager_loop import EagerLoop, check_defined

_TIMES_EAGER = 3.0  # the error allowed, as a multiple of the eager loop's error
_FLOAT64_TOLERANCE = 1e-10  # relative to the leaf's root mean square
# As much as a sum over a segment is off by in another order: the eager loop's error of a scalar may
# be far smaller by chance. Of 16-bit dtypes the spacing of their numbers is more.
_FLOAT32_TOLERANCE = 1e-6
_SMALLEST_SCALE = 1e-3  # a lower bound on that, for leaves near zero


@dataclass(frozen=True)
class ComparedLeaf:
    """How far one leaf of a segment's result is from its exact value.

    - ``path``: the leaf's path in the :class:`SegmentOutput`, such as ``grads['weight_hh']``.
    - ``shape``: the leaf's shape.
    - ``scale``: the root mean square of the exact value.
    - ``off``: the root mean square of the segment's error. For integers 0 or infinity.
    - ``eager_off``: the same for the eager loop in the dtype of the data.
    - ``agrees``: whether the segment's error is within the tolerance.

    >>> import torch, ftbptt
    >>> cell, x = torch.nn.RNNCell(3, 5), torch.randn(7, 2, 3)
    >>> train_segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: out.square().mean(), backend="eager"
    ... )
    >>> params = dict(cell.named_parameters())
    >>> [leaf.path for leaf in compare_to_reference(train_segment, params, None, x, None).leaves]
    ["grads['weight_ih']", "grads['weight_hh']", "grads['bias_ih']", "grads['bias_hh']", 'state',
     'loss', 'out']
    """

    path: str
    shape: tuple[int, ...]
    scale: float
    off: float
    eager_off: float
    agrees: bool


@dataclass(frozen=True)
class Comparison:
    """A segment's result compared with the exact one; ``print`` shows it as a table.

    - ``segment``: the segment's ``repr``.
    - ``steps``: the number of time steps K.
    - ``leaves``: a :class:`ComparedLeaf` for each leaf of the result.
    - ``agrees``: whether all leaves agree.

    >>> leaf = ComparedLeaf("loss", (), scale=0.5, off=2e-8, eager_off=1e-8, agrees=True)
    >>> print(Comparison("TrainSegment(GRUCell)", 7, [leaf]))
    TrainSegment(GRUCell), 7 steps: agrees with the eager loop in float64
    leaf  shape        size     off by  eager loop
    loss  scalar   5.00e-01   2.00e-08    1.00e-08
    """

    segment: str
    steps: int
    leaves: list[ComparedLeaf]

    @property
    def agrees(self) -> bool:
        """Whether all leaves agree."""
        return all(leaf.agrees for leaf in self.leaves)

    def __str__(self) -> str:
        wrong = [leaf for leaf in self.leaves if not leaf.agrees]
        verdict = "agrees with"
        if wrong:
            verdict = (
                "1 leaf differs from" if len(wrong) == 1 else f"{len(wrong)} leaves differ from"
            )
        shapes = {leaf.path: "x".join(map(str, leaf.shape)) or "scalar" for leaf in self.leaves}
        path_width = max(len("leaf"), *(len(leaf.path) for leaf in self.leaves))
        shape_width = max(len("shape"), *map(len, shapes.values()))
        lines = [
            f"{self.segment}, {self.steps} steps: {verdict} the eager loop in float64",
            f"{'leaf':{path_width}}  {'shape':{shape_width}}  "
            f"{'size':>9}  {'off by':>9}  {'eager loop':>10}",
        ]
        for leaf in self.leaves:
            lines.append(
                f"{leaf.path:{path_width}}  {shapes[leaf.path]:{shape_width}}  "
                f"{leaf.scale:9.2e}  {leaf.off:9.2e}  {leaf.eager_off:10.2e}"
                + ("" if leaf.agrees else "  differs")
            )
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

    Checks a segment whose result you doubt. Runs the segment, then the eager loop that defines it,
    in float64 and in the dtype of the data; the rounding error of the latter sets the tolerance. A
    leaf agrees if its error is at most 3 times the eager loop's plus one rounding of the leaf's
    root mean square (float64: plus 1e-10 of it).

    Step and loss must run in float64, too. With one that fixes float32 inside, as surrogates of
    snnTorch do, the loop's error is raised: compare that segment with ``reference_segment``, in
    the dtype of the data.

    Arguments are those of the segment; ``y`` may be None. Raises what the segment raises, and
    ValueError for a segment that the eager loop does not define: made with ``taps=`` or
    ``window=``, or drawing random numbers.

    >>> import torch, ftbptt
    >>> cell = torch.nn.GRUCell(3, 5)
    >>> train_segment = ftbptt.make_train_segment(cell, lambda out, y: (out - y).square().mean())
    >>> params, x, y = dict(cell.named_parameters()), torch.randn(60, 2, 3), torch.randn(60, 2, 5)
    >>> compare_to_reference(train_segment, params, torch.zeros(2, 5), x, y).agrees
    True
    """
    check_defined(train_segment)
    loop, start = EagerLoop.of(train_segment, params, state, x, y, reset, mask)
    result = train_segment(params, state, x, y, reset=reset, mask=mask)
    eager = _without_random_numbers(loop, params, start, x, y)
    exact = _in_float64(loop, params, start, x, y)
    leaves = [
        _compare_leaf(keystr(path).removeprefix("."), leaf, eager_leaf, exact_leaf)
        for (path, leaf), eager_leaf, exact_leaf in zip(
            tree_flatten_with_path(result)[0], tree_leaves(eager), tree_leaves(exact), strict=True
        )
    ]
    return Comparison(repr(train_segment), loop.steps(x), leaves)


def _without_random_numbers(loop: EagerLoop, *arguments: Tree) -> SegmentOutput:
    """Runs the loop in the dtype of the data; ValueError if it draws from any generator."""
    before = random_state()
    result = loop.run(loop.recipe.step, *arguments)
    if not same_random_state(before, random_state()):
        raise ValueError(
            "step: draws random numbers, so that no two runs are alike. For dropout call "
            "module.eval(), or set p=0 where it is always on; pass other noise in x."
        )
    return result


def _in_float64(loop: EagerLoop, params: Tree, state: Tree, x: Tree, y: Tree) -> SegmentOutput:
    """Runs the loop in float64, without autocast."""
    step = loop.recipe.step
    if step.module is not None:
        step = replace(step, module=_in_double(_copied(step.module)))
    arguments = [
        None if tree is None else tree_map(_to_double, tree) for tree in (params, state, x, y)
    ]
    try:
        with torch.autocast(tree_leaves(x)[0].device.type, enabled=False):
            return loop.run(step, *arguments)
    except Exception as error:
        error.add_note(
            "while the eager loop ran in float64. A tensor that the step or the loss makes or "
            "closes over must follow the dtype of its inputs: .to(x.dtype). A step that cannot, "
            "since a layer of a library fixes float32 inside, cannot be compared in float64: "
            "compare it with reference_segment(step, loss, ...) in the dtype of the data."
        )
        raise


def _copied(module: nn.Module) -> nn.Module:
    """A deep copy. A recurrent layer with a parametrization keeps tensors that have a history."""
    kept = tree_leaves([vars(part) for part in module.modules()])
    with_history = [leaf for leaf in kept if isinstance(leaf, Tensor) and not leaf.is_leaf]
    return copy.deepcopy(module, {id(leaf): leaf.detach().clone() for leaf in with_history})


def _in_double(module: nn.Module) -> nn.Module:
    """The module, cast in place, complex buffers too, which ``double()`` leaves as they are."""
    for part in module.double().modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_complex():
                setattr(part, name, _to_double(buffer))
    return module


def _to_double(leaf: Tensor) -> Tensor:
    if leaf.is_complex():
        return leaf.to(torch.complex128)
    return leaf.double() if leaf.is_floating_point() else leaf


def _compare_leaf(path: str, result: Tensor, eager: Tensor, exact: Tensor) -> ComparedLeaf:
    shape = tuple(result.shape)
    if not differentiable(exact):
        off, eager_off = (0.0 if torch.equal(a, exact) else math.inf for a in (result, eager))
        return ComparedLeaf(path, shape, _rms(exact.double()), off, eager_off, off == 0)
    scale = _rms(exact[exact.isfinite()])
    off, eager_off = _rms_error(result, exact), _rms_error(eager, exact)
    is_double = result.dtype in (torch.float64, torch.complex128)
    relative = max(torch.finfo(result.dtype).eps, _FLOAT32_TOLERANCE)
    relative = _FLOAT64_TOLERANCE if is_double else relative
    tolerance = _TIMES_EAGER * eager_off + relative * max(scale, _SMALLEST_SCALE)
    return ComparedLeaf(path, shape, scale, off, eager_off, off <= tolerance)


def _rms_error(result: Tensor, exact: Tensor) -> float:
    """The root mean square of the error; equal infinities, and NaN in both, count as equal."""
    result = result.to(exact.dtype)
    same = (result == exact) | (result.isnan() & exact.isnan())
    error = _rms(torch.where(same, 0, result - exact))
    return math.inf if math.isnan(error) else error


def _rms(leaf: Tensor) -> float:
    return leaf.abs().square().mean().sqrt().item() if leaf.numel() else 0.0
