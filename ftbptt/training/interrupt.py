"""Ctrl-C, kept back while something must not be left half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class uninterrupted:
    """A context in which Ctrl-C waits for the end of the block, in the main thread."""

    def __enter__(self) -> None:
        self._wanted: tuple[int, FrameType | None] | None = None
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._wanted = number, frame

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._wanted is not None and callable(self._before):
                self._before(*self._wanted)
