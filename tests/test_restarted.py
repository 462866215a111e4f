"""Ranks that are killed come back, and end where an undisturbed run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .killable_ranks import UPDATES

SIZE = 2


def run(folder: Path, kills: int) -> dict[str, Tensor]:
    """As torchrun does it: when a rank dies, all are ended and started again."""
    folder.mkdir()
    for attempt in range(kills + 1):
        shared = {
            **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(SIZE),
            "MEETING": str(folder / f"meeting{attempt}"),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.killable_ranks", str(folder), str(kills)]
        ranks = [
            subprocess.Popen(
                command, env={**shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
            )
            for rank in range(SIZE)
        ]
        try:
            # The others end by themselves: with an error that says what happened.
            said = [rank.communicate(timeout=120)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        codes = [rank.returncode for rank in ranks]
        if attempt < kills:
            assert -signal.SIGKILL in codes, said
            alive = said[1 - codes.index(-signal.SIGKILL)]
            # It was not there yet when the other one was killed, or it tells.
            assert "another rank died" in alive or "connectFullMesh" in alive, alive
    assert codes == [0] * SIZE, said
    result: dict[str, Tensor] = torch.load(folder / "result.pt")
    return result


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_ranks_come_back(kills: int, tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed", 0)
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
