"""Runs that ranks make together, for tests: data of each kind, and one small model on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.utils.data import DataLoader

from ftbptt import TrainSegment, make_train_segment
from ftbptt.segment import execute
from ftbptt.training import Chunk, ContiguousStreams, PackedSequences, Stream, train_stream
from ftbptt.training.updates import rank_sync

from ..cells.problems import named
from ..training.streams import Tagger, cross_entropy, mean_cross_entropy, stream, tagger

STEPS = 53
ROWS = 5


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
    if kind == "shuffled":
        pieces = [(x[a : a + 7], y[a : a + 7]) for a in range(0, STEPS, 7)]
        return DataLoader(pieces, batch_size=None, shuffle=True)  # type: ignore[arg-type]
    if kind == "packed":
        return PackedSequences(sequences(), rows=ROWS)
    tokens = torch.randint(6, (500,), generator=torch.Generator().manual_seed(7))
    return ContiguousStreams(tokens, rows=ROWS)


def segment_of(kind: type[nn.Module], padded: bool = False) -> TrainSegment:
    return _segment_of(kind, padded, execute._UNCUT_BYTES)


@cache  # each process traces it once
def _segment_of(kind: type[nn.Module], padded: bool, uncut_bytes: int) -> TrainSegment:
    """``uncut_bytes`` is what a test may set: it decides how a segment is built."""
    return make_train_segment(
        kind(), cross_entropy if padded else mean_cross_entropy, backend="eager"
    )


def gradient_descent(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def shared_out(params: Iterable[Tensor], kind: type, **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns

    return ZeroRedundancyOptimizer(params, kind, **options)


def numbers_ahead(mesh: DeviceMesh) -> Any:
    """As if the first rank had a device that works while its process goes on."""
    return mock.patch.object(rank_sync, "works_aside", return_value=mesh.get_rank() == 0)


def train(mesh: DeviceMesh | None, kind: str, **options: Any) -> dict[str, Any]:
    """A run of 50 updates: its parameters, and the losses of its updates."""
    rank = 0 if mesh is None else torch.distributed.get_rank()
    device = getattr(mesh, "device_type", "cpu")  # a ProcessGroup has none
    segment = segment_of(CharModel if kind == "tokens" else Tagger, kind in ("flags", "packed"))
    torch.manual_seed(rank)  # what the other ranks begin with does not count
    module: nn.Module = CharModel() if kind == "tokens" else tagger(rank)
    params = named(module.to(device))
    optimizer: Any = torch.optim.SGD(params.values(), lr=0.3, momentum=0.9)
    if options.pop("functional", False):
        optimizer, params = Momentum(), {name: p.detach() for name, p in params.items()}
    if options.pop("sharded", False):
        optimizer = shared_out(params.values(), torch.optim.SGD, lr=0.3)
    units = 4 if kind == "tokens" else 5
    hidden = torch.zeros(ROWS, units, dtype=torch.float64, device=device)
    state: Any = hidden if kind == "tokens" else (hidden, hidden)
    options = {
        "k1": 4, "epochs": None, "updates": 50, "device": device, "progress": False, **options,
    }  # fmt: skip
    run = train_stream(segment, params, state, data_of(kind), optimizer, mesh=mesh, **options)
    losses = [float(update.loss) for update in run]
    # Tensors of another process would be files that both must keep open.
    return {"params": {n: p.tolist() for n, p in run.params.items()}, "losses": losses}


def train_on(mesh: DeviceMesh, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    return train(mesh, kind, **options)


def new_run(
    mesh: DeviceMesh, make_optimizer: Callable[..., Any] = gradient_descent, **options: Any
) -> Stream:
    """A run on tensors, to be looped over."""
    module = tagger()
    params = named(module)
    segment = segment_of(type(module))
    zeros = (torch.zeros(ROWS, 5).double(),) * 2
    options = {
        "data": data_of("tensors"), "state": zeros, "k1": 4, "progress": False, **options,
    }  # fmt: skip
    return train_stream(
        segment, params, optimizer=make_optimizer(params.values()), mesh=mesh, **options
    )


def doubles(result: dict[str, Any]) -> Any:
    return {
        "params": {n: torch.tensor(p, dtype=torch.float64) for n, p in result["params"].items()},
        "losses": torch.tensor(result["losses"], dtype=torch.float64),
    }
