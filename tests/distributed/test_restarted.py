"""Ranks that are killed come back, and end where an undisturbed run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ..forks import fork_context
from . import killable_ranks
from .killable_ranks import UPDATES, run_as_rank

SIZE = 2


class Attempt:
    """The ranks, as torchrun starts them; an update takes ``pace`` seconds, time to be killed."""

    def __init__(self, folder: Path, kills: int, number: int, pace: float = 0.01) -> None:
        shared = {
            "WORLD_SIZE": str(SIZE), "MEETING": str(folder / f"meeting{number}"),
            "TORCHELASTIC_RESTART_COUNT": str(number), "PACE": str(pace),
        }  # fmt: skip
        self._errors = [folder / f"errors{number}-{rank}" for rank in range(SIZE)]
        self._ranks = [
            fork_context().Process(
                target=run_as_rank,
                args=(folder, kills, {**shared, "RANK": str(rank)}, self._errors[rank]),
            )
            for rank in range(SIZE)
        ]
        for rank in self._ranks:
            rank.start()

    def interrupt(self) -> None:
        for rank in self._ranks:
            assert rank.pid is not None
            os.kill(rank.pid, signal.SIGINT)

    def ended(self) -> tuple[list[int | None], list[str]]:
        """Their exit codes (None: it hung), and what they said; they end by themselves."""
        for rank in self._ranks:
            rank.join(120)
        codes = [rank.exitcode for rank in self._ranks]
        for rank in self._ranks:
            rank.kill()
        return codes, [file.read_text() for file in self._errors]


def run(folder: Path, kills: int) -> dict[str, Tensor]:
    """As torchrun does it: when a rank dies, all are ended and started again."""
    folder.mkdir()
    for attempt in range(kills + 1):
        codes, said = Attempt(folder, kills, attempt).ended()
        if attempt < kills:
            assert -signal.SIGKILL in codes, said
            alive = said[1 - codes.index(-signal.SIGKILL)]
            # It was not there yet when the other one was killed, or it tells.
            assert "another rank died" in alive or "connectFullMesh" in alive, alive
    assert codes == [0] * SIZE, said
    result: dict[str, Tensor] = torch.load(folder / "result.pt")
    return result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """By torchrun itself."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = "torch.distributed.run --standalone --nproc-per-node 2 -m"
    ended = subprocess.run(
        [sys.executable, "-m", *command.split(), killable_ranks.__name__, str(folder), "0"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PACE": "0"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Tensor] = torch.load(folder / "result.pt")
    return result


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_ranks_come_back(kills: int, undisturbed: dict[str, Tensor], tmp_path: Path) -> None:
    found = run(tmp_path / "killed", kills)
    for name, value in undisturbed.items():
        assert torch.equal(found[name], value), name
    for rank in (0, 1):
        lines = (tmp_path / "killed" / f"indices{rank}").read_text().splitlines()
        made = [tuple(map(int, line.split())) for line in lines]
        assert max(attempt for attempt, _ in made) == kills
        # No update is left out: each attempt goes on from one that all ranks have.
        reached = 0
        for attempt in sorted({own for own, _ in made}):
            indices = [index for own, index in made if own == attempt]
            assert indices == list(range(indices[0], indices[0] + len(indices)))
            assert indices[0] <= reached
            reached = max(reached, indices[-1] + 1)
        assert reached == UPDATES


def updates(folder: Path, rank: int) -> list[int]:
    path = folder / f"indices{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[1]) for line in lines]


def test_ctrl_c_leaves_a_checkpoint(undisturbed: dict[str, Tensor], tmp_path: Path) -> None:
    """All ranks are told by the terminal; all of them stop behind the same update, and keep it."""
    folder = tmp_path / "stopped"
    folder.mkdir()
    ranks = Attempt(folder, 0, 0, pace=0.3)
    until = time.monotonic() + 60
    while len(updates(folder, 1)) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    ranks.interrupt()
    codes, said = ranks.ended()
    assert 0 not in codes, said
    assert all("KeyboardInterrupt" in own or "has left the run" in own for own in said), said
    made = max(updates(folder, 0)[-1], updates(folder, 1)[-1])
    kept = max(path.name for path in (folder / "run").iterdir())
    assert kept in (f"update-{made + 1:09d}", f"update-{made + 2:09d}")  # or one not told of yet
    codes, said = Attempt(folder, 0, 1).ended()
    assert codes == [0, 0], said
    found = torch.load(folder / "result.pt")
    for name, value in undisturbed.items():
        assert torch.equal(found[name], value), name
    again = updates(folder, 0)
    assert again[again.index(int(kept[7:])) :] == list(range(int(kept[7:]), UPDATES))
