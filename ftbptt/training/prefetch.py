"""Windows on their way to the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._trees import tree_leaves, tree_map
from .chunk import Chunk


class Mover:
    """Moves chunks to a device; to a GPU from pinned memory on a stream of its own.

    So that the copy runs while the device works on the window before.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.aside = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.aside else None

    def start(self, chunk: Chunk) -> tuple[Chunk, Any]:
        """The chunk on the device, to be used after :meth:`wait`, which takes what is returned."""
        if self.device is None:
            return chunk, None
        if self._stream is None:
            return self._moved(chunk), None
        with torch.cuda.stream(self._stream):
            moved = self._moved(chunk)
            return moved, self._stream.record_event()

    def wait(self, chunk: Chunk, moved: Any) -> Chunk:
        """The chunk, safe to use on the current stream."""
        if moved is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(moved)
            for leaf in tree_leaves(tuple(chunk)):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(stream)
        return chunk

    def _moved(self, chunk: Chunk) -> Chunk:
        def move(leaf: Any) -> Any:
            if leaf is None or leaf.device == self.device:
                return leaf
            if self.aside and leaf.device.type == "cpu":
                leaf = leaf.pin_memory()
            return leaf.to(self.device, non_blocking=True)

        return Chunk(*tree_map(move, tuple(chunk)))
