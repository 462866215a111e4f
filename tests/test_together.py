"""Ranks that train together are as one process with all rows."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from ftbptt import make_train_segment
from ftbptt.distributed import RankFailed, all_models, own_models
from ftbptt.training import (
    CheckpointError,
    Chunk,
    ContiguousStreams,
    Events,
    PackedSequences,
    train_stream,
)

from .oracle import assert_close
from .problem import named
from .ranks import Ranks
from .streams import cross_entropy, mean_cross_entropy, stream, tagger

STEPS = 53
ROWS = 5


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


class Momentum:
    """Two pure functions."""

    def init(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p) for name, p in params.items()}

    def update(self, grads: Any, state: Any, params: Any) -> Any:
        state = {name: 0.9 * state[name] + grads[name] for name in params}
        return {name: p - 0.1 * state[name] for name, p in params.items()}, state


class CharModel(nn.Module):
    """On tokens, as ``ContiguousStreams`` gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.read = nn.Embedding(6, 3), nn.GRUCell(3, 4), nn.Linear(4, 6)
        self.double()

    def forward(self, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(self.embed(token), h)
        return self.read(h), h


def flags() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    reset = torch.rand(STEPS, ROWS, generator=generator) < 0.1
    mask = torch.rand(STEPS, ROWS, generator=generator) < 0.8
    mask[-10:, 3:] = False  # the last rows end before the others
    return reset, mask


def sequences() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(2, 30, (24,), generator=generator).tolist()
    return [tuple(leaf[:, 0] for leaf in stream(n, 1, seed=n)) for n in lengths]  # type: ignore[misc]


def data_of(kind: str) -> Any:
    x, y = stream(STEPS, ROWS)
    if kind == "tensors":
        return x, y
    if kind == "flags":
        return Chunk(x, y, *flags())
    if kind == "chunks":
        return [(x[a : a + 7], y[a : a + 7]) for a in range(0, STEPS, 7)]
    if kind == "packed":
        return PackedSequences(sequences(), rows=ROWS)
    tokens = torch.randint(6, (500,), generator=torch.Generator().manual_seed(7))
    return ContiguousStreams(tokens, rows=ROWS)


def shared_out(params: dict[str, Tensor], kind: type, **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params.values(), kind, **options)


def train(mesh: DeviceMesh | None, kind: str, **options: Any) -> dict[str, Any]:
    """A run of 50 updates: its parameters, and the losses of its updates."""
    rank = 0 if mesh is None else torch.distributed.get_rank()
    torch.manual_seed(rank)  # what the other ranks begin with does not count
    module: nn.Module = CharModel() if kind == "tokens" else tagger(rank)
    loss = cross_entropy if kind in ("flags", "packed") else mean_cross_entropy
    segment = make_train_segment(module, loss, backend="eager")
    params = named(module)
    optimizer: Any = torch.optim.SGD(params.values(), lr=0.3, momentum=0.9)
    if options.pop("functional", False):
        optimizer, params = Momentum(), {name: p.detach() for name, p in params.items()}
    if options.pop("sharded", False):
        optimizer = shared_out(params, torch.optim.SGD, lr=0.3)
    hidden = torch.zeros(ROWS, 4).double()
    state: Any = hidden if kind == "tokens" else (torch.zeros(ROWS, 5).double(),) * 2
    options = {"k1": 4, "epochs": None, "updates": 50, "progress": False, **options}
    run = train_stream(segment, params, state, data_of(kind), optimizer, mesh=mesh, **options)
    losses = [float(update.loss) for update in run]
    # Tensors of another process would be files that both must keep open.
    return {"params": {n: p.tolist() for n, p in run.params.items()}, "losses": losses}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("tensors", {}),
    ("tensors", {"clip_norm": 0.05, "k2": 9}),
    ("tensors", {"functional": True, "accumulate": 3}),
    ("tensors", {"burn_in": 3, "context": 1, "k1": 6, "k2": 8}),
    ("flags", {"clip_norm": 0.1}),
    ("chunks", {"ema_decay": 0.9}),
    ("packed", {"clip_value": 0.01}),
    ("tokens", {"k1": 10, "micro_batches": 2}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_two_ranks_are_one_process(kind: str, options: dict[str, Any], two: Ranks) -> None:
    check_as_one(two, kind, options)


@pytest.mark.parametrize(("kind", "options"), [CASES[4], CASES[6]])
def test_four_ranks_are_one_process(kind: str, options: dict[str, Any], four: Ranks) -> None:
    check_as_one(four, kind, options)


def check_as_one(ranks: Ranks, kind: str, options: dict[str, Any]) -> None:
    expected = train(None, kind, **options)
    assert len(expected["losses"]) == 50
    for found in ranks.call(_train, kind, options):
        for name, value in expected["params"].items():
            difference = (torch.tensor(found["params"][name]) - torch.tensor(value)).abs().max()
            assert difference < 1e-6  # read as float32: the finer look is below
        assert_close(_doubles(found), _doubles(expected))


def _doubles(result: dict[str, Any]) -> Any:
    return {
        "params": {n: torch.tensor(p, dtype=torch.float64) for n, p in result["params"].items()},
        "losses": torch.tensor(result["losses"], dtype=torch.float64),
    }


def _train(mesh: DeviceMesh, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    return train(mesh, kind, **options)


# -- what is sent ----------------------------------------------------------------------------------


def _bytes(mesh: DeviceMesh, dtype: torch.dtype | None) -> tuple[int, int, int]:
    module = tagger()
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = train_stream(
        segment, named(module), (torch.zeros(ROWS, 5).double(),) * 2,
        data_of("tensors"), optimizer, k1=4, accumulate=3, updates=4, progress=False, mesh=mesh,
        reduce_dtype=dtype,
    )  # fmt: skip
    updates = sum(1 for _ in run)
    assert run._together is not None
    return updates, run._together.bytes_reduced, sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("dtype", "size"), [(None, 8), (torch.bfloat16, 2)])
def test_what_is_sent_for_an_update(dtype: torch.dtype | None, size: int, two: Ranks) -> None:
    """Each gradient once for an update, however many windows it has; and once at the end.

    With them nine numbers in float64.
    """
    for updates, sent, numbers in two.call(_bytes, dtype):
        assert updates == 4
        assert sent == (updates + 1) * (size * numbers + 9 * 8)


# -- when something is wrong on one rank ---------------------------------------------------------


def _failing(mesh: DeviceMesh, where: str, sharded: bool) -> str:
    def fail(*_: Any) -> None:
        seen.append(1)
        if mesh.get_rank() == 1 and len(seen) == 3:
            raise KeyError("my own mistake")

    seen: list[int] = []
    try:
        train(mesh, "tensors", events=Events(**{where: fail}), sharded=sharded)
    except (KeyError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("where", ["before_window", "before_update", "after_update"])
def test_an_error_on_one_rank_ends_all(where: str, sharded: bool, two: Ranks) -> None:
    other, own = two.call(_failing, where, sharded)
    assert own == "KeyError: 'my own mistake'"
    assert other == "RankFailed: rank 1 has left the run: KeyError: 'my own mistake'"


def _left(mesh: DeviceMesh) -> str:
    module = tagger()
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = (torch.zeros(ROWS, 5).double(),) * 2
    run = train_stream(
        segment, named(module), state, data_of("tensors"), optimizer, k1=4, progress=False,
        mesh=mesh,
    )  # fmt: skip
    try:
        for update in run:
            if mesh.get_rank() == 0 and update.index == 2:
                break
    except RankFailed as error:
        return str(error)
    return "left"


def test_a_loop_that_one_rank_leaves(two: Ranks) -> None:
    assert two.call(_left) == ["left", "rank 0 has left the run: its loop over the run was left"]


def _not_finite(mesh: DeviceMesh, mode: str) -> tuple[int, list[str], list[Any]]:
    x, y = stream(STEPS, ROWS)
    x[9, 4] = float("nan")  # in a row of the second rank, in the third window
    module = tagger()
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train_stream(
            segment, named(module), (torch.zeros(ROWS, 5).double(),) * 2, (x, y), optimizer, k1=4,
            progress=False, mesh=mesh, on_nonfinite=mode,
        )  # fmt: skip
        count = sum(1 for _ in run)
    said = [str(warning.message) for warning in caught]
    return count, said, [p.tolist() for p in module.parameters()]


@pytest.mark.parametrize(("mode", "updates"), [("stop", 2), ("skip", 14)])
def test_a_loss_that_is_not_finite_on_one_rank(mode: str, updates: int, two: Ranks) -> None:
    (first, other_said, params), (second, own_said, own_params) = two.call(_not_finite, mode)
    assert first == second == updates
    assert params == own_params
    assert len(own_said) == 1
    assert "the loss of update 2 is nan" in own_said[0]
    stopped = ["ftbptt: rank 1 stops the run before update 2."]
    assert other_said == (stopped if mode == "stop" else [])


# -- together to the end --------------------------------------------------------------------------


def _stopped(mesh: DeviceMesh) -> tuple[int, int]:
    reports: list[float] = []

    def stop(loss: float) -> bool:
        reports.append(loss)
        return len(reports) == 3

    # The clock of the first rank says when: the others' would differ.
    interval = 0.0 if mesh.get_rank() == 0 else 1e9
    return len(train(mesh, "tensors", stop=stop, interval=interval)["losses"]), len(reports)


def test_all_stop_at_the_same_update(two: Ranks) -> None:
    first, second = two.call(_stopped)
    assert first == second
    assert first[1] == 3
    assert first[0] < 50


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


@pytest.mark.parametrize("kind", ["flags", "chunks", "packed"])
def test_a_run_that_was_cut_off_goes_on(kind: str, two: Ranks, tmp_path: Path) -> None:
    undisturbed = two.call(_train, kind, {})
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
        assert_close(_doubles(found), _doubles(expected))


def _written(mesh: DeviceMesh, folder: str, updates: int, resume: bool) -> list[str]:
    """What is said while a run is made, or the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(
                mesh, "tensors", checkpoint=folder, checkpoint_every=10, updates=updates,
                resume=resume,
            )  # fmt: skip
        except CheckpointError as error:
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
        assert said[0].endswith("To start anew, delete what is there.")


def test_one_that_is_not_whole_does_not_count(two: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two.call(_written, str(folder), 20, False)
    (folder / "update-000000020" / ".metadata").unlink()  # killed before it was done
    two.call(_written, str(folder), 20, True)
    assert (folder / "update-000000020" / ".metadata").exists()


def test_a_new_run_in_an_old_folder(two: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two.call(_written, str(folder), 30, False)
    for said in two.call(_written, str(folder), 10, False):
        assert said == [f"checkpoint: {folder} is there already, and will be replaced. To go on "
                        "from it, resume=True."]  # fmt: skip
    assert [path.name for path in folder.iterdir()] == ["update-000000010"]


def _changed_after(mesh: DeviceMesh, folder: str) -> bool:
    """Parameters change while a checkpoint of them is written."""
    from ftbptt.distributed.ranks import Ranks as Group
    from ftbptt.training.shared_checkpoint import Parts, SharedCheckpoints

    own = SharedCheckpoints(Path(folder), Group(mesh), lambda leaf: 1)
    weight, rows = torch.zeros(1 << 20), torch.full((3, 2, 5), float(mesh.get_rank()))
    own.save(1, Parts({"w": [weight], "n": 3, "none": None}, mesh.get_rank(), {"h": (rows, None)}))
    weight += 1
    rows += 10
    own.wait()
    found = own.load()
    assert found is not None
    assert (found.common["n"], found.common["none"], found.own) == (3, None, mesh.get_rank())
    assert not found.common["w"][0].any()
    return torch.equal(found.rows["h"][0] + 10, rows) and found.rows["h"][1] is None


def test_written_while_the_run_goes_on(two: Ranks, tmp_path: Path) -> None:
    assert two.call(_changed_after, str(tmp_path)) == [True, True]


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


def _finished_again(mesh: DeviceMesh, folder: str) -> list[str]:
    """One rank alone asks once more for what all have done."""
    module = tagger()
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    run = train_stream(
        segment, named(module), (torch.zeros(ROWS, 5).double(),) * 2, data_of("tensors"),
        torch.optim.SGD(module.parameters(), lr=0.1), k1=4, progress=False, mesh=mesh,
        checkpoint=folder,
    )  # fmt: skip
    for update in run:
        if update.index == 4:
            break
    if mesh.get_rank() == 0:
        run.finish()
        run.finish()
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_run_that_was_left_is_finished_by_one(two: Ranks, tmp_path: Path) -> None:
    assert two.call(_finished_again, str(tmp_path / "run")) == [["update-000000005"]] * 2


def _hung(mesh: DeviceMesh) -> tuple[float, str]:
    """The second rank stops answering; the group waits two seconds for it."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=2))
    slept: list[float] = []

    def sleep(update: Any) -> None:
        if mesh.get_rank() == 1 and update.index == 3:
            slept.append(time.sleep(9) or 0)

    began = time.monotonic()
    try:
        train(group, "tensors", events=Events(after_update=sleep))  # type: ignore[arg-type]
    except RankFailed as error:
        return time.monotonic() - began, str(error)
    return 0.0, "no error"


def test_a_rank_that_hangs() -> None:
    ranks = Ranks(2)
    (took, said), (_, own_said) = ranks.call(_hung)
    ranks.stop()
    assert 2 <= took < 9  # the other one was still asleep
    assert said.startswith("rank 0: another rank died, or did not answer in time (")
    assert own_said.startswith("rank 1: another rank died, or did not answer in time (")


def _sharded(mesh: DeviceMesh, folder: str | None, updates: int) -> tuple[Any, int]:
    """Adam, its state on all ranks or shared out; its state's numbers on this rank."""
    module = tagger()
    params = named(module)
    optimizer: Any = torch.optim.Adam(params.values(), lr=0.01)
    if folder is not None:
        optimizer = shared_out(params, torch.optim.Adam, lr=0.01)
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    run = train_stream(
        segment, params, (torch.zeros(ROWS, 5).double(),) * 2, data_of("tensors"), optimizer,
        k1=4, epochs=None, updates=updates, progress=False, mesh=mesh, checkpoint=folder,
        resume=folder is not None,
    )  # fmt: skip
    for _ in run:
        pass
    own = optimizer if folder is None else optimizer.optim
    size = sum(leaf.numel() for state in own.state.values() for leaf in state.values())
    return [p.tolist() for p in params.values()], size


def test_an_optimizer_that_is_shared_out(two: Ranks, tmp_path: Path) -> None:
    (whole, size), _ = two.call(_sharded, None, 20)
    two.call(_sharded, str(tmp_path / "run"), 12)
    (first, own), (second, other) = two.call(_sharded, str(tmp_path / "run"), 20)
    assert first == second == whole
    assert own + other == size
    assert max(own, other) < 0.75 * size


def _early(mesh: DeviceMesh) -> Any:
    """Every gradient is handed over, in buckets of a leaf or two."""
    import ftbptt._execute as execute
    import ftbptt.distributed.reduction as reduction

    before = execute._UNCUT_BYTES, reduction._LEAST_BYTES, reduction._BUCKET_BYTES
    execute._UNCUT_BYTES = 0
    reduction._LEAST_BYTES, reduction._BUCKET_BYTES = 1, 300
    try:
        return train(mesh, "flags", clip_norm=0.1), train(mesh, "tensors")
    finally:
        execute._UNCUT_BYTES, reduction._LEAST_BYTES, reduction._BUCKET_BYTES = before


def test_gradients_that_are_sent_as_they_come(two: Ranks) -> None:
    expected = train(None, "flags", clip_norm=0.1), train(None, "tensors")
    for found in two.call(_early):
        for own, other in zip(found, expected, strict=True):
            assert_close(_doubles(own), _doubles(other))


# -- ensembles ------------------------------------------------------------------------------------


def _ensemble(mesh: DeviceMesh, models: int) -> Any:
    """Each rank trains its share, with nothing that it could send by."""
    params, state, x, y = ensemble(models)
    collectives = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier")
    with mock.patch.multiple(torch.distributed, **dict.fromkeys(collectives, None)):
        own = own_models((params, state, x, y), mesh)
        grads = ensemble_gradients(*own)
    whole = all_models(grads, mesh)
    return {name: grad.tolist() for name, grad in whole.items()}


def ensemble(models: int) -> Any:
    modules = [tagger(seed) for seed in range(models)]
    params = {name: torch.stack([named(m)[name].detach() for m in modules]) for name in
              named(modules[0])}  # fmt: skip
    state = (torch.zeros(models, 2, 5).double(),) * 2
    data = [stream(6, 2, seed) for seed in range(models)]
    return params, state, *(torch.stack(leaves) for leaves in zip(*data, strict=True))


def ensemble_gradients(params: Any, state: Any, x: Tensor, y: Tensor) -> Any:
    segment = make_train_segment(tagger(), mean_cross_entropy, backend="eager")
    return torch.vmap(segment)(params, state, x, y).grads


def test_an_ensemble_sends_nothing(two: Ranks) -> None:
    expected = ensemble_gradients(*ensemble(5))
    for found in two.call(_ensemble, 5):
        for name, grad in expected.items():
            assert_close(torch.tensor(found[name], dtype=torch.float64), grad)


def _too_few(mesh: DeviceMesh) -> str:
    try:
        own_models({"a": torch.zeros(4, 1), "b": torch.zeros(1, 4)}, mesh)
    except ValueError as error:
        return str(error)
    return "no error"


def test_models_that_cannot_be_shared(two: Ranks) -> None:
    for said in two.call(_too_few):
        assert said == (
            "tree['b']: 2 ranks share the models, but there are 1 on axis 0. Give more models, "
            "fewer ranks or another dim."
        )


# -- shares of the data ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_sequence_is_in_one_share(size: int) -> None:
    packed = PackedSequences(sequences(), rows=ROWS)
    shares = [packed.share(rank, size) for rank in range(size)]
    assert sum(share.rows for share in shares) == ROWS
    for epoch in (0, 1):
        packed.begin(epoch)
        for share in shares:
            share.begin(epoch)
        dealt = [order for share in shares for order in share._order]
        assert dealt == packed._order
    steps = [sum(packed._lengths[i] for own in share._order for i in own) for share in shares]
    per_row = [n / share.rows for n, share in zip(steps, shares, strict=True)]
    assert max(per_row) < 1.2 * min(per_row)


def test_too_few_rows() -> None:
    with pytest.raises(ValueError, match="mesh: 6 ranks share the rows of the data, but there are"):
        PackedSequences(sequences(), rows=ROWS).share(0, 6)
    with pytest.raises(ValueError, match="mesh: 6 ranks share the rows"):
        ContiguousStreams(torch.arange(100), rows=ROWS).share(0, 6)


def test_what_is_no_mesh() -> None:
    module = tagger()
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh or a ProcessGroup, found int"):
        train_stream(segment, named(module), None, stream(8), optimizer, k1=4, mesh=2)  # type: ignore[arg-type]
