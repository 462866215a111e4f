"""Benchmark of data-parallel training: measured here on processes, predicted for many GPUs.

    python -m bench.scaling                  1, 2 and 4 processes, three minutes; bench/results/
    python -m bench.scaling --quick          a smaller model, fewer rounds; writes runs/bench/

Measured here: an update with and without the others, the bytes it sends, when each bucket of them
is ready, and all-reduces of several sizes. From those, and from the assumptions stated beside the
tables, the alpha-beta model predicts what an update takes on more.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftbptt.distributed.reduction import buckets_of

from .alpha_beta import Link, Update, best, fitted, in_nodes, ring, tree
from .parts import Part, Table, run_parts
from .plots import plot_scaling
from .scaling_rank import INPUTS, ROWS, STEPS, parameters
from .targets import row
from .turns import ratio

PROCESSES = (1, 2, 4)
GPUS = (1, 2, 8, 64, 512, 4096)
# Assumptions about GPUs, all stated beside the table.
PER_NODE = 8
INSIDE = Link(alpha=3e-6, beta=300e9)
OUTSIDE = Link(alpha=10e-6, beta=40e9)
FLOPS = 50e12  # a second, reached in the GEMMs of the weights' gradients
PER_STEP = 9e-6  # seconds of a step, forward and in reverse, that no batch makes shorter


def measure(processes: int, hidden: int, rounds: int, each: int) -> dict[str, Any]:
    """What the first of ``processes`` processes measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", str(processes), "-m", "bench.scaling_rank",
                str(out), str(hidden), str(rounds), str(each),
            ],
            check=True,
        )  # fmt: skip
        results: dict[str, Any] = json.loads(out.read_text())
    return results


def update_of(results: dict[str, Any], compute: float) -> Update:
    """An update as it was measured, in ``compute`` seconds without communication.

    A bucket is ready at the same part of it as in the segment alone.
    """
    updates = results["updates"]
    segment = min(updates["segment"], compute)  # what comes after it needs all gradients
    early = updates["segment"] - segment
    return Update(segment, [(size, max(at - early, 0.0)) for size, at in updates["buckets"]])


def measured(all_results: dict[int, dict[str, Any]]) -> Table:
    """The measured updates, and what the model predicts for them."""
    lines = []
    for processes, results in all_results.items():
        seconds = results["updates"]["seconds"]
        names = ("alone", "in step", "together")
        alone, in_step, together = (statistics.median(seconds[name]) for name in names)
        efficiency = ratio(seconds, "alone", "together")
        cells = [str(processes), *(f"{1e3 * t:.2f}" for t in (alone, in_step, together))]
        if processes > 1:
            sizes, times = zip(*results["reductions"], strict=True)
            link = fitted(sizes, times, processes)
            update = update_of(results, in_step)
            predicted = in_step - update.compute + update.seconds(ring(link), processes)
            cells += [
                f"{1e3 * predicted:.2f}",
                f"{efficiency:.0%}",
                f"{alone / predicted:.0%}",
                f"{1e6 * link.alpha:.0f} µs, {link.beta / 1e9:.1f} GB/s",
            ]
        else:
            cells += ["", "", "", ""]
        lines.append(cells)
    return Table(
        f"An update, T={STEPS} B={ROWS} D={INPUTS} on each process, one thread each",
        "Milliseconds of an update without the others, all running side by side; *in step*: the "
        "same if all waited for the slowest at each update, though nothing is sent; and with them. "
        "*Predicted* is in step with the communication of the model, for a ring of the latency and "
        "bandwidth that fit this number of processes' all-reduces. *Efficiency* is without over "
        "with. Each process keeps to a core of its own (`use_own_cores`); where there are more "
        "processes than cores, all columns say so.",
        [
            *("processes", "without", "in step", "with", "predicted"),
            *("efficiency", "predicted", "fitted"),
        ],
        lines,
    )


