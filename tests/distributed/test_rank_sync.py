"""Ranks that train together are as one process with all rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from ftbptt import distributed, make_train_segment
from ftbptt.distributed import all_models, own_models, reduction
from ftbptt.segment import execute
from ftbptt.training import train_stream

from ..cells.problems import named
from ..oracle import assert_close
from ..training.resuming import IN_RANDOM_ORDER
from ..training.streams import mean_cross_entropy, stream, tagger
from .rank_runs import (
    CharModel,
    doubles,
    new_run,
    numbers_ahead,
    shared_out,
    train,
    train_on,
)
from .ranks import Ranks

CASES: list[tuple[str, dict[str, Any]]] = [
    ("tensors", {}),
    ("tensors", {"clip_norm": 0.05, "k2": 9}),
    ("tensors", {"functional": True, "accumulate": 3}),
    ("tensors", {"burn_in": 3, "context": 1, "k1": 6, "k2": 8}),
    ("flags", {"clip_norm": 0.1}),
    ("chunks", {"ema_decay": 0.9}),
    ("packed", {"clip_value": 0.01}),
    ("packed", {"k2": 11}),
    ("packed", {"k2": 7, "fresh": True}),
    ("tokens", {"k1": 10, "micro_batches": 2}),
    ("shuffled", {"accumulate": 2}),
]


@IN_RANDOM_ORDER
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_two_ranks_are_one_process(kind: str, options: dict[str, Any], two: Ranks) -> None:
    check_as_one(two, kind, options)


@pytest.mark.parametrize(("kind", "options"), [CASES[4], CASES[6]])
def test_four_ranks_are_one_process(kind: str, options: dict[str, Any], four: Ranks) -> None:
    check_as_one(four, kind, options)


@pytest.mark.parametrize(("kind", "options"), [CASES[1], CASES[4], CASES[6], CASES[9]])
def test_numbers_go_ahead_of_gradients(kind: str, options: dict[str, Any], two: Ranks) -> None:
    check_as_one(two, kind, options, _train_as_on_devices)


def _train_as_on_devices(mesh: DeviceMesh, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    with numbers_ahead(mesh):
        return train(mesh, kind, **options)


def check_as_one(
    ranks: Ranks, kind: str, options: dict[str, Any], train_on: Callable[..., Any] = train_on
) -> None:
    expected = train(None, kind, **options)
    assert len(expected["losses"]) == 50
    for found in ranks.call(train_on, kind, options):
        for name, value in expected["params"].items():
            difference = (torch.tensor(found["params"][name]) - torch.tensor(value)).abs().max()
            assert difference < 1e-6  # read as float32: the finer look is below
        assert_close(doubles(found), doubles(expected))


def _steps_that_weigh(mesh: DeviceMesh | None) -> list[float]:
    """On tokens [T, B], with a weight of each step [T] beside the targets [T, B]."""
    torch.manual_seed(1)
    tokens, weight = torch.randint(6, (24, 3)), torch.rand(24).double()

    def loss(out: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        each = torch.nn.functional.cross_entropy(out.movedim(-1, 1), y[0], reduction="none")
        return (each * y[1][:, None]).mean()

    module = CharModel()
    run = train_stream(
        make_train_segment(module, loss, backend="eager"), named(module),
        torch.zeros(3, 4).double(), (tokens, (tokens.roll(-1, 0), weight)),
        torch.optim.SGD(module.parameters(), lr=0.5), k1=4, progress=False, mesh=mesh,
    )  # fmt: skip
    return [float(update.loss) for update in run]


def test_tokens_with_a_weight_of_each_step(two: Ranks) -> None:
    """Two rows of three weigh twice as much as the third."""
    expected = _steps_that_weigh(None)
    assert two.call(_steps_that_weigh) == [pytest.approx(expected, rel=1e-12)] * 2


class Buffered(torch.nn.Module):
    """With random buffers of two kinds, which differ from rank to rank."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(3, 5).double()
        torch.manual_seed(torch.distributed.get_rank())
        self.register_buffer("shift", torch.randn(size).double())
        self.register_buffer("keep", torch.rand(5) < 0.5, persistent=False)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return h * self.keep + self.shift, h


