"""Ranks that train together on GPUs, through NCCL: one for each GPU there is.

``make test-gpu``; elsewhere skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import DeviceMesh

from ftbptt.training import Events

from ..distributed.rank_runs import ROWS, doubles, new_run, train, train_on
from ..distributed.ranks import Ranks
from ..oracle import assert_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(min(torch.cuda.device_count(), ROWS), "cuda")
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("tensors", {"clip_norm": 0.05, "k2": 9}),
        ("tensors", {"functional": True, "accumulate": 3}),
        ("flags", {"clip_norm": 0.1}),
        ("packed", {"clip_value": 0.01}),
        ("tokens", {"k1": 10, "micro_batches": 2}),
    ],
)
def test_ranks_are_one_process(kind: str, options: dict[str, Any], ranks: Ranks) -> None:
    expected = doubles(train(None, kind, **options))
    for found in ranks.call(train_on, kind, options):
        assert_close(doubles(found), expected)


def _in_two_runs(mesh: DeviceMesh, folder: str) -> dict[str, Any]:
    """A run that fails, and one that goes on from what it has written."""
    options = {"checkpoint": folder, "checkpoint_every": 7, "resume": True}

    def fail(update: Any) -> None:
        if update.index == 23:
            raise KeyError("cut off")

    with pytest.raises(KeyError, match="cut off"):
        train(mesh, "flags", events=Events(after_update=fail), **options)
    return train(mesh, "flags", **options)


def test_a_run_goes_on_from_its_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    undisturbed = ranks.call(train_on, "flags", {})
    for found in ranks.call(_in_two_runs, str(tmp_path / "run")):
        assert found["params"] == undisturbed[0]["params"]
        assert found["losses"] == undisturbed[0]["losses"][-len(found["losses"]) :]
        assert 0 < len(found["losses"]) < 50


def _on_cpu(mesh: DeviceMesh) -> str:
    with pytest.raises(ValueError, match="is on cpu") as caught:
        new_run(mesh)
    return str(caught.value)


def test_parameters_on_another_device(ranks: Ranks) -> None:
    for said in ranks.call(_on_cpu):
        assert said == (
            "params['cell.weight_ih']: is on cpu, but the ranks of mesh communicate from cuda "
            "(cuda:nccl). Move the parameters there, or give init_process_group a backend for both."
        )
