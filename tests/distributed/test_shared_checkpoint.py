"""Checkpoints that all ranks write, and go on from."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch.distributed import DeviceMesh

from ftbptt.distributed import RankFailed
from ftbptt.training import CheckpointError, Chunk, Events
from ftbptt.training.checkpoints import shared

from ..oracle import assert_close
from ..training.streams import stream
from .rank_runs import doubles, new_run, train, train_on
from .ranks import Ranks


def _resumed(
    mesh: DeviceMesh, kind: str, folder: str, cut: int | None, options: dict[str, Any]
) -> dict[str, Any]:
    options = {"checkpoint": folder, "checkpoint_every": 7, "resume": True, **options}
    if cut is None:
        return train(mesh, kind, **options)

    def fail(update: Any) -> None:
        if update.index == cut and mesh.get_rank() == 1:
            raise KeyError("cut off")

    try:
        train(mesh, kind, events=Events(after_update=fail), **options)
    except (KeyError, RankFailed):
        return {}
    raise AssertionError("it was not cut off")


@pytest.mark.parametrize("kind", ["flags", "chunks", "shuffled", "packed"])
def test_a_run_that_was_cut_off_goes_on(kind: str, two: Ranks, tmp_path: Path) -> None:
    undisturbed = two.call(train_on, kind, {})
    for cut in (5, 23):
        two.call(_resumed, kind, str(tmp_path / "run"), cut, {})
    found = two.call(_resumed, kind, str(tmp_path / "run"), None, {})
    assert found[0]["params"] == found[1]["params"] == undisturbed[0]["params"]
    assert found[0]["losses"] == undisturbed[0]["losses"][24:]
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["update-000000049", "update-000000050"]


@pytest.mark.parametrize("kind", ["flags", "packed", "tokens"])
def test_on_another_number_of_ranks(kind: str, two: Ranks, four: Ranks, tmp_path: Path) -> None:
    """The rows' states move with their rows, and no step is lost or repeated."""
    expected = train(None, kind)
    folder = str(tmp_path / "run")
    two.call(_resumed, kind, folder, 11, {})
    four.call(_resumed, kind, folder, 30, {})
    for found in two.call(_resumed, kind, folder, None, {}):
        expected["losses"] = expected["losses"][-len(found["losses"]) :]
        assert len(found["losses"]) == 19
        assert_close(doubles(found), doubles(expected))


