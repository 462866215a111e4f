"""The benchmark on a GPU: one command, a few minutes, nothing to install.

    python -m bench.gpu                 everything; writes bench/results/
    python -m bench.gpu --cases lstm,vmap       only those; writes runs/bench/
    python -m bench.gpu --quick         small sizes, few rounds, on any device; writes runs/bench/

For each case: every peer's first call; its result against the loop in float64 on the same device (a
wrong peer is not timed); then rounds in which the peers take turns, timed by the device's events,
first one call alone, then several in a row, as in training, where a call is prepared while the
device works on the one before; then the number of kernels that one call launches. Ceilings are
measured in the same run. Results are written after every case, so that an interrupted run loses
only its last one; a case that hangs ends the run, with a traceback. After seven minutes no case
begins any more; what is left out is listed, to be run with --cases.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from tqdm import tqdm

from ftbptt import make_train_segment

from . import gpu_report, limits, report
from .calls import Call, Skip, one_line
from .cases import Problem, build, loss
from .gpu_cases import OURS, GpuCase, cases, quick, resets
from .gpu_peers import PEERS, wait_for_jax
from .options import check_folder, folder_for, parser_of
from .oracle import SAME_TIMES, TIMES
from .targets import row

# A peer that has taken so long has no more rounds than these; and one whose call takes so long is
# not profiled. All is to be done in 8 minutes.
_MOST_SECONDS, _FEWEST_ROUNDS, _LONGEST_PROFILED = 4.0, 5, 0.1
# Calls in a row take about so many seconds; of longer calls there is only the one alone.
_IN_A_ROW, _FEWEST_IN_A_ROW, _MOST_IN_A_ROW, _LONGEST_IN_A_ROW = 0.01, 2, 10, 0.1
_LAST_START = 7 * 60.0  # seconds after which no case begins
# The error of the eager loop itself above which a gradient is chaotic in TF32, and says nothing.
_CHAOTIC = 0.05
_LONGEST_KERNELS = 6  # that the results name
_LONGEST_CASE = 180.0  # a kernel that waits for another for ever cannot be interrupted


class Clock:
    """Measures the seconds of a call on the device, as the mean of several in a row."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(
        self, call: Callable[[], object], calls: int = 1, *, by_jax: bool = False
    ) -> float:
        """``by_jax``: its work is not in torch's queue."""
        self.wait()
        if by_jax or self.device.type != "cuda":
            began = time.perf_counter()
            for _ in range(calls):
                result = call()
            if by_jax:
                wait_for_jax(result)
            return (time.perf_counter() - began) / calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end) / calls

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def in_precision(precision: str) -> Iterator[torch.dtype]:
    """Float32 products in TF32 or not, for torch and cuDNN alike; the dtype to compute in."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield torch.bfloat16 if precision == "bf16" else torch.float32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_device(problem: Problem, device: torch.device) -> Problem:
    def move(leaf: Tensor) -> Tensor:
        return leaf.to(device)

    state, x, y = (pytree.tree_map(move, t) for t in (problem.state, problem.x, problem.y))
    return Problem(problem.case, tuple(m.to(device) for m in problem.models), state, x, y)


def run_case(
    gpu_case: GpuCase, device: torch.device, rounds: int, ceilings: dict[str, float], bar: tqdm[Any]
) -> dict[str, Any]:
    """The results of a case: a row for each peer."""
    clock = Clock(device)
    bar.set_postfix_str("float64 loop")
    reset = resets(gpu_case).to(device)
    with in_precision(gpu_case.precision) as dtype:
        expected = PEERS["eager"](on_device(build(gpu_case.case, torch.float64), device), reset)()
        problem = on_device(build(gpu_case.case, dtype), device)
        loop = PEERS["eager"](problem, reset)
        eager_error = error(loop(), expected)
        is_chaotic = gpu_case.precision == "tf32" and eager_error > _CHAOTIC
        if is_chaotic:
            with in_precision("fp32"):
                exact_error = error(loop(), expected)
        rows: dict[str, dict[str, Any]] = {}
        calls: dict[str, Call] = {}
        for name in gpu_case.peers:
            bar.set_postfix_str(f"{name}: first call")
            rows[name] = {"status": "ok"}
            try:
                began = time.perf_counter()
                call = PEERS[name](problem, reset)
                call()
                clock.wait()
                rows[name]["first_s"] = time.perf_counter() - began
                for _ in range(2):
                    result = call()
                    clock.wait()
                rows[name] |= judged(name, error(result, expected), eager_error, dtype)
                if is_chaotic and name in OURS and rows[name]["status"] == "ok":
                    with in_precision("fp32"):
                        found = error(call(), expected)
                    rows[name] |= judged(name, found, exact_error, dtype) | {"in_fp32": True}
                if rows[name]["status"] == "ok":
                    calls[name] = call
            except Skip as reason:
                rows[name].update(status="skip", why=str(reason))
            except Exception as reason:  # the other peers go on; the table shows it
                rows[name].update(status="error", why=one_line(reason))
        times = timed(calls, clock, rounds, rows, bar)
        floor = _floor(gpu_case, ceilings, problem)
        for name, (alone, in_a_row) in times.items():
            call, seconds = calls[name], statistics.median(in_a_row)
            rows[name].update(
                ms=1e3 * seconds, round_ms=[1e3 * s for s in in_a_row],
                alone_ms=1e3 * statistics.median(alone), of_floor=floor / seconds, kernels=None,
            )  # fmt: skip
            if seconds < _LONGEST_PROFILED and device.type == "cuda":
                try:
                    kernels = _kernels(call)
                    rows[name]["kernels"] = sum(count for _, count, _ in kernels)
                    rows[name]["longest"] = kernels[:_LONGEST_KERNELS]
                except Exception as reason:  # of the profiler: the times are right without it
                    rows[name]["not_profiled"] = one_line(reason)
    return {"title": gpu_case.title, "floor_ms": 1e3 * floor, "peers": rows}


def judged(name: str, found: float, of_eager: float, dtype: torch.dtype) -> dict[str, Any]:
    """What a peer's error says of it, beside the eager loop's in the same precision.

    As in ``oracle``: another library that errs more, but computes the same, is timed and marked.
    """
    row: dict[str, Any] = {"error": found, "status": "ok"}
    eps = torch.finfo(dtype).eps
    if found > TIMES * of_eager + eps:
        row["why"] = f"errs {found:.1e}, the loop {of_eager:.1e}"
        if name in OURS or found > SAME_TIMES * of_eager + eps:
            row["status"] = "wrong"
    return row


def timed(
    calls: dict[str, Call],
    clock: Clock,
    rounds: int,
    rows: dict[str, dict[str, Any]],
    bar: tqdm[Any],
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each peer in each round of taking turns: of a call alone, and in a row.

    A peer that fails is left out. A slow one has fewer rounds.
    """
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for turn in range(rounds):
        bar.set_postfix_str(f"round {turn + 1} of {rounds}")
        for name, (alone, in_a_row) in list(times.items()):
            if turn >= _FEWEST_ROUNDS and sum(alone) > _MOST_SECONDS:
                continue
            try:
                seconds = clock(calls[name], by_jax=name == "jax")
                alone.append(seconds)
                if seconds < _LONGEST_IN_A_ROW:
                    count = min(_MOST_IN_A_ROW, math.ceil(_IN_A_ROW / seconds))
                    count = max(_FEWEST_IN_A_ROW, count)
                    seconds = clock(calls[name], count, by_jax=name == "jax")
                in_a_row.append(seconds)
            except Exception as reason:
                rows[name].update(status="error", why=one_line(reason))
                del times[name]
    return times


