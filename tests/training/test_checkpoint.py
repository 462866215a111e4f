"""Checkpoint files: whole or not there, and never lost."""

from __future__ import annotations

import datetime
import io
import os
import random
import warnings
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ftbptt._random_state import random_state, same_random_state, set_random_state
from ftbptt.training import CheckpointError, load_checkpoint, save_checkpoint
from ftbptt.training.checkpoints.file import as_plain, from_plain, has_checkpoint, previous

from .resuming import assert_same

CONTENT = {
    "step": 3,
    "lr": 0.1,
    "none": None,
    "name": "run",
    "flags": (True, False),
    "nested": [{"a": torch.arange(7)}, [torch.ones(2, 3, dtype=torch.float64)]],
    5: OrderedDict(milestones=Counter([1, 1, 4])),
    "halves": [torch.ones(3).bfloat16(), torch.ones(1).half(), torch.ones(2) + 1j],
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two of them, one after the other."""
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"step": 1, "w": torch.ones(11)})
    save_checkpoint(path, {"step": 2, "w": torch.ones(11)})
    return path


def step(path: Path) -> int:
    """Of what is loaded, without a warning, which would be an error here."""
    content: dict[str, Any] = load_checkpoint(path)
    assert torch.equal(content["w"], torch.ones(11))
    return int(content["step"])


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.pt"
    save_checkpoint(path, CONTENT)
    for found in (load_checkpoint(path), load_checkpoint(str(path))):
        assert found.keys() == CONTENT.keys()
        assert found["flags"] == (True, False)
        assert found[5] == CONTENT[5]
        assert_same(found, CONTENT)
    assert_same(torch.load(path, weights_only=True), CONTENT)  # torch reads it as well
    assert [file.name for file in path.parent.iterdir()] == ["run.pt"]


def test_the_one_before_is_kept(saved: Path) -> None:
    assert step(saved) == 2
    assert step(previous(saved)) == 1
    save_checkpoint(saved, {"step": 3, "w": torch.ones(11)})
    assert (step(saved), step(previous(saved))) == (3, 2)
    assert sorted(file.name for file in saved.parent.iterdir()) == ["run.pt", "run.pt.previous"]


def test_none(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path / "run.pt")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*run.pt"):
        load_checkpoint(tmp_path / "run.pt")


# -- damaged --------------------------------------------------------------------------------------


def test_cut_off_at_any_length(saved: Path) -> None:
    data = saved.read_bytes()
    lengths = {0, 1, 13, 45, 46, 47, len(data) - 46, len(data) - 1, *range(0, len(data), 61)}
    for length in sorted(lengths):
        saved.write_bytes(data[:length])
        words = rf"checkpoint .*run.pt: cut off, or not .* \({length} bytes\). Using .*prev"
        with pytest.warns(UserWarning, match=words):
            assert load_checkpoint(saved)["step"] == 1
    saved.write_bytes(data)
    assert step(saved) == 2


def test_a_byte_is_another_anywhere(saved: Path) -> None:
    data = saved.read_bytes()
    for at in [*range(0, len(data), 37), len(data) - 46, len(data) - 33, len(data) - 1]:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        saved.write_bytes(changed)
        with pytest.warns(UserWarning, match=r"run.pt: (damaged|cut off)"):
            assert load_checkpoint(saved)["step"] == 1


def test_longer_than_it_was(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"\0")
    with pytest.warns(UserWarning, match="cut off, or not written by train_stream"):
        assert load_checkpoint(saved)["step"] == 1


def test_both_are_damaged(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:100])
    before = bytearray(previous(saved).read_bytes())
    before[200] ^= 8
    previous(saved).write_bytes(before)
    words = (
        r"run.pt: cut off, or not written by .* \(100 bytes\)\. checkpoint .*run.pt.previous: "
        r"damaged, its content is not what was written\. Give another path; or, to start over, "
        r"delete the files\."
    )
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(saved)
    assert has_checkpoint(saved)  # a run that is to be resumed does not start anew by itself


def test_only_one_and_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "run.pt").touch()
    with pytest.raises(CheckpointError, match=r"run.pt: cut off, or not .* \(0 bytes\)"):
        load_checkpoint(tmp_path / "run.pt")


def test_of_torch_itself(tmp_path: Path) -> None:
    torch.save({"step": 1}, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match="cut off, or not written by train_stream"):
        load_checkpoint(tmp_path / "run.pt")


def test_the_last_one_is_missing(saved: Path) -> None:
    """As where a run was killed between the two renames."""
    saved.unlink()
    assert has_checkpoint(saved)
    assert step(saved) == 1


def test_a_damaged_one_is_replaced(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment is there no whole one, though the damaged one takes the place of the other."""
    data = saved.read_bytes()
    saved.write_bytes(data[:50])
    found = []

    def watched(a: Any, b: Any, own: Any = os.replace) -> None:
        found.append(_quietly(saved))
        own(a, b)
        found.append(_quietly(saved))

    monkeypatch.setattr(os, "replace", watched)
    save_checkpoint(saved, {"step": 3, "w": torch.ones(11)})
    assert found == [1, 3, 3, 3]


def _quietly(path: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return int(load_checkpoint(path)["step"])


# -- while it is written --------------------------------------------------------------------------


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_the_disk_is_full(name: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, name, _full)
        with pytest.raises(OSError, match="No space left on device"):
            save_checkpoint(saved, {"step": 3, "w": torch.ones(11)})
    assert (step(saved), step(previous(saved))) == (2, 1)
    assert sorted(file.name for file in saved.parent.iterdir()) == ["run.pt", "run.pt.previous"]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_between_the_renames(
    error: BaseException, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def second(a: Any, b: Any, own: Any = os.replace) -> None:
        calls.append(b)
        if len(calls) == 2:
            raise error
        own(a, b)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", second)
        with pytest.raises(type(error)):
            save_checkpoint(saved, {"step": 3, "w": torch.ones(11)})
    assert has_checkpoint(saved)
    assert step(saved) == 3
    save_checkpoint(saved, {"step": 4, "w": torch.ones(11)})
    assert (step(saved), step(previous(saved))) == (4, 2)


def test_a_link_stays_one(tmp_path: Path) -> None:
    folder, link = tmp_path / "runs", tmp_path / "latest.pt"
    folder.mkdir()
    link.symlink_to(folder / "7.pt")
    for step in (1, 2):
        save_checkpoint(link, {"step": step})
    assert link.is_symlink()
    assert sorted(file.name for file in folder.iterdir()) == ["7.pt", "7.pt.previous"]
    assert load_checkpoint(folder / "7.pt") == load_checkpoint(link) == {"step": 2}
    (folder / "7.pt").unlink()
    assert load_checkpoint(link) == {"step": 1}


def test_what_a_killed_run_left_does_no_harm(saved: Path) -> None:
    unfinished = saved.with_name("run.pt.tmp")
    unfinished.write_bytes(saved.read_bytes()[:77])
    assert step(saved) == 2
    save_checkpoint(saved, {"step": 3, "w": torch.ones(11)})
    assert step(saved) == 3
    assert not unfinished.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        save_checkpoint(tmp_path / "file" / "run.pt", CONTENT)


def test_a_folder_by_that_name(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(IsADirectoryError, match=r"runs is a folder\. Give the name of a file"):
        save_checkpoint(tmp_path / "runs", CONTENT)
    assert [file.name for file in tmp_path.iterdir()] == ["runs"]


# -- what it may hold -----------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"at": [1, datetime.date(2020, 1, 2)]}, r"\['at'\]\[1\], a datetime.date, could not be"),
        ([numpy.ones(3)], r"\[0\], a numpy.ndarray, could not be read again with weights_only"),
        ({"f": lambda: 1}, r"\['f'\], a builtins.function, could not be read again"),
        ({"p": Pair(1, 2)}, "one of its containers could not be read again with weights_only=True"),
    ],
)
def test_what_could_not_be_read_again(content: Any, words: str, saved: Path) -> None:
    with pytest.raises(TypeError, match=words):
        save_checkpoint(saved, content)
    assert step(saved) == 2


def test_numbers_of_numpy_are_kept_as_pythons(saved: Path) -> None:
    save_checkpoint(saved, {"lr": numpy.float64(0.5), "n": [numpy.int64(3), numpy.bool_(True)]})
    found = load_checkpoint(saved)
    assert found == {"lr": 0.5, "n": [3, True]}
    assert [type(found["lr"]), *map(type, found["n"])] == [float, int, bool]


def test_states_as_plain_trees() -> None:
    h, c = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    for tree in (h, (h, c), [h, {"c": c}], {"s": Pair(h, (c,))}, Pair([h], c)):
        plain = as_plain(tree)
        buffer = io.BytesIO()
        torch.save(plain, buffer)
        buffer.seek(0)
        found = from_plain(torch.load(buffer, weights_only=True), tree, torch.device("cpu"))
        assert type(found) is type(tree)
        assert_same(found, tree)
        assert str(found) == str(tree)
    assert as_plain(None) is None
    assert from_plain(None, h, torch.device("cpu")) is None
    (found,) = from_plain([h], None, torch.device("cpu"))
    assert torch.equal(found, h)
    with pytest.raises(ValueError, match=r"state: its tensors are \[\[2, 3\], \[2\]\], but in the"):
        from_plain([h], (h, c), torch.device("cpu"))


def test_of_a_view_only_what_is_seen_is_saved(tmp_path: Path) -> None:
    every = torch.randn(1000, 2, 5)
    save_checkpoint(tmp_path / "run.pt", as_plain((every[-1], every[:, 1, 1])))
    assert (tmp_path / "run.pt").stat().st_size < 8000
    assert_same(load_checkpoint(tmp_path / "run.pt"), (every[-1], every[:, 1, 1]))


def test_random_numbers_go_on(tmp_path: Path) -> None:
    def draw() -> tuple[Any, ...]:
        return (
            torch.rand(3).tolist(), random.random(), random.gauss(0, 1),
            numpy.random.rand(3).tolist(), numpy.random.normal(),
        )  # fmt: skip

    draw()  # of two normal numbers the second is held back
    save_checkpoint(tmp_path / "run.pt", random_state())
    expected = [draw(), draw()]
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    set_random_state(load_checkpoint(tmp_path / "run.pt"))
    assert [draw(), draw()] == expected


@pytest.fixture
def numpy_generator() -> Iterator[None]:
    """NumPy's global generator, put back after the test."""
    before = numpy.random.get_bit_generator()
    yield
    numpy.random.set_bit_generator(before)


@pytest.mark.usefixtures("numpy_generator")
@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_any_bit_generator_of_numpy_is_restored(name: str, tmp_path: Path) -> None:
    numpy.random.set_bit_generator(getattr(numpy.random, name)(3))
    numpy.random.normal()  # the second of two normal numbers is held back
    before = random_state()
    save_checkpoint(tmp_path / "run.pt", before)
    expected = numpy.random.normal(size=5).tolist()
    assert not same_random_state(before, random_state())
    numpy.random.seed(5) if name == "MT19937" else numpy.random.normal(size=3)
    set_random_state(load_checkpoint(tmp_path / "run.pt"))
    assert same_random_state(before, random_state())
    assert numpy.random.normal(size=5).tolist() == expected


@pytest.mark.usefixtures("numpy_generator")
def test_another_bit_generator_of_numpy_is_refused() -> None:
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    state = random_state()
    numpy.random.set_bit_generator(numpy.random.MT19937(3))
    message = r"NumPy's global generator was a PCG64, but is another now.*set_bit_generator"
    with pytest.raises(ValueError, match=message):
        set_random_state(state)