def _written(mesh: DeviceMesh, folder: str, updates: int, resume: bool | None) -> list[str]:
    """What is said while a run is made, or the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(
                mesh, "tensors", checkpoint=folder, checkpoint_every=10, updates=updates,
                resume=resume,
            )  # fmt: skip
        except (CheckpointError, FileExistsError) as error:
            return [str(error)]
    return [str(warning.message) for warning in caught]


def test_a_damaged_checkpoint(two: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert two.call(_written, str(folder), 20, False) == [[], []]
    assert two.call(_written, str(folder), 20, True) == [[], []]
    last, before = folder / "update-000000020", folder / "update-000000010"
    for file in last.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for said in two.call(_written, str(folder), 30, True):
        assert len(said) == 1
        assert said[0].startswith(f"checkpoint {last}: damaged (")
        assert said[0].endswith(f"Using {before}.")
    assert not before.exists()  # there are two newer ones
    for file in folder.glob("*/*.distcp"):
        file.write_bytes(b"")
    for said in two.call(_written, str(folder), 30, True):
        assert said[0].endswith("To start over, delete the folder.")


def _killed_early(mesh: DeviceMesh, folder: str) -> list[str]:
    """A run that is killed when its first checkpoint is written."""
    run = new_run(mesh, checkpoint=folder, checkpoint_every=1, resume=True)
    next(run)
    next(run)  # saves first
    run._store.checkpoints._writing[1].result()  # type: ignore[union-attr]
    torch.distributed.barrier()
    return sorted(path.name for path in Path(folder).iterdir())


def test_what_is_there_of_runs_that_were_killed_early(two: Ranks, tmp_path: Path) -> None:
    """Old checkpoints do not pile up, and a folder that only looks like one stays."""
    notes = tmp_path / "run" / "update-notes"
    notes.mkdir(parents=True)
    for n in range(1, 5):
        names = two.call(_killed_early, str(tmp_path / "run"))[0]
        kept = range(max(1, n - 2), n + 1)  # the one that was read, one before it, and its own
        assert names == [f"update-{i:09d}" for i in kept] + ["update-notes"]


def test_one_that_is_not_whole_does_not_count(two: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two.call(_written, str(folder), 20, False)
    (folder / "update-000000020" / ".metadata").unlink()  # killed before it was done
    two.call(_written, str(folder), 20, True)
    assert (folder / "update-000000020" / ".metadata").exists()


def test_a_new_run_in_an_old_folder(two: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two.call(_written, str(folder), 30, False)
    for said in two.call(_written, str(folder), 10, None):
        assert said == [f"checkpoint: {folder} already exists. Pass resume=True to continue from "
                        "it, or resume=False to overwrite it."]  # fmt: skip
    assert two.call(_written, str(folder), 10, False) == [[], []]
    names = sorted(path.name for path in folder.iterdir())  # from the start on, a run of its own
    assert names == ["update-000000000.1", "update-000000010.1"]
    assert two.call(_resumes_at, str(folder)) == [10, 10]


def _resumes_at(mesh: DeviceMesh, folder: str) -> int:
    return new_run(mesh, checkpoint=folder, resume=True).index


def test_a_folder_that_was_copied(two: Ranks, tmp_path: Path) -> None:
    """Its files have the times at which they were copied, in any order."""
    two.call(_written, str(tmp_path / "run"), 20, False)
    for name in ("update-000000020", "update-000000010"):
        shutil.copytree(tmp_path / "run" / name, tmp_path / "copy" / name)
        for file in (tmp_path / "copy" / name).iterdir():
            file.touch()
    assert two.call(_resumes_at, str(tmp_path / "copy")) == [20, 20]


def _changed_after(mesh: DeviceMesh, folder: str) -> bool:
    """Parameters change while a checkpoint of them is written."""
    from ftbptt.distributed.ranks import Ranks as Group
    from ftbptt.training.checkpoints.shared import Parts, SharedCheckpoints

    own = SharedCheckpoints(Path(folder), Group(mesh), lambda leaf: 1)
    weight, rows = torch.zeros(1 << 20), torch.full((3, 2, 5), float(mesh.get_rank()))
    own.save(1, Parts({"w": [weight], "n": 3, "none": None}, mesh.get_rank(), {"h": (rows, None)}))
    weight += 1
    rows += 10
    own.wait()
    found = own.load()
    assert found is not None
    expected = (3, None, mesh.get_rank())
    assert (found.common["n"], found.common["none"], found.by_rank) == expected
    assert not found.common["w"][0].any()
    return torch.equal(found.rows["h"][0] + 10, rows) and found.rows["h"][1] is None


def test_written_while_the_run_goes_on(two: Ranks, tmp_path: Path) -> None:
    assert two.call(_changed_after, str(tmp_path)) == [True, True]


def _with_numbers(mesh: DeviceMesh, folder: str, value: Any) -> Any:
    """What is kept of a value of the first rank, or the error."""
    run = new_run(mesh, updates=2, checkpoint=folder)
    if mesh.get_rank() == 0:
        run.extra["best"] = value
    try:
        for _ in run:
            pass
    except TypeError as error:
        return str(error)
    again = new_run(mesh, updates=2, checkpoint=folder, resume=True)
    return again.extra.get("best")


def test_numbers_of_numpy(two: Ranks, tmp_path: Path) -> None:
    assert two.call(_with_numbers, str(tmp_path / "run"), numpy.float64(0.5)) == [0.5, None]


def test_what_could_not_be_read_again(two: Ranks, tmp_path: Path) -> None:
    for said in two.call(_with_numbers, str(tmp_path / "run"), numpy.ones(2)):
        assert "['best'], a numpy.ndarray, could not be read again with weights_only=True" in said


def _two_runs(mesh: DeviceMesh, folder: str) -> str:
    """Made on one folder before either begins; what the second one says."""
    first, second = (new_run(mesh, updates=2, checkpoint=folder) for _ in range(2))
    list(first)
    try:
        next(second)
    except FileExistsError as error:
        return str(error)
    return "no error"


def test_two_runs_that_are_given_one_folder(two: Ranks, tmp_path: Path) -> None:
    for said in two.call(_two_runs, str(tmp_path / "run")):
        assert "was written by another run since train_stream was called. Give each" in said


def _no_folder(mesh: DeviceMesh, path: str) -> str:
    try:
        train(mesh, "tensors", checkpoint=path)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_file_where_a_folder_should_be(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "run.pt").touch()
    for said in two.call(_no_folder, str(tmp_path / "run.pt")):
        assert said.startswith(f"ValueError: checkpoint: {tmp_path / 'run.pt'} is a file. With a")
    for said in two.call(_no_folder, str(tmp_path / "run.pt" / "run")):
        assert said.startswith(f"OSError: checkpoint: no file can be written in {tmp_path}")


def _folders_of_their_own(mesh: DeviceMesh, folder: str, kind: str) -> str:
    path = Path(folder, str(mesh.get_rank()))
    if kind == "a file" and mesh.get_rank() == 1:
        path.touch()
    try:
        new_run(mesh, checkpoint=path)
    except (ValueError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_folders_that_are_not_the_same(two: Ranks, tmp_path: Path) -> None:
    """Each rank would keep its part for itself, without a word, and no run could go on from it."""
    for said in two.call(_folders_of_their_own, str(tmp_path), "a folder"):
        assert said.startswith(
            f"ValueError: checkpoint: rank 1 does not see in {tmp_path / '1'} what rank 0 writes "
            f"in {tmp_path / '0'}. Give all ranks the same folder, on a disk that they share."
        )
    assert [list(tmp_path.glob(f"{rank}/*")) for rank in range(2)] == [[], []]


def test_a_file_on_one_rank(two: Ranks, tmp_path: Path) -> None:
    """The other rank is told, and does not wait."""
    first, second = two.call(_folders_of_their_own, str(tmp_path), "a file")
    assert second == (
        f"ValueError: checkpoint: {tmp_path / '1'} is a file. With a mesh, give the name of a "
        "folder."
    )
    assert first == f"RankFailed: rank 1: {second}"


def _finished_again(mesh: DeviceMesh, folder: str) -> list[str]:
    """One rank alone asks once more for what all have done."""
    run = new_run(mesh, checkpoint=folder)
    for update in run:
        if update.index == 4:
            break
    if mesh.get_rank() == 0:
        run.finish()
        run.finish()
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_run_that_was_left_is_finished_by_one(two: Ranks, tmp_path: Path) -> None:
    assert two.call(_finished_again, str(tmp_path / "run")) == [["update-000000005"]] * 2


def _saved_by_one(mesh: DeviceMesh, folder: str, every: int) -> tuple[int, str]:
    run = new_run(mesh, checkpoint=folder, checkpoint_every=every)
    try:
        for update in run:
            if update.index == 2 and mesh.get_rank() == 0:
                run.save()
    except RuntimeError as error:
        return run.index, str(error)
    return run.index, "no error"


@pytest.mark.parametrize("every", [1000, 3])
def test_one_rank_alone_saves(every: int, two: Ranks, tmp_path: Path) -> None:
    """The others would make an update without it, and then wait for it until the time-out.

    So they would if they save just then because that is due.
    """
    for index, said in two.call(_saved_by_one, str(tmp_path / "run"), every):
        assert index == 3
        assert said.startswith("save: rank 0 saves the run, but not all ranks do: each writes its")


def _saved_twice(mesh: DeviceMesh, folder: str) -> list[str]:
    """Killed in the second: what the first has written is still there."""
    run = new_run(mesh, checkpoint=folder)
    next(run)
    run.save()

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with (
        mock.patch("torch.distributed.checkpoint.async_save", killed),
        pytest.raises(KeyboardInterrupt),
    ):
        run.save()
    return [path.parent.name for path in Path(folder).glob("*/.metadata")]


def test_a_whole_one_is_not_written_over(two: Ranks, tmp_path: Path) -> None:
    assert two.call(_saved_twice, str(tmp_path / "run")) == [["update-000000001"]] * 2


def _groups_made(mesh: DeviceMesh, folder: str) -> int:
    made = []
    for n in range(3):
        for _ in new_run(mesh, checkpoint=f"{folder}/{n}", updates=1):
            pass
        made.append(len(torch.distributed.distributed_c10d._world.pg_map))
    return made[2] - made[0]


def test_runs_share_the_group_that_writes(two: Ranks, tmp_path: Path) -> None:
    assert two.call(_groups_made, str(tmp_path)) == [0, 0]


class Ragged:
    """A source whose rows' steps come to an end at different places."""

    def __init__(self, columns: slice = slice(0, 4), total: int = 20) -> None:
        self.columns, self.total = columns, total

    def begin(self, epoch: int) -> None:
        pass

    def read(self, start: int, stop: int) -> Chunk | None:
        x, y = (leaf[start : min(stop, self.total), self.columns] for leaf in stream(20, 4))
        return Chunk(x, y) if start < self.total else None

    def share(self, rank: int, size: int) -> Ragged:
        return Ragged(slice(2 * rank, 2 * rank + 2), 20 - 12 * rank) if size == 2 else self


