"""Ctrl-C, kept back while something must not be left half done."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

_LATER = b"\nftbptt: Ctrl-C takes effect once what is being compiled or updated is done.\n"


class uninterrupted:
    """A context in which Ctrl-C waits for the end of the block, in the main thread."""

    def __enter__(self) -> None:
        self._wanted = False
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
        if self._before is not None:  # else a handler that Python could not put back
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._wanted:  # who presses it again wonders: a compilation may take long
            os.write(2, _LATER)
        self._wanted = True

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._wanted:
                signal.raise_signal(signal.SIGINT)