def _buffers(mesh: DeviceMesh, *sizes: int) -> list[list[float]]:
    module = Buffered(sizes[torch.distributed.get_rank()])
    segment = make_train_segment(module, lambda out, y: out.square().mean(), backend="eager")
    train_stream(
        segment, named(module), torch.zeros(5, 5).double(), (stream(8, 5)[0], None),
        torch.optim.SGD(module.parameters(), lr=0.1), k1=8, progress=False, mesh=mesh,
    )  # fmt: skip
    return [buffer.tolist() for buffer in module.buffers()]


def test_buffers_are_those_of_the_first_rank(two: Ranks) -> None:
    first, second = two.call(_buffers, 5, 5)
    assert first == second
    assert len(set(first[0])) == 5


def _said_of_buffers(mesh: DeviceMesh) -> str:
    with pytest.raises(ValueError, match="buffers") as caught:
        _buffers(mesh, 5, 1)
    return str(caught.value)


def test_buffers_of_other_shapes(two: Ranks) -> None:
    """Which would be written into larger ones without a word."""
    for said in two.call(_said_of_buffers):
        assert said.startswith("buffers['shift']: rank 0 was given torch.float64 [5], but rank 1 ")


# -- what is sent ----------------------------------------------------------------------------------


def _bytes(mesh: DeviceMesh, dtype: torch.dtype | None) -> tuple[int, int, int]:
    run = new_run(mesh, accumulate=3, updates=4, reduce_dtype=dtype)
    updates = sum(1 for _ in run)
    assert run._rank_sync is not None
    return updates, run._rank_sync.bytes_reduced, sum(p.numel() for p in run.params.values())


@pytest.mark.parametrize(("dtype", "size"), [(None, 8), (torch.bfloat16, 2)])
def test_what_is_sent_for_an_update(dtype: torch.dtype | None, size: int, two: Ranks) -> None:
    """Each gradient once for an update, however many windows it has; and once at the end.

    With them eleven numbers in float64.
    """
    for updates, sent, numbers in two.call(_bytes, dtype):
        assert updates == 4
        assert sent == (updates + 1) * (size * numbers + 11 * 8)


def _sum_of_halves(mesh: DeviceMesh, dtype: torch.dtype | None) -> list[list[float]]:
    from ftbptt.distributed.ranks import Ranks as Group

    leaves = [torch.full((2,), 30.0).half(), torch.full((2,), 30.0).bfloat16()]
    joined = reduction.Reduction(Group(mesh), leaves, dtype, 1)
    joined.complete(leaves, 50_000)
    assert joined.finish(torch.tensor([1.5])).tolist() == [3.0]
    means = joined.mean(100_000)
    assert [mean.dtype for mean in means] == [leaf.dtype for leaf in leaves]
    return [mean.tolist() for mean in means]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_in_half_precision_do_not_overflow(dtype: Any, two: Ranks) -> None:
    for found in two.call(_sum_of_halves, dtype):
        torch.testing.assert_close(torch.tensor(found), torch.full((2, 2), 30.0), rtol=0.01, atol=0)


def _loss_of_a_half(mesh: DeviceMesh | None) -> tuple[str, float]:
    """The first loss, which is computed in float32, of a model in bfloat16."""
    module, (x, y) = tagger().bfloat16(), stream(8, 5)
    segment = make_train_segment(
        module, lambda out, y: mean_cross_entropy(out.float(), y), backend="eager"
    )
    run = train_stream(
        segment, named(module), (torch.zeros(5, 5).bfloat16(),) * 2, (x.bfloat16(), y),
        torch.optim.SGD(module.parameters(), lr=0.1), k1=8, progress=False, mesh=mesh,
    )  # fmt: skip
    loss = next(run).loss
    run.finish()
    return str(loss.dtype), float(loss)


def test_losses_of_a_model_in_half_precision_are_not_rounded(two: Ranks) -> None:
    dtype, expected = _loss_of_a_half(None)
    assert dtype == "torch.float32"
    for found, loss in two.call(_loss_of_a_half):
        assert found == dtype
        assert abs(loss - expected) < 1e-6


