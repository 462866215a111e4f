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

from .killable_ranks import UPDATES

SIZE = 2


def start(
    folder: Path, kills: int, attempt: int, pace: float = 0.01
) -> list[subprocess.Popen[str]]:
    """The ranks, as torchrun starts them; an update takes ``pace`` seconds, time to be killed."""
    shared = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(SIZE),
        "MEETING": str(folder / f"meeting{attempt}"), "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "PACE": str(pace),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.distributed.killable_ranks", str(folder), str(kills)]
    return [
        subprocess.Popen(
            command, env={**shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(SIZE)
    ]


def ended(ranks: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Their exit codes, and what they said; they end by themselves."""
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], said


def run(folder: Path, kills: int) -> dict[str, Tensor]:
    """As torchrun does it: when a rank dies, all are ended and started again."""
    folder.mkdir()
    for attempt in range(kills + 1):
        codes, said = ended(start(folder, kills, attempt))
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
    return run(tmp_path_factory.mktemp("runs") / "undisturbed", 0)


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
    ranks = start(folder, 0, 0, pace=0.3)
    until = time.monotonic() + 60
    while len(updates(folder, 1)) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    codes, said = ended(ranks)
    assert 0 not in codes, said
    assert all("KeyboardInterrupt" in own or "has left the run" in own for own in said), said
    made = max(updates(folder, 0)[-1], updates(folder, 1)[-1])
    kept = max(path.name for path in (folder / "run").iterdir())
    assert kept in (f"update-{made + 1:09d}", f"update-{made + 2:09d}")  # or one not told of yet
    codes, said = ended(start(folder, 0, 1))
    assert codes == [0, 0], said
    found = torch.load(folder / "result.pt")
    for name, value in undisturbed.items():
        assert torch.equal(found[name], value), name
    again = updates(folder, 0)
    assert again[again.index(int(kept[7:])) :] == list(range(int(kept[7:]), UPDATES))