def error(result: Any, expected: Any) -> float:
    """The largest error of the loss and the gradients, each relative to its largest element."""
    worst = 0.0
    pairs = [
        (result[0], expected[0]),
        *((result[1][name], expected[1][name]) for name in expected[1]),
    ]
    for a, b in pairs:
        a = (a if isinstance(a, Tensor) else torch.as_tensor(np.asarray(a, np.float64))).to(b)
        relative = float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))
        worst = max(worst, relative if math.isfinite(relative) else math.inf)  # max() drops NaN
    return worst


def _floor(gpu_case: GpuCase, ceilings: dict[str, float], problem: Problem) -> float:
    """Seconds that the case's FLOPs or bytes take at the ceilings, whichever is longer."""
    step, batched = limits.gemms(gpu_case.case)
    flops = sum(gemm.flops for gemm in (*step, *batched))
    parameters = sum(p.numel() for p in problem.model.parameters())
    moved = limits.least_bytes(gpu_case.case, parameters)
    moved *= 0.5 if gpu_case.precision == "bf16" else 1.0
    return max(flops / ceilings[gpu_case.precision], moved / ceilings["bytes"])


def measure_ceilings(device: torch.device, size: int) -> dict[str, float]:
    """FLOP/s of a large product in each precision, bytes/s of a large copy."""
    clock, rates = Clock(device), {}

    def best(call: Callable[[], object]) -> float:
        return min(clock(call) for _ in range(10))

    for precision in ("fp32", "tf32", "bf16"):
        with in_precision(precision) as dtype:
            a = torch.randn(size, size, device=device, dtype=dtype)
            b = torch.randn(size, size, device=device, dtype=dtype)
            rates[precision] = 2.0 * size**3 / best(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    source = torch.zeros(16 * size * size, device=device)
    target = torch.empty_like(source)
    rates["bytes"] = 2.0 * source.nbytes / best(lambda: target.copy_(source))
    return rates


def _kernels(call: Call) -> list[tuple[str, int, float]]:
    """The kernels that one call runs, those of a graph's replay as well: (name, how many, ms).

    Those that take longest, all of a name together, come first.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in seen.events():
        if event.device_type.name == "CUDA":
            count, ms = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, ms + 1e-3 * event.device_time
    kernels = [(name, count, ms) for name, (count, ms) in found.items()]
    return sorted(kernels, key=lambda kernel: -kernel[2])


def targets(gpu_case: GpuCase, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows for the targets, by the faster of this package's backends."""
    rows, peers = [], result["peers"]
    mine = [peers[name] for name in OURS if "ms" in peers.get(name, {})]
    best = min(mine, key=lambda peer: peer["ms"], default=None)
    for other, factor in gpu_case.targets:
        ratio = None
        if best is not None and "ms" in peers.get(other, {}):
            pairs = zip(peers[other]["round_ms"], best["round_ms"], strict=False)
            ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        rows.append(row(f"{gpu_case.title}, vs {other}", ratio, ">=", factor))
    if gpu_case.of_floor is not None:
        part = None if best is None else best["of_floor"]
        rows.append(row(f"{gpu_case.title}, of its floor", part, ">=", gpu_case.of_floor, ""))
    return rows


def forward_latency(gpu_case: GpuCase, device: torch.device, rounds: int) -> dict[str, Any]:
    """Microseconds of a step forward, by the faster of this package's backends."""
    clock, medians = Clock(device), []
    with in_precision(gpu_case.precision) as dtype:
        problem = on_device(build(gpu_case.case, dtype), device)
        for backend in OURS:
            segment = make_train_segment(problem.model, loss, backend=backend)
            arguments = problem.params, problem.state, problem.x, problem.y
            for _ in range(3):  # compiled, captured, replayed
                segment.evaluate(*arguments)
            times = [clock(lambda s=segment, g=arguments: s.evaluate(*g)) for _ in range(rounds)]  # type: ignore[misc]
            medians.append(statistics.median(times))
    step = 1e6 * min(medians) / gpu_case.case.steps
    return row(f"{gpu_case.title}, a step forward", step, "<=", 3.0, " µs")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends with a message if they make no sense, or there is no GPU."""
    parser = parser_of("gpu", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes, few rounds, any device")
    add("--out", type=Path, help="folder (default bench/results; for part of the bench runs/bench)")
    add("--cases", help="names with commas between them (default: all)")
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys(gpu_case.case.name for gpu_case in cases()))
    names_asked = names if options.cases is None else options.cases.split(",")
    if unknown := [name for name in names_asked if name not in names]:
        parser.error(f"--cases: {unknown[0]} is none of {', '.join(names)}")
    is_part = options.quick or options.cases is not None
    options.cases = [gpu_case for gpu_case in cases() if gpu_case.case.name in names_asked]
    if not (torch.cuda.is_available() or options.quick):
        parser.exit(1, "bench.gpu: torch sees no GPU here; --quick runs small sizes without one\n")
    options.out = folder_for(options.out, is_part=is_part)
    check_folder(parser, options.out)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 1 if a result was wrong or there is no GPU."""
    options = parse(arguments)
    # So that JAX leaves memory to the other peers.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rounds = 2 if options.quick else 20
    results: dict[str, Any] = {"machine": report.machine(), "suite": "gpu", "rounds": rounds}
    if device.type == "cuda":
        results["machine"]["gpu"] = torch.cuda.get_device_name(device)
    ceilings = measure_ceilings(device, 256 if options.quick else 8192)
    chosen = [quick(gpu_case) if options.quick else gpu_case for gpu_case in options.cases]
    results.update(ceilings=ceilings, targets=[], tables=[], cases={}, failed={})
    results["left_out"] = [gpu_case.title for gpu_case in chosen]
    gpu_report.write(results, options.out)
    began = time.perf_counter()
    with tqdm(chosen, unit="case", dynamic_ncols=True) as bar:
        for gpu_case in bar:
            bar.set_description(gpu_case.case.name)
            if time.perf_counter() - began > _LAST_START:
                break
            gc.collect()  # the peers of the case before, which hold memory of the GPU
            faulthandler.dump_traceback_later(_LONGEST_CASE, exit=True)
            try:
                result = run_case(gpu_case, device, rounds, ceilings, bar)
                results["cases"][f"{gpu_case.case.name} {gpu_case.precision}"] = result
                results["targets"] += targets(gpu_case, result)
                if gpu_case.case.name == "latency":
                    results["targets"].append(forward_latency(gpu_case, device, rounds))
            except Exception as reason:  # in the eager loop, the baseline
                results["failed"][f"{gpu_case.case.name} {gpu_case.precision}"] = one_line(reason)
            faulthandler.cancel_dump_traceback_later()
            results["left_out"].remove(gpu_case.title)
            gpu_report.write(results, options.out)
    print(gpu_report.markdown(results))
    states = [p["status"] for case in results["cases"].values() for p in case["peers"].values()]
    return int("wrong" in states or bool(results["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
