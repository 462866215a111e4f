"""A run of several ranks under torchrun, of which one is killed in each attempt.

torchrun --nproc-per-node 2 --max-restarts 9 -m tests.distributed.killable_ranks FOLDER KILLS
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from ftbptt import make_train_segment
from ftbptt.training import Events, PackedSequences, train_stream

from ..cells.problems import named
from ..training.streams import cross_entropy, stream, tagger

ROWS = 4
UPDATES = 60


def main(folder: Path, kills: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    torch.set_num_threads(1)
    meeting = os.environ.get("MEETING")
    dist.init_process_group(
        "gloo", init_method=None if meeting is None else f"file://{meeting}",
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip
    rank, size, group = dist.get_rank(), dist.get_world_size(), weakref.ref(dist.group.WORLD)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    chance = random.Random(attempt)
    victim, after = chance.randrange(size), chance.uniform(0.0, 0.5)

    module = tagger()
    params = named(module)
    segment = make_train_segment(module, cross_entropy, backend="eager")
    sequences = [tuple(leaf[:, 0] for leaf in stream(n, 1, seed=n)) for n in range(2, 40)]
    run = train_stream(
        segment, params, (torch.zeros(ROWS, 5).double(),) * 2,
        PackedSequences(sequences, rows=ROWS),
        torch.optim.Adam(params.values(), lr=0.01), k1=4, epochs=None, updates=UPDATES,
        clip_norm=0.5, progress=False, mesh=dist.init_device_mesh("cpu", (size,)),
        checkpoint=folder / "run", checkpoint_every=5, resume=True,
        events=Events(after_update=lambda _: time.sleep(float(os.environ["PACE"]))),
    )  # fmt: skip
    if attempt < kills and rank == victim:
        killer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
    with (folder / f"indices{rank}").open("a") as file:
        for update in run:
            print(attempt, update.index, file=file, flush=True)
    if rank == 0:
        torch.save({name: p.detach() for name, p in params.items()}, folder / "result.pt")
    dist.destroy_process_group()
    # Its threads may end the process that shuts down, if they still have something to let go of.
    assert group() is None, "something holds the process group after its end"


def run_as_rank(folder: Path, kills: int, environment: dict[str, str], errors: Path) -> None:
    """In a process of its own, with what torchrun would set."""
    os.environ.update(environment)
    with errors.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    main(folder, kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
