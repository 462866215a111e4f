"""One process of the scaling benchmark, started by ``bench.scaling`` through torchrun."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from ftbptt import make_train_segment
from ftbptt.contract.output import EarlyGradients
from ftbptt.distributed import use_own_cores
from ftbptt.distributed.reduction import buckets_of
from ftbptt.distributed.shares import share_of
from ftbptt.training import train_stream

from .cases import Case, Problem, build, loss
from .cells import KINDS, Stack
from .turns import in_turns

STEPS, ROWS, INPUTS = 64, 32, 64
SIZES = [8, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22]  # bytes of an all-reduce
Mesh = Any


def parameters(hidden: int) -> list[nn.Parameter]:
    """Those of the model, the same on all ranks."""
    torch.manual_seed(0)
    return list(Stack(KINDS["lstm"], INPUTS, hidden, layers=1).parameters())


def updates(mesh: Mesh, hidden: int, rounds: int, each: int) -> dict[str, Any]:
    """Seconds of an update with and without communication, in turns, and the bytes sent for one.

    *in step*: without communication, if all waited for the slowest at each update. Both read the
    rank's rows where they lie among those of all.
    """
    size, rank = dist.get_world_size(), dist.get_rank()

    def of(rows: int) -> Problem:
        return build(Case("scaling", "lstm", 16 * STEPS, rows, INPUTS, hidden))

    x, own = of(ROWS * size).x, share_of(ROWS * size, rank, size)
    streams = {}
    for name in ("together", "alone"):
        problem = of(ROWS * size if name == "together" else ROWS)
        params, state = problem.params, problem.state
        data = x if name == "together" else x[:, own.start : own.stop]
        segment = make_train_segment(problem.model, loss)
        optimizer = torch.optim.Adam(params.values())
        streams[name] = train_stream(
            segment, params, state, (data, data), optimizer, k1=STEPS, epochs=None, progress=False,
            interval=1e9, mesh=mesh if name == "together" else None,
        )  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in (*streams, "in step")}
    for turn in range(rounds + 1):
        for name, run in streams.items():
            dist.barrier()
            at = [time.perf_counter()]
            for _ in range(each):
                next(run)
                at.append(time.perf_counter())
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, [b - a for a, b in pairwise(at)])
            if turn:
                times[name].append(statistics.median(t for rank in of_ranks for t in rank))
                if name == "alone":
                    slowest = [
                        max(times_of_update) for times_of_update in zip(*of_ranks, strict=True)
                    ]
                    times["in step"].append(statistics.median(slowest))
    rank_sync = streams["together"]._rank_sync
    assert rank_sync is not None
    return {
        "seconds": times,
        "bytes": rank_sync.bytes_reduced // streams["together"].index,
        **hand_over(segment, params, state, data[:STEPS], rounds),
    }


def hand_over(segment: Any, params: Any, state: Any, x: Tensor, rounds: int) -> dict[str, Any]:
    """Of one segment: its seconds, and the bytes of each bucket with the time it is ready."""
    leaves = list(params.values())
    parts = buckets_of(leaves)
    ready_times: list[list[float]] = []
    segment_times = []
    for turn in range(rounds + 1):
        at: list[float] = []
        early = EarlyGradients(parts, lambda loss, grads, at=at: at.append(time.perf_counter()))  # type: ignore[misc]
        began = time.perf_counter()
        segment.with_early_gradients(early, params, state, x, x)
        if turn:
            segment_times.append(time.perf_counter() - began)
            ready_times.append([t - began for t in at])
    ready = [statistics.median(bucket) for bucket in zip(*ready_times, strict=True)]
    sizes = [sum(leaves[i].nbytes for i in part) for part in parts]
    return {
        "segment": statistics.median(segment_times),
        "buckets": list(zip(sizes, ready, strict=True)),
    }


def reductions(rounds: int) -> list[tuple[int, float]]:
    """Seconds of an all-reduce of each size."""
    times_by_size = []
    for size in SIZES:
        tensor, times = torch.zeros(size // 4), []
        for _ in range(3 * rounds + 3):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - began)
        times_by_size.append((size, statistics.median(times[3:])))
    return times_by_size


def optimizers(mesh: Mesh, hidden: int, rounds: int, each: int) -> dict[str, Any]:
    """Updates from gradients to parameters, with Adam's state replicated or sharded in two ways."""
    ways = _ways(mesh, hidden)
    calls = {name: way.update for name, way in ways.items()}
    for _ in range(3):  # the three are the same update
        first, *others = (update() for update in calls.values())
        for updated in others:
            for a, b in zip(updated, first, strict=True):
                torch.testing.assert_close(a, b)
    return {
        "seconds": in_turns(calls, rounds, each, before=dist.barrier),
        "numbers": {name: _numbers(way.optimizer) for name, way in ways.items()},
    }


class _Way(NamedTuple):
    """``update() -> parameters``, and what holds its state on this rank."""

    update: Callable[[], list[Tensor]]
    optimizer: torch.optim.Optimizer


def _ways(mesh: Mesh, hidden: int) -> dict[str, _Way]:
    """Updates of the same parameters from the same gradients, summed over the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    size = dist.get_world_size()
    grads = [torch.randn_like(p) for p in parameters(hidden)]

    def with_all(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        parts = (flat / size).split([grad.numel() for grad in grads])
        for p, part in zip(params, parts, strict=True):
            p.grad = part.reshape(p.shape)
        optimizer.step()
        return [p.detach() for p in params]

    replicated, zero = parameters(hidden), parameters(hidden)
    adam = torch.optim.Adam(replicated)
    zero_adam = ZeroRedundancyOptimizer(zero, torch.optim.Adam)
    sharded = [
        nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in parameters(hidden)
    ]
    sharded_adam = torch.optim.Adam(sharded, foreach=False)

    def with_shards() -> list[Tensor]:
        for p, grad in zip(sharded, grads, strict=True):
            p.grad = DTensor.from_local(grad / size, mesh, [Partial()]).redistribute(
                placements=[Shard(0)]
            )
        sharded_adam.step()
        return [p.full_tensor().detach() for p in sharded]  # type: ignore[attr-defined]

    return {
        "all": _Way(lambda: with_all(replicated, adam), adam),
        "zero": _Way(lambda: with_all(zero, zero_adam), zero_adam.optim),
        "dtensor": _Way(with_shards, sharded_adam),
    }


def _numbers(optimizer: torch.optim.Optimizer) -> int:
    """The numbers in an optimizer's state on this rank."""
    count = 0
    for state in optimizer.state.values():
        for leaf in state.values():
            local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            count += local.numel() if isinstance(local, Tensor) else 1
    return count


def main(out: Path, hidden: int, rounds: int, each: int) -> None:
    torch.set_num_threads(1)
    use_own_cores()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    results: dict[str, Any] = {"updates": updates(mesh, hidden, rounds, each)}
    if size > 1:
        results["reductions"] = reductions(rounds)
        results["optimizers"] = optimizers(mesh, hidden, rounds, each)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
