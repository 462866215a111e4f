"""Ranks that are given different options, data or models are told so before they begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import DeviceMesh
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from ftbptt.training import train_stream

from ..cells.problems import named
from ..training.streams import Tagger, stream
from .rank_runs import ROWS, STEPS, data_of, new_run, segment_of
from .ranks import Ranks


def _given_otherwise(mesh: DeviceMesh, options: dict[str, Any]) -> str:
    try:
        new_run(mesh, **(options if mesh.get_rank() == 1 else {}))
    except ValueError as error:
        return str(error)
    return "no error"


def _fewer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[1:], lr=0.1)


def _faster(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2)


def _warm(params: Any) -> torch.optim.Optimizer:
    """As where one rank alone loads a checkpoint of its own."""
    params = list(params)
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.state[params[0]]["momentum_buffer"] = torch.ones_like(params[0])
    return optimizer


def _half_frozen(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    params[0].requires_grad_(False)
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k1": 5}, "k1: rank 0 was given 4, but rank 1 5."),
        ({"accumulate": 2}, "accumulate: rank 0 was given 1, but rank 1 2."),
        ({"epochs": None}, "epochs: rank 0 was given 1, but rank 1 None."),
        ({"clip_norm": 1.0}, "clip_norm: rank 0 was given None, but rank 1 1.0."),
        ({"checkpoint": "run"}, "checkpoint: rank 0 was given none, but rank 1 one."),
        (
            {"make_optimizer": _fewer},
            "optimizer.param_groups[0]: rank 0 was given 6 tensors, but ra",
        ),
        (
            {"make_optimizer": _faster},
            "optimizer.param_groups[0]['lr']: rank 0 was given 0.1, but ",
        ),
        (
            {"make_optimizer": _half_frozen},
            "params['cell.weight_ih']: rank 0 was given torch.float64",
        ),
        ({"make_optimizer": _warm}, "optimizer.state: rank 0 was given 0 tensors with a sum of 0"),
        (
            {"data": (2 * stream(STEPS, ROWS)[0], stream(STEPS, ROWS)[1])},
            "data: rank 0 was given sh",
        ),
        ({"state": None}, "state[0]: rank 0 was given torch.float64 [5, 5], but rank 1 None."),
        (
            {"data": stream(STEPS - 1, ROWS)},
            "data: rank 0 was given shapes [[53, 5, 3], [53, 5]], which begin with sums [",
        ),
    ],
)
def test_ranks_that_are_given_something_else(
    options: dict[str, Any], words: str, two: Ranks
) -> None:
    """They would wait for each other, or go on silently with other updates."""
    for said in two.call(_given_otherwise, options):
        assert said.startswith(words)


def _another_model(mesh: DeviceMesh) -> str:
    module = Tagger(hidden=5 + mesh.get_rank())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    try:
        train_stream(
            segment_of(Tagger), named(module), None, data_of("tensors"), optimizer, k1=4, mesh=mesh
        )
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_of_other_models(two: Ranks) -> None:
    """Their messages would differ in size, of which the process dies."""
    for said in two.call(_another_model):
        assert said.startswith("params['cell.weight_ih']: rank 0 was given torch.float64 [20, 3], ")


class _PartOfARank(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return tuple(part[:7, index % ROWS] for part in stream(STEPS, ROWS))


def _with_a_sampler(mesh: DeviceMesh) -> str:
    data = _PartOfARank()
    sampler: Any = DistributedSampler(data)
    try:
        new_run(mesh, data=DataLoader(data, batch_size=2, sampler=sampler))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_sampler_that_divides_the_data(two: Ranks) -> None:
    """Each rank would train on a part of its part."""
    for said in two.call(_with_a_sampler):
        assert said.startswith("data: its DistributedSampler gives each rank a part of the data")