def _ragged(mesh: DeviceMesh, folder: str, updates: int | None) -> list[int]:
    state = (torch.zeros(4, 5).double(),) * 2
    run = new_run(mesh, data=Ragged(), checkpoint=folder, resume=True, updates=updates, state=state)
    return [update.position for update in run]


def test_a_rank_whose_data_had_ended_before(two: Ranks, tmp_path: Path) -> None:
    assert two.call(_ragged, str(tmp_path / "run"), 3) == [[4, 8, 12], [4, 8, 8]]
    assert two.call(_ragged, str(tmp_path / "run"), None) == [[16, 20], [8, 8]]


def test_where_another_device_is_the_default() -> None:
    tree = {"run": [torch.ones(2), 3, {"state": torch.zeros(1)}]}
    with torch.device("meta"):
        found = shared._unflatten("run", shared._flatten("run", tree))
    assert repr(found) == repr(tree)


def _saved_within_an_update(mesh: DeviceMesh, folder: str | None) -> list[float]:
    """By an event, where windows were accumulated already."""

    def save(window: Any, output: Any) -> None:
        if folder is not None and window.index % 3 == 1:
            run.save()

    run = new_run(mesh, checkpoint=folder, accumulate=3, events=Events(after_window=save))
    return [float(update.grad_norm) for update in run]


def test_a_run_that_is_saved_within_an_update(two: Ranks, tmp_path: Path) -> None:
    """All windows of that update count."""
    expected = two.call(_saved_within_an_update, None)
    assert two.call(_saved_within_an_update, str(tmp_path / "run")) == expected
