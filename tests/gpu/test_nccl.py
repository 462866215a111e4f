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

from ftbptt import distributed
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


def _ahead_of_queued_work(mesh: DeviceMesh) -> tuple[list[float], bool]:
    """What ranks tell each other, and whether the GPU has done by then what was queued before."""
    device = torch.device("cuda", torch.cuda.current_device())
    ranks, done = distributed.ranks.Ranks(mesh), torch.cuda.Event()
    ranks.sum_numbers([0.0], device)
    matrix = torch.randn(8192, 8192, device=device)
    for _ in range(50):
        matrix = (matrix @ matrix).clamp(-1, 1)
    done.record()
    sums = ranks.sum_numbers([1.0, 0.5], device)
    return sums, done.query()


def test_numbers_do_not_wait_for_the_gpu(ranks: Ranks) -> None:
    found = ranks.call(_ahead_of_queued_work)
    assert found == [([1.0 * len(found), 0.5 * len(found)], False)] * len(found)


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
