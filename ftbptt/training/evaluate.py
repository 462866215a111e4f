"""``evaluate_stream``: the loss and the metrics of a model on a stream of any length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .._checks import check_device, check_function, check_int, kind_of
from .._trees import Tree, keystr, tree_flatten_with_path, tree_leaves, tree_map
from ..contract.layout import Layout
from ..contract.output import SegmentOutput
from ..segment.train_segment import TrainSegment
from .data.chunk import Chunk
from .data.layout import Counts
from .data.prefetch import Mover
from .data.source import as_source, check_axes, leaving_data
from .random_truncation import RandomTruncation
from .segments import Segments, is_segment


@dataclass(frozen=True)
class Evaluation:
    """The result of :func:`evaluate_stream`.

    - ``loss``: the mean over all valid steps (with ``in_dims``: see there); 0 if there are none. Of
      an ensemble a tensor [M], on the device.
    - ``steps``: the number of valid steps, summed over rows (of an ensemble also over models, if
      each has data of its own).
    - ``metrics``: by name, what each metric's ``compute()`` returned.
    - ``state``: the state after the last step.

    >>> import ftbptt
    >>> def step(params, x_t, total):
    ...     return params["w"] * (total + x_t), total + x_t
    >>> train_segment = ftbptt.make_train_segment(step, lambda out, y: out.mean(), backend="eager")
    >>> params, x = {"w": torch.tensor(2.0)}, torch.ones(4, 1)
    >>> evaluate_stream(train_segment, params, torch.zeros(1), (x, None))
    Evaluation(loss=5.0, steps=4, metrics={})
    """

    loss: Any
    steps: int
    metrics: dict[str, Any]
    state: Tree = field(repr=False)


def evaluate_stream(
    train_segment: TrainSegment | RandomTruncation | Callable[..., SegmentOutput],
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
    time_dim: int | None = None,
) -> Evaluation:
    """evaluate_stream : train_segment, params, state, data -> Evaluation

    Runs over ``data`` in chunks of ``k`` steps without gradients and carries the state, in memory
    that does not grow with the length of the data. ``data``, ``prepare`` and ``device`` are as for
    :func:`train_stream`. A :func:`random_truncation` is evaluated without cuts.

    Chunks are weighted by their valid steps, so the loss does not depend on ``k``, if it is a mean
    over them (not with ``ignore_index``, say; for padding there is ``mask``). The loss of a
    segment with ``in_dims`` is a mean over sequences, each with its own mean over valid steps (0
    if it has none); its chunks are weighted by their number of steps. With a ``mask``, that loss
    depends on ``k``.

    ``metrics`` are ``torchmetrics`` objects, or any with their ``update(preds, target)`` and
    ``compute()``. They get the valid steps of all rows on one axis: ``preds`` is ``out`` as
    ``[N, ...]`` and ``target`` is ``y`` as ``[N, ...]``, or what ``metric_inputs(out, y)`` makes of
    the chunk ``[K, B, ...]`` before that, with the same K and B. They are not reset.

    Of an ensemble pass ``torch.func.vmap(train_segment.evaluate, in_dims=...)`` as
    ``train_segment``, and as ``time_dim`` the axis of time in the data, as for
    :func:`train_stream`; so may any function be with such arguments and results. It has no
    ``metrics``, and as many losses as the function returns.

    A module runs in the mode that it is in: call ``model.eval()`` before, if it has dropout.

    Raises TypeError for what is no segment, metric or function, for ``metric_inputs`` that returns
    no pair, and for metrics of a function; ValueError for data without a step, for a
    ``metric_inputs`` that returns other steps or rows, for a ``prepare`` that writes to whole
    tensors of data, and for a segment with ``context`` under vmap.

    >>> import ftbptt
    >>> cell = torch.nn.GRUCell(3, 5)
    >>> train_segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: (out - y).square().mean(), backend="eager"
    ... )
    >>> data = torch.randn(1000, 2, 3), torch.zeros(1000, 2, 5)
    >>> evaluation = evaluate_stream(train_segment, dict(cell.named_parameters()), None, data)
    >>> evaluation.steps, evaluation.state.shape
    (2000, torch.Size([2, 5]))
    """
    if is_segment(getattr(train_segment, "__wrapped__", None)):
        raise TypeError(
            "train_segment: a segment under vmap computes gradients. Pass "
            "vmap(train_segment.evaluate, in_dims=...)."
        )
    if is_segment(segment := getattr(train_segment, "__self__", None)):
        train_segment = segment  # its method evaluate was passed
    if isinstance(train_segment, RandomTruncation):
        train_segment = train_segment.train_segment
    segments = Segments(train_segment, time_dim=time_dim)
    if segments.under_vmap and segments.context:
        raise ValueError(
            f"context: the segment was made with context={segments.context}, and under vmap the "
            "first steps of each chunk would have no loss here. Pass vmap of the evaluate of a "
            "segment that is made with context=0."
        )
    k = check_int("k", k, 1)
    if metric_inputs is not None:
        check_function("metric_inputs", metric_inputs, "(out, y)")
    if prepare is not None:
        check_function("prepare", prepare, "(x, y)")
    metrics = {} if metrics is None else metrics
    _check_metrics(metrics)
    if metrics and segments.inner is None:
        raise TypeError(
            "metrics: of a function it is not known where time and rows are in what it returns. "
            "Pass what make_train_segment returns, for each model of an ensemble in turn."
        )
    source = as_source(data, segments.axes)
    if prepare is not None:
        prepare = leaving_data(prepare, source)
    source.begin(0)
    mover = Mover(check_device(device))
    loss_sum: Tensor | None = None  # of weighted losses, in float64 on the device
    weights: int | Tensor = 0
    valid_steps: int | Tensor = 0
    position = 0
    with tqdm(total=source.total, unit="step", disable=not progress, leave=False) as bar:
        while (chunk := source.read(position, position + k)) is not None:
            if loss_sum is None:
                check_axes(source, segments.axes(chunk.x))
            if prepare is not None:
                chunk = segments.prepared(prepare, chunk)
            chunk = mover.wait(*mover.start(chunk))
            result = segments.evaluate(params, state, chunk)
            state = result.state
            counts = segments.count_of_models(chunk, state, 0, result.loss)
            weight = counts.weight
            weighted_loss = result.loss.double() * weight
            if isinstance(weight, Tensor):  # a function's loss of no step may be 0 / 0
                weighted_loss = weighted_loss.masked_fill(weight == 0, 0.0)
            loss_sum = weighted_loss if loss_sum is None else loss_sum + weighted_loss
            weights = weights + weight
            if segments.inner is not None:  # with in_dims, that is another number than the weight
                valid_steps = valid_steps + segments.valid_steps(chunk, state)
            elif segments.layout(chunk.x).x_time:  # of models with data of their own
                valid_steps = valid_steps + torch.as_tensor(weight).expand_as(result.loss).sum()
            else:
                valid_steps = valid_steps + weight
            if metrics:
                pair, layout = (result.out, chunk.y), segments.layout(chunk.x)
                if metric_inputs is not None:
                    pair = _checked_pair(metric_inputs(*pair), layout, counts)
                _update(metrics, *_flatten_valid(pair, chunk, layout, counts.rows))
            position += counts.steps
            bar.update(counts.steps)
    if loss_sum is None:
        raise ValueError("data: has no steps to evaluate on.")
    loss = loss_sum / torch.as_tensor(weights, device=loss_sum.device).clamp(min=1)
    return Evaluation(
        loss if loss.dim() else float(loss),
        int(valid_steps),
        {name: metric.compute() for name, metric in metrics.items()},
        state,
    )


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    if not hasattr(metrics, "items"):
        raise TypeError(f"metrics: expected a dict of them, found {type(metrics).__name__}.")
    for name, metric in metrics.items():
        is_one = hasattr(metric, "update") and hasattr(metric, "compute")
        if not is_one or isinstance(metric, type):
            raise TypeError(
                f"metrics[{name!r}]: expected an object with update(preds, target) and compute(), "
                f"such as one of torchmetrics, found {kind_of(metric)}."
            )


def _update(metrics: Mapping[str, Any], preds: Tree, target: Tree) -> None:
    if len(tree_leaves(preds)[0]):  # some metrics fail on an empty batch
        for name, metric in metrics.items():
            try:
                metric.update(preds, target)
            except Exception as error:
                _note_trees(error, name, preds, target)
                raise


def _note_trees(error: Exception, name: str, preds: Tree, target: Tree) -> None:
    """Adds a note to a metric's error if it was given trees, which torchmetrics cannot read."""
    kinds = [type(tree).__name__ for tree in (preds, target)]
    if not (isinstance(preds, Tensor) and isinstance(target, Tensor)):
        error.add_note(
            f"ftbptt: metrics[{name!r}] was given a {kinds[0]} as preds and a {kinds[1]} as "
            "target. metric_inputs(out, y) -> (preds, target) says which tensors it is to get."
        )


