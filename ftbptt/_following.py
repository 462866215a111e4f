"""Calls of a segment one after the other, each with the state that the one before has returned.

To find out what all arguments look like takes a tenth of the time of a small cell's segment.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor

from ._output import SegmentOutput
from ._recall import Known
from ._segment import TrainSegment
from ._trees import tree_leaves

Tree = Any


class Following:
    """following : params, state, x[K, ...], y[K, ...] -> SegmentOutput

    As the segment. A state that it returned itself is not looked at again, only what may have
    changed since: the parameters' tensors, the data, the module.
    """

    def __init__(self, segment: TrainSegment) -> None:
        self.segment = segment
        self._known: Known | None = None
        self._params: list[Tensor] = []
        self._state: list[Tensor] = []  # that was returned last
        self._looks: tuple[Any, ...] = ()

    def __call__(self, params: Tree, state: Tree, x: Tree, y: Tree) -> SegmentOutput:
        own: list[Tensor] = []
        known = self._known
        if (
            known is not None
            and type(params) is dict
            and type(x) is type(y) is Tensor
            and _flatten(state, own)
            and len(own) == len(self._state)
            and all(map(is_, own, self._state))
            and self._looks_of(params, x, y) == self._looks
        ):
            result = self.segment.again(known, [self._params, own, [x], [y]], params, state)
        else:
            result = self.segment(params, state, x, y)
            self._known = None
            if type(params) is dict and type(x) is type(y) is Tensor:
                self._known = self.segment.known(params, state, x, y)
                self._params = tree_leaves(params)
                self._looks = self._looks_of(params, x, y)
        self._state = []
        _flatten(result.state, self._state)
        return result

    def _looks_of(self, params: dict[str, Any], x: Tensor, y: Tensor) -> tuple[Any, ...]:
        device = x.device
        leaves = self._params if len(self._params) == len(params) else ()
        same = all(map(is_, params.values(), leaves)) if leaves else False
        return (
            *(same, *params, x.shape, y.shape, x.dtype, y.dtype, device, y.device),
            *[(p.shape, p.dtype) for p in leaves],
            *self.segment.surroundings(device.type),
        )


def _flatten(tree: Tree, leaves: list[Tensor]) -> bool:
    """Appends the tensors of a tree; whether that is all it has."""
    kind = type(tree)
    if kind is Tensor:
        leaves.append(tree)
        return True
    if kind is not tuple and kind is not list and kind is not dict:
        return False
    parts = tree.values() if kind is dict else tree
    return all(_flatten(part, leaves) for part in parts)
