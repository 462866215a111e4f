"""Processes that need not import or trace anything: forks of one that has done it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def fork_context() -> ForkServerContext:
    """Its processes begin with what ``prepared`` has imported and traced."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.prepared"])
    return context