def _checked_pair(pair: Any, layout: Layout, counts: Counts) -> tuple[Tree, Tree]:
    """``(preds, target)``. Raises ValueError if its axes of steps and rows are not the chunk's."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"metric_inputs: expected it to return (preds, target), found {type(pair).__name__}."
        )
    axes = ((layout.x_time, layout.x_rows), (layout.y_time, layout.y_rows))
    for name, tree, (time, rows) in zip(("preds", "target"), pair, axes, strict=True):
        expected = {time: counts.steps}
        if counts.rows is not None and rows is not None:
            expected[rows] = counts.rows
        for path, leaf in tree_flatten_with_path(tree)[0]:
            if leaf is None:
                continue
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"metric_inputs: {name}{keystr(path)}: expected a tensor, found "
                    f"{type(leaf).__name__}. A metric may convert it in its update()."
                )
            # Without an axis of rows it is the same for all of them.
            found = {axis: leaf.shape[axis] for axis in expected if axis < leaf.dim()}
            if time not in found or found != {axis: expected[axis] for axis in found}:
                has = " and ".join(
                    f"{size} {'steps' if axis == time else 'rows'} on axis {axis}"
                    for axis, size in expected.items()
                )
                raise ValueError(
                    f"metric_inputs: {name}{keystr(path)} has shape {list(leaf.shape)}, but the "
                    f"chunk has {has}. Keep these axes: they become one after that, without "
                    "padding. To leave out other steps too, use the ignore_index of a metric."
                )
    return pair[0], pair[1]


def _flatten_valid(
    pair: tuple[Tree, Tree], chunk: Chunk, layout: Layout, rows: int | None
) -> tuple[Tree, Tree]:
    """``(preds, target)`` as [N, ...]: the valid steps of all rows on one axis, time first."""
    valid = chunk.mask
    if valid is not None and valid.dim() > 1:
        valid = layout.flags_first(valid).flatten(0, 1)
    elif valid is not None:
        valid = valid.repeat_interleave(rows or 1)

    def flatten(leaf: Tensor | None, time_axis: int, row_axis: int | None) -> Tensor:
        if leaf is None:
            raise ValueError(
                "metrics: there is no y to give to them. Pass metric_inputs(out, y) -> (preds, "
                "target)."
            )
        if rows is None:
            leaf = leaf.movedim(time_axis, 0)
        elif row_axis is None or leaf.dim() <= row_axis:  # the same for all rows
            leaf = leaf.movedim(time_axis, 0).repeat_interleave(rows, 0)
        else:
            leaf = leaf.movedim((time_axis, row_axis), (0, 1)).flatten(0, 1)
        return leaf if valid is None else leaf[valid]

    preds, target = pair
    return (
        tree_map(lambda leaf: flatten(leaf, layout.x_time, layout.x_rows), preds),
        tree_map(lambda leaf: flatten(leaf, layout.y_time, layout.y_rows), target),
    )
