"""A few processes that talk to each other, for tests: started once, called many times."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ..forks import fork_context

_TIME_OUT = 60.0  # seconds, for any one call


def _work(rank: int, size: int, device: str, meeting: str, pipe: Any) -> None:
    """A rank: calls what it is sent, sends back what that returns or how it failed."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts aside has none
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{meeting}",
        rank=rank, world_size=size, timeout=timedelta(seconds=_TIME_OUT / 2),
    )  # fmt: skip
    mesh = torch.distributed.init_device_mesh(device, (size,))
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            pipe.send((True, function(mesh, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    torch.distributed.destroy_process_group()


class Ranks:
    """``size`` processes; ``call(function, *arguments)`` runs ``function(mesh, *arguments)``.

    ``device``: "cpu", or "cuda" for a GPU for each.
    """

    def __init__(self, size: int, device: str = "cpu") -> None:
        # A fork cannot use a GPU that its parent has looked at.
        context = multiprocessing.get_context("spawn") if device == "cuda" else fork_context()
        self._folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self._folder.name) / "meeting")
        self._pipes, self._processes = [], []
        for rank in range(size):
            own, other = context.Pipe()
            arguments = rank, size, device, meeting, other
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self._pipes.append(own)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returns; raises RuntimeError with the traceback of one that fails."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_TIME_OUT):
                self.stop()
                raise RuntimeError(f"rank {rank} hangs")
            answers.append(pipe.recv())
        for rank, (fine, answer) in enumerate(answers):
            if not fine:
                raise RuntimeError(f"rank {rank}: {answer}")
        return [answer for _, answer in answers]

    def stop(self) -> None:
        """Ends the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()
