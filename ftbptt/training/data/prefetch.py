"""Moving windows to the device, ahead of their use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._trees import tree_leaves
from .chunk import Chunk, map_leaves


class Mover:
    """Moves chunks to a device (None: nowhere).

    To a GPU, from pinned memory on a separate CUDA stream, so that the copy runs while the device
    works on the previous window.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.aside = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.aside else None

    def start(self, chunk: Chunk) -> tuple[Chunk, torch.cuda.Event | None]:
        """Begins to move a chunk. Pass the result to :meth:`wait` before the chunk is used."""
        if self.device is None:
            return chunk, None
        if self._stream is None:
            return self._move(chunk), None
        with torch.cuda.stream(self._stream):
            moved = self._move(chunk)
            return moved, self._stream.record_event()

    def wait(self, chunk: Chunk, copied: torch.cuda.Event | None) -> Chunk:
        """The chunk, safe to use on the current CUDA stream."""
        if copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for leaf in tree_leaves(tuple(chunk)):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(stream)  # its memory was allocated on the other one
        return chunk

    def _move(self, chunk: Chunk) -> Chunk:
        def move_leaf(leaf: Any) -> Any:
            if leaf.device == self.device:
                return leaf
            if self.aside and leaf.device.type == "cpu":
                leaf = leaf.pin_memory()
            return leaf.to(self.device, non_blocking=True)

        moved: Chunk = map_leaves(move_leaf, chunk)
        return moved
