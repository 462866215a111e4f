"""A model's loss and metrics on a stream of any length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .._arguments import whole
from .._layout import Layout
from .._make_segment import check_made
from .._segment import TrainSegment
from .._trees import tree_leaves, tree_map
from .chunk import Chunk
from .prefetch import Mover
from .random_truncation import RandomTruncation
from .segments import Segments
from .source import as_source, check_axes

Tree = Any


@dataclass(frozen=True)
class Evaluation:
    """``loss`` is the mean over all ``steps`` valid steps, ``state`` the state after the last."""

    loss: float
    steps: int
    metrics: dict[str, Any]
    state: Tree


def evaluate_stream(
    train_segment: TrainSegment | RandomTruncation,
    params: Tree,
    state: Tree,
    data: Any,
    *,
    k: int = 256,
    metrics: Mapping[str, Any] | None = None,
    metric_inputs: Callable[[Tree, Tree], tuple[Any, Any]] | None = None,
    prepare: Callable[[Tree, Tree], tuple[Tree, Tree]] | None = None,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> Evaluation:
    """evaluate_stream : train_segment, params, state, data -> Evaluation

    Runs over ``data`` in chunks of ``k`` steps without gradients and carries the state, in memory
    that does not grow with the length of the data. ``data``, ``prepare`` and ``device`` are as for
    :func:`train_stream`. A :func:`random_truncation` is evaluated without cuts.

    Chunks are weighted by their valid steps, so the loss does not depend on ``k``. The loss of a
    segment with ``in_dims`` is a mean over sequences, each with its own mean over valid steps (0
    if it has none); its chunks are weighted by their number of steps. With a ``mask``, that loss
    depends on ``k``.

    ``metrics`` are objects of ``torchmetrics``, or whatever has their ``update(preds, target)`` and
    ``compute()``. They are given the valid steps of all rows on one axis: ``preds`` is ``out`` as
    ``[N, ...]`` and ``target`` is ``y`` as ``[N, ...]``, or what ``metric_inputs(out, y)`` makes of
    the whole chunk ``[K, B, ...]`` before that. They are not reset.

    Raises TypeError for a ``train_segment`` that is not this package's own, ValueError for data
    without a step.

    >>> import ftbptt
    >>> cell = torch.nn.GRUCell(3, 5)
    >>> train_segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: (out - y).square().mean(), backend="eager"
    ... )
    >>> data = torch.randn(1000, 2, 3), torch.zeros(1000, 2, 5)
    >>> found = evaluate_stream(train_segment, dict(cell.named_parameters()), None, data)
    >>> found.steps, found.state.shape
    (2000, torch.Size([2, 5]))
    """
    if isinstance(train_segment, RandomTruncation):
        train_segment = train_segment.train_segment
    check_made(train_segment)
    k = whole("k", k, 1)
    if metrics is not None and not hasattr(metrics, "items"):
        raise TypeError(f"metrics: expected a dict of them, found {type(metrics).__name__}.")
    segments = Segments(train_segment)
    source = as_source(data, segments.axes)
    source.begin(0)
    mover = Mover(None if device is None else torch.device(device))
    total: Tensor | None = None
    weights: int | Tensor = 0
    steps: int | Tensor = 0
    at = 0
    with tqdm(total=source.total, unit="step", disable=not progress, leave=False) as bar:
        while (chunk := source.read(at, at + k)) is not None:
            if total is None:
                check_axes(source, segments.axes(chunk.x))
            if prepare is not None:
                chunk = segments.prepared(prepare, chunk)
            chunk = mover.wait(*mover.start(chunk))
            result = segments.evaluate(params, state, chunk)
            state = result.state
            weight, _ = segments.weigh(chunk, state, 0)
            part = result.loss.double() * weight
            total = part if total is None else total + part
            weights = weights + weight
            steps = steps + segments.valid_steps(chunk, state)
            if metrics:
                pair = (result.out, chunk.y)
                pair = pair if metric_inputs is None else metric_inputs(*pair)
                rows = segments.rows(chunk, state)
                preds, target = _valid_steps(pair, chunk, segments.layout(chunk.x), rows)
                if len(tree_leaves(preds)[0]):  # not every metric takes a batch of none
                    for metric in metrics.values():
                        metric.update(preds, target)
            length = segments.axes(chunk.x).steps(chunk)
            at += length
            bar.update(length)
    if total is None:
        raise ValueError("data: has no steps to evaluate on.")
    found = {name: metric.compute() for name, metric in (metrics or {}).items()}
    return Evaluation(float(total) / max(int(weights), 1), int(steps), found, state)


def _valid_steps(
    trees: tuple[Tree, Tree], chunk: Chunk, layout: Layout, rows: int | None
) -> tuple[Tree, Tree]:
    """[N, ...]: the valid steps of all rows on one axis, step by step."""
    valid = chunk.mask
    if valid is not None and valid.dim() > 1:
        valid = valid.movedim(layout.x_time, 0).flatten()
    elif valid is not None:
        valid = valid.repeat_interleave(rows or 1)

    def flat(leaf: Tensor | None, time: int, row: int | None) -> Tensor:
        if leaf is None:
            raise ValueError(
                "metrics: there is no y to give to them. Say what they are given: "
                "metric_inputs(out, y) -> (preds, target)."
            )
        if rows is None:
            leaf = leaf.movedim(time, 0)
        elif row is None:  # all rows have the same
            leaf = leaf.movedim(time, 0).repeat_interleave(rows, 0)
        else:
            leaf = leaf.movedim((time, row), (0, 1)).flatten(0, 1)
        return leaf if valid is None else leaf[valid]

    preds = tree_map(lambda leaf: flat(leaf, layout.x_time, layout.x_rows), trees[0])
    target = tree_map(lambda leaf: flat(leaf, layout.y_time, layout.y_rows), trees[1])
    return preds, target
