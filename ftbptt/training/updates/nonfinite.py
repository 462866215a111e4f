"""Losses that are not finite: where they come from, and what a run does about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._trees import Tree, differentiable, keystr, tree_flatten_with_path, tree_leaves
from ..._warnings import warn
from ...contract.layout import Layout
from ...contract.output import SegmentOutput
from ..data.chunk import Chunk
from .learner import Learner

_OTHERS_GO_ON = "Such a model stays as it was before that; the others go on."


class Guard:
    """Checks losses and norms, and reacts as ``mode`` says: "stop", "skip" or "raise"."""

    def __init__(self, mode: str, learner: Learner) -> None:
        self.mode, self.learner = mode, learner
        self.lost = False  # the parameters are not finite either
        self._at_start: dict[int, Tensor] = {}  # parameters with values that are not finite

    def begin(self) -> None:
        """Notes which parameters are not finite at the start: a -inf among them may be meant."""
        leaves = enumerate(tree_leaves(self.learner.params))
        self._at_start = {i: leaf.detach().clone() for i, leaf in leaves if _is_bad(leaf)}

    def spoiled(self) -> str:
        """Describes a parameter with a value that has become NaN or infinite; empty if none has."""
        for i, (path, leaf) in enumerate(tree_flatten_with_path(self.learner.params)[0]):
            bad = _nonfinite(leaf)
            if bad is not None and i in self._at_start:
                start = self._at_start[i]
                bad = bad & (leaf != start) & ~(leaf.isnan() & start.isnan())
            if bad is not None and bad.any():
                return f"params{keystr(path)} is not finite already"
        return ""

    def reads_now(self, value: Tensor) -> bool:
        """Whether ``value`` is looked at before the update: on a CPU, or if the mode is "skip".

        To read it waits for a GPU, so there it is left to the next report; on a CPU it is free.
        """
        return value.is_cpu or self.mode == "skip"

    def is_sound(self, value: Tensor, grads: Sequence[Tensor] = ()) -> bool:
        """Whether ``value``, a loss or a norm, is finite, or not looked at now.

        In mode "stop" the models of an ensemble for which it is not are stopped; it is sound then,
        if none of them is new. ``grads`` are those that it belongs to.
        """
        stopped = self.learner.stopped_models
        watched = self.mode == "stop" and stopped.watch(value, grads)
        if not self.reads_now(value):
            return True
        if watched:
            return stopped.new is None
        return bool(torch.isfinite(value).all()) if value.dim() else math.isfinite(value)

    def stops(self, problem: str, if_stopped: str) -> bool:
        """Warns of the problem, and says whether the run is to stop.

        It goes on in mode "skip", or with the models that are left. ``if_stopped`` is what the
        warning adds if it stops. Raises FloatingPointError in mode "raise".
        """
        mode, stopped = self.mode, self.learner.stopped_models
        if stopped.new is not None:
            stopped.told()
            if not stopped.are_all:
                self.begin()  # their parameters may have become NaN, and stay so
                warn(f"ftbptt: {problem}. {_OTHERS_GO_ON}", RuntimeWarning)
                return False
        # A NaN from the start is never meant: it would be in every loss.
        spoiled = self.spoiled()
        if spoiled or any(p.isnan().any() for p in self.learner.trained):
            self.lost = True
            if spoiled and self.learner.clip_norm is None:
                problem += (
                    ". If a gradient under a finite loss made it so, clip_norm=math.inf notices "
                    "that before the update"
                )
            if mode == "skip":  # every later window would be skipped
                mode = "stop"
                if_stopped = "The run stops: parameters that are not finite stay so."
        consequence = {"stop": if_stopped, "skip": "It is left out.", "raise": ""}[mode]
        message = f"ftbptt: {problem}. {consequence}".strip()
        if mode == "raise":
            raise FloatingPointError(message)
        warn(message, RuntimeWarning)
        return mode == "stop"


def in_words(value: Tensor, bad: Tensor | None = None) -> str:
    """A loss or norm that is not finite: the number; under vmap, which entries are not.

    ``bad``: flags of those to tell of; None for all.
    """
    if not value.dim():
        return str(value.item())
    indices = (~value.isfinite() if bad is None else bad).nonzero().tolist()
    first = ", ".join(map(str, indices[0]))
    return f"not finite in {len(indices)} of {value.numel()} entries of vmap, first in [{first}]"


def nonfinite_window(
    params: Tree,
    result: SegmentOutput,
    chunk: Chunk,
    layout: Layout,
    position: int,
    row: int | None,
    losses: Callable[[], Tensor | None],
) -> str:
    """Describes where a window is not finite: in its data, its output, a parameter or a gradient.

    Where data and output are finite, it is in the loss: ``losses()`` are those of each step, if
    they are known. ``position`` is the chunk's first step in the epoch, ``row`` its first row in
    the batch; None for data without rows.
    """
    x_rows, y_rows = (None, None) if row is None else (layout.x_rows, layout.y_rows)
    first_row = row or 0
    descriptions = [
        _first_step("x", chunk.x, layout.x_time, x_rows, position, first_row),
        _first_step("y", chunk.y, layout.y_time, y_rows, position, first_row),
        # Under vmap out may have other axes than x, where that is the same for all models.
        _first_leaf("out", result.out, "is not finite")
        if result.loss.dim()
        else _first_step("out", result.out, layout.x_time, x_rows, position, first_row),
        nonfinite_parameter(params),
    ]
    if not any(descriptions) and not result.loss.dim() and (each := losses()) is not None:
        rows = None if row is None else 1
        descriptions.append(_first_step("the loss", each, 0, rows, position, first_row))
    descriptions.append(
        _first_leaf("grads", result.grads, "is the first gradient that is not finite")
    )
    message = "; ".join(text for text in descriptions if text)
    if message:
        return message
    message = "parameters, inputs, outputs and gradients are finite"
    if result.loss.isnan().any() and not any(g.any() for g in tree_leaves(result.grads)):
        message += (
            ", and the gradients are 0: a mean over nothing is NaN, as where every target is "
            "ignore_index. Return the loss of each step, 0 for such steps, or pass "
            'on_nonfinite="skip"; if they are padding, give them a mask'
        )
    return message


def nonfinite_parameter(params: Tree) -> str:
    """Describes the first parameter that is not finite; empty if all are finite."""
    return _first_leaf("params", params, "is not finite already")


def _first_step(
    name: str, tree: Tree, time: int, rows: int | None, position: int, first_row: int
) -> str:
    """Describes the first step, over all leaves, with a value that is not finite.

    ``time`` and ``rows`` are axes; None for ``rows`` that the tree does not have.
    """
    first_step: int | None = None
    description = ""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        bad = _nonfinite(leaf)
        if bad is None or not bad.any():
            continue
        step = _first_true(bad, time)
        if first_step is not None and step >= first_step:
            continue
        first_step = step
        description = f"{name}{keystr(path)} is first not finite at step {position + step}"
        if rows is not None and bad.dim() > max(rows, time):
            # Without the axis of time, an axis after it moves forward by one.
            row = _first_true(bad.select(time, step), rows - (rows > time))
            description += f", row {first_row + row}"
    return description


def _first_true(flags: Tensor, axis: int) -> int:
    """The first index along ``axis`` at which any flag is set."""
    flags = flags.movedim(axis, 0)
    return int(flags.reshape(len(flags), -1).any(1).nonzero()[0])


def _first_leaf(name: str, tree: Tree, predicate: str) -> str:
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if _is_bad(leaf):
            return f"{name}{keystr(path)} {predicate}"
    return ""


def _is_bad(leaf: Any) -> bool:
    bad = _nonfinite(leaf)
    return bad is not None and bool(bad.any())


def _nonfinite(leaf: Any) -> Tensor | None:
    """Flags of the values that are not finite; None for a leaf that cannot have any."""
    if not isinstance(leaf, Tensor) or not differentiable(leaf):
        return None
    return ~torch.isfinite(leaf)