def gpus(hidden: int, folder: Path) -> Table:
    """The prediction for GPUs: a table, and a plot."""
    reduce = in_nodes(
        best(ring(INSIDE), tree(INSIDE)), best(ring(OUTSIDE), tree(OUTSIDE)), PER_NODE
    )
    lines, curves = [], {}
    for name, rows, width in (("as here", ROWS, hidden), ("B=128 H=1024", 128, 1024)):
        leaves = parameters(width)
        sizes = [float(sum(leaves[i].nbytes for i in bucket)) for bucket in buckets_of(leaves)]
        flops = 2.0 * rows * STEPS * sum(sizes) / 4  # forward, and as many for each half of reverse
        compute = STEPS * PER_STEP + 3 * flops / FLOPS
        ready = compute - flops / FLOPS  # the weights' gradients: one GEMM each, after the loop
        as_they_come = []
        for size in sizes:
            ready += flops / FLOPS * size / sum(sizes)
            as_they_come.append((size, ready))
        at_the_end = [(sum(sizes), compute)]
        for when, buckets in (("as they come", as_they_come), ("all at the end", at_the_end)):
            label = f"{name}, in {len(buckets)}, {when}"
            update = Update(compute, buckets)
            curves[label] = [compute / update.seconds(reduce, n) for n in GPUS]
            cells = [label, f"{1e6 * compute:.0f}", f"{sum(sizes) / 1e6:.2f}"]
            lines.append([*cells, *(f"{efficiency:.0%}" for efficiency in curves[label])])
    plot_scaling(folder / "scaling.png", GPUS, curves)
    return Table(
        "Efficiency on GPUs, predicted",
        f"Nothing of it was measured on a GPU. Assumed: {PER_NODE} in a node, "
        f"{1e6 * INSIDE.alpha:.0f} µs and {INSIDE.beta / 1e9:.0f} GB/s between them, "
        f"{1e6 * OUTSIDE.alpha:.0f} µs and {OUTSIDE.beta / 1e9:.0f} GB/s from each to other "
        f"nodes; {1e6 * PER_STEP:.0f} µs for a step forward and in reverse and "
        f"{FLOPS / 1e12:.0f} TFLOP/s in the GEMMs; the faster of ring and two trees, first "
        "within nodes; the same work on each, T=64, float32 gradients in the buckets that they "
        "go in; no rank is ever late. They are on their way while the gradients of later ones "
        "are computed, or go in one when all are there.",
        ["", "µs", "MB", *(f"{n:,}" for n in GPUS)],
        lines,
    )


def shared_optimizer(results: dict[str, Any]) -> Table:
    """What sharding the optimizer's state costs, and what it saves."""
    optimizers = results["optimizers"]
    names = {
        "all": "on every rank",
        "zero": "ZeroRedundancyOptimizer",
        "dtensor": "DTensor shards (reduce-scatter, all-gather)",
    }
    lines = [
        [
            label,
            f"{1e3 * statistics.median(optimizers['seconds'][name]):.2f}",
            f"{optimizers['numbers'][name] / optimizers['numbers']['all']:.0%}",
        ]
        for name, label in names.items()
    ]
    return Table(
        "Adam's state shared out over two processes",
        "From each rank's gradients to all parameters; the three make the same update.",
        ["", "ms", "of the state on the first rank"],
        lines,
    )


def parts(quick: bool, rounds: int, folder: Path) -> list[Part]:
    hidden, each = (32, 3) if quick else (256, 10)
    results: dict[int, dict[str, Any]] = {}

    def one(processes: int) -> list[Any]:
        results[processes] = measure(processes, hidden, rounds, each)
        return []

    def conclude() -> list[Any]:
        share = 1 - ratio(results[2]["updates"]["seconds"], "in step", "together")
        what = f"communication of an update, 2 processes, T={STEPS} B={ROWS} H={hidden} on each"
        return [
            row(what, 100 * share, "<=", 10, " %"),
            measured(results),
            shared_optimizer(results[2]),
            gpus(hidden, folder),
        ]

    return [*(lambda n=n: one(n) for n in PROCESSES), conclude]  # type: ignore[misc]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return run_parts("scaling", __doc__, 9, parts, arguments, draws=True)


if __name__ == "__main__":
    sys.exit(main())
