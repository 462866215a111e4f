"""Runs in a process that may be killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ftbptt.training import load_checkpoint

from .resuming import Run, assert_same

NAME = "dropout, noisy"


def _begun(folder: Path) -> Run:
    """For ever, with a checkpoint at each update; resumed from another seed than it began with."""
    file = folder / "run.pt"
    seed = os.getpid() if file.exists() else 0
    return Run(NAME, seed, file, resume=True, checkpoint_every=1, epochs=None)


def train(folder: Path) -> None:
    _begun(folder).go()


def train_until_interrupted(folder: Path) -> None:
    """Ends with 0 if the checkpoint is of the very last update."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = _begun(folder)
    try:
        run.go()
    except KeyboardInterrupt:
        saved = load_checkpoint(folder / "run.pt")
        assert saved["index"] == run.updates.index
        assert_same(saved["learner"]["params"], list(run.params.values()))
