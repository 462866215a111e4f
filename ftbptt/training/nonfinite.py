"""A loss that is not finite: where it came from, and what it does to a run."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from .._layout import Layout
from .._output import SegmentOutput
from .._trees import keystr, tree_flatten_with_path, tree_leaves
from .chunk import Chunk
from .learner import Learner

Tree = Any


class Guard:
    """Looks at losses and norms, and does what ``mode`` says: "stop", "skip" or "raise"."""

    def __init__(self, mode: str, learner: Learner) -> None:
        self.mode, self.learner = mode, learner
        self.lost = False  # the parameters are not finite either

    def is_sound(self, value: Tensor) -> bool:
        """Whether it is finite, if that is to be known at once; on a CPU it costs nothing."""
        if not value.is_cpu and self.mode != "skip":
            return True
        return bool(torch.isfinite(value).all()) if value.dim() else math.isfinite(value)

    def stops(self, what: str, stopping: str) -> bool:
        """Tells the caller what was found, in a warning; whether the run is to stop.

        Raises FloatingPointError if that is the mode.
        """
        mode = self.mode
        if nonfinite_parameter(self.learner.trained):
            self.lost = True
            if mode == "skip":  # each window from here on would be left out
                mode, stopping = "stop", "The run stops: parameters that are not finite stay so."
        then = {"stop": stopping, "skip": "It is left out.", "raise": ""}[mode]
        message = f"ftbptt: {what}. {then}".strip()
        if mode == "raise":
            raise FloatingPointError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return mode == "stop"


def nonfinite_window(
    params: Tree,
    result: SegmentOutput,
    chunk: Chunk,
    layout: Layout,
    position: int,
    row: int | None,
) -> str:
    """In words: the first step and row whose input or output is not finite, the first parameter.

    ``position`` is the first step of the chunk in the epoch, ``row`` its first row in the batch;
    None for data without rows.
    """
    found = [
        _first_step("x", chunk.x, layout, position, row),
        _first_step("out", result.out, layout, position, row),
        nonfinite_parameter(params),
        _first_leaf("grads", result.grads, "is the first gradient that is not finite"),
    ]
    words = [text for text in found if text]
    return "; ".join(words) if words else "parameters, inputs, outputs and gradients are finite"


def nonfinite_parameter(params: Tree) -> str:
    """In words: the first parameter that is not finite, if there is one."""
    return _first_leaf("params", params, "is not finite already")


def _first_step(name: str, tree: Tree, layout: Layout, position: int, row: int | None) -> str:
    time, rows = layout.x_time, layout.x_rows
    first: tuple[int, str] | None = None
    for leaf in tree_leaves(tree):
        bad = _nonfinite(leaf)
        if bad is None or not bad.any():
            continue
        bad = bad.movedim(time, 0)
        step = int(bad.reshape(len(bad), -1).any(1).nonzero()[0])
        words = f"step {position + step}"
        if row is not None:  # without time, the rows are on the axis that is left of the two
            own = bad[step].movedim(rows - (rows > time), 0)
            words += f", row {row + int(own.reshape(len(own), -1).any(1).nonzero()[0])}"
        if first is None or step < first[0]:
            first = step, words
    return "" if first is None else f"{name} is first not finite at {first[1]}"


def _first_leaf(name: str, tree: Tree, words: str) -> str:
    for path, leaf in tree_flatten_with_path(tree)[0]:
        bad = _nonfinite(leaf)
        if bad is not None and bad.any():
            return f"{name}{keystr(path)} {words}"
    return ""


def _nonfinite(leaf: Any) -> Tensor | None:
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return None
    return ~torch.isfinite(leaf)