def _early(mesh: DeviceMesh, ahead: bool) -> Any:
    """Every gradient is handed over, in buckets of a leaf or two."""
    with (
        mock.patch.object(execute, "_UNCUT_BYTES", 0),
        mock.patch.multiple(reduction, _LEAST_BYTES=1, _BUCKET_BYTES=300),
        numbers_ahead(mesh) if ahead else nullcontext(),
    ):
        found = train(mesh, "flags", clip_norm=0.1), train(mesh, "tensors")
    return found


@pytest.mark.parametrize("ahead", [False, True], ids=["numbers with the last", "numbers before it"])
def test_gradients_that_are_sent_as_they_come(ahead: bool, two: Ranks) -> None:
    expected = train(None, "flags", clip_norm=0.1), train(None, "tensors")
    for found in two.call(_early, ahead):
        for own, other in zip(found, expected, strict=True):
            assert_close(doubles(own), doubles(other))


# -- optimizers and ensembles that ranks share -----------------------------------------------------


def _sharded(mesh: DeviceMesh, folder: str | None, updates: int) -> tuple[Any, int]:
    """Adam, its state on all ranks or shared out; its state's numbers on this rank."""
    make = partial(torch.optim.Adam, lr=0.01)
    if folder is not None:
        make = partial(shared_out, kind=torch.optim.Adam, lr=0.01)  # type: ignore[assignment]
    made: list[Any] = []
    run = new_run(
        mesh, lambda params: made.append(make(params)) or made[0], epochs=None, updates=updates,
        checkpoint=folder, resume=folder is not None,
    )  # fmt: skip
    for _ in run:
        pass
    own = made[0] if folder is None else made[0].optim
    size = sum(leaf.numel() for state in own.state.values() for leaf in state.values())
    return [p.tolist() for p in run.params.values()], size


def test_an_optimizer_that_is_shared_out(two: Ranks, tmp_path: Path) -> None:
    (whole, size), _ = two.call(_sharded, None, 20)
    two.call(_sharded, str(tmp_path / "run"), 12)
    (first, own), (second, other) = two.call(_sharded, str(tmp_path / "run"), 20)
    assert first == second == whole
    assert own + other == size
    assert max(own, other) < 0.75 * size


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


def _optimized(mesh: DeviceMesh) -> list[bool]:
    params, _ = torch.func.stack_module_state([tagger(seed) for seed in range(3)])
    own = own_models(params, mesh)
    torch.optim.Adam(own.values())
    joined = all_models(own, mesh)
    torch.optim.Adam(joined.values())
    for name, p in params.items():
        assert torch.equal(joined[name], p)
    return [leaf.is_leaf and leaf.requires_grad for leaf in (*own.values(), *joined.values())]


def test_an_optimizer_takes_own_models_and_all(two: Ranks) -> None:
    for found in two.call(_optimized):
        assert all(found)


def _refused(mesh: DeviceMesh, leaf: Any) -> str:
    try:
        own_models({"a": torch.zeros(4, 1), "b": leaf}, mesh)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (
            torch.zeros(1, 4),
            "ValueError: tree['b']: 2 ranks share the models, but there are 1 on axis 0. Give more "
            "models, fewer ranks or another dim.",
        ),
        (torch.zeros(()), "ValueError: tree['b']: expected the models on axis 0, found shape []."),
        (0.1, "TypeError: tree['b']: expected a tensor of all models, stacked on axis 0, found fl"),
    ],
)
def test_models_that_cannot_be_shared(leaf: Any, words: str, two: Ranks) -> None:
    for said in two.call(_refused, leaf):
        assert said.startswith(words)


def test_what_is_no_mesh() -> None:
    module = tagger()
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh or a ProcessGroup, found int"):
        train_stream(segment, named(module), None, stream(8), optimizer, k1=4, mesh=2)  # type: ignore[arg-type]


def _where_no_rank_communicates(mesh: DeviceMesh) -> str:
    with pytest.raises(ValueError, match="communicate") as caught:
        distributed.ranks.Ranks(mesh).broadcast_params({"w": [torch.ones(2, device="meta")]})
    return str(caught.value)


def test_parameters_on_a_device_without_a_backend(two: Ranks) -> None:
    for said in two.call(_where_no_rank_communicates):
        assert said == (
            "params['w'][0]: is on meta, but the ranks of mesh communicate from cpu and cuda "
            "(cpu:gloo,cuda:gloo). Move the parameters there, or give init_process_group a backend "
            "for both."
        )
