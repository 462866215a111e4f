"""Writes results as JSON, Markdown tables with targets, and a bar chart."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from .plots import peer_labels, plot_bars
from .targets import SCALING_GAIN, table

Results = dict[str, Any]


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, threads, versions, date, commit."""
    versions: dict[str, str | None] = {}
    for name in ("ftbptt", "torch", "jax", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "busy_before": _busy(),
        "threads_sleep": os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive",
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _busy() -> float | None:
    """The fraction of all processors that is in use for a second; None without Linux's /proc."""

    def ticks() -> tuple[int, int]:
        with open("/proc/stat") as file:
            counts = [int(word) for word in file.readline().split()[1:9]]
        return counts[3] + counts[4], sum(counts)  # idle and waiting, everything

    try:
        idle, every = ticks()
        time.sleep(1)
        idle_after, every_after = ticks()
    except OSError:
        return None
    return round(1 - (idle_after - idle) / max(every_after - every, 1), 3)


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        here = Path(__file__).parent
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def disturbances(results: Results) -> list[str]:
    """Sentences on what was not as it should be when the bench began."""
    about, found = results["machine"], []
    if (about["busy_before"] or 0.0) > 0.1:
        used = f"{about['busy_before']:.0%} of its processors"
        found.append(f"**Other work was on the machine** ({used}): the figures are off.")
    if about.get("threads_sleep"):
        found.append(
            "**Threads slept when they had to wait** (OMP_WAIT_POLICY=passive): those of nn.LSTM "
            "do so at each step, and take up to twice as long."
        )
    return found


def tag(results: Results) -> str:
    """A file name for machine and suite, such as ``intel-xeon-processor-2-threads``."""
    about, suite = results["machine"], results.get("suite", "default")
    ending = [] if suite == "default" else [suite]
    return file_name(about["cpu"], f"{about['threads']}-threads", *ending)


def file_name(processor: str, *ending: str) -> str:
    """The words of a processor's name and ``ending``, with hyphens between them."""
    words = re.sub(r"\([^)]*\)|@.*", " ", processor).lower()
    return "-".join([*re.findall(r"[a-z0-9]+", words), *ending])


def markdown(results: Results) -> str:
    """The tables: one for each case, and what was to be reached."""
    if "cases" not in results:
        return _targets_markdown(results)
    about = results["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items() if v)
    lines = [
        "# Bench",
        "",
        f"{about['cpu']}, {about['threads']} threads ({about['instructions']}), {about['system']}; "
        f"Python {about['python']}, {versions}; {about['date']}, commit {about['commit']}.",
        "",
        "One segment: forward, loss and the gradients of all parameters, in float32 "
        "unless the title says otherwise. Times are "
        f"medians over {results['rounds']} rounds in which the peers took turns; *vs eager* is the "
        "median of the rounds' own ratios. *Compile* is the first call in a fresh process with "
        "empty caches, less a warm one; *memory* is by how much a warm call raises the process's "
        "memory; *error* is the worst of the loss's and the gradients' relative errors from "
        "float64, marked (!) above three times the eager loop's own; *of floor* is the fraction of "
        "the machine's floor that is reached: the case's GEMMs at the rates measured at their own "
        "shapes, or its bytes at copy speed, whichever takes longer.",
    ]
    rows = [row for case in results["cases"].values() for row in case["peers"].values()]
    if any("thread_gains" in row for row in rows):
        lines[-1] += (
            " How a peer scales is told from rounds in which the machine had its cores: a GEMM in "
            f"cache gained {SCALING_GAIN:.0%} of each thread just before and after."
        )
    repeated = sum(case.get("repeated", 0) for case in results["cases"].values())
    if repeated:
        lines[-1] += (
            f" {repeated} rounds were taken again: the machine had lost its cores to others, and "
            "several threads were slower than one."
        )
    for disturbance in disturbances(results):
        lines += ["", disturbance]
    lines += ["", "## Times faster than the eager autograd loop", "", *_summary(results)]
    for case in results["cases"].values():
        lines += ["", f"## {case['title']}", "", _floor_line(case["floor"]), ""]
        lines.append("| | ms | vs eager | of floor | compile | memory | error |")
        lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        lines += [_row(row) for row in case["peers"].values()]
    lines += ["", "## What it must reach", "", *table(results["targets"])]
    for steps, seconds in (results.get("compile_s") or {}).items():
        if seconds is not None:
            lines += ["", f"Cold compile of the first case at T={steps}: {seconds:.1f} s."]
        again = results.get("compile_again_s", {}).get(steps)
        if again is not None:
            lines += ["", f"The same in a new process that finds the caches: {again:.1f} s."]
    return "\n".join(lines) + "\n"


def _summary(results: Results) -> list[str]:
    cases = results["cases"].values()
    labels = peer_labels(results)
    lines = ["| | " + " | ".join(labels.values()) + " |", "| --- |" + " ---: |" * len(labels)]
    for case in cases:
        rows = [case["peers"].get(name, {}) for name in labels]
        cells = [f"{row['ratio']:.2f}" if "ratio" in row else "" for row in rows]
        lines.append(f"| {case['title']} | " + " | ".join(cells) + " |")
    return lines


def _floor_line(floor: dict[str, float]) -> str:
    rates = f"{floor['batched_rate'] / 1e9:.0f} GFLOP/s in the batched GEMMs"
    if floor["step_rate"]:
        rates = (
            f"{floor['step_rate'] / 1e9:.0f} GFLOP/s in the steps' GEMMs and "
            f"{floor['batched_rate'] / 1e9:.0f} in the batched ones"
        )
    return (
        f"Floor {1e3 * floor['seconds']:.2f} ms: {floor['flops'] / 1e9:.3g} GFLOP, at {rates}; "
        f"{floor['bytes'] / 1e6:.1f} MB at "
        f"{floor['bandwidth'] / 1e9:.0f} GB/s take {1e3 * floor['copy_seconds']:.2f} ms."
    )


def _row(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"| {row['label']} | {why_untimed(row)} | | | | | |"
    ratio = f"{row['ratio']:.2f}x" if "ratio" in row else ""
    memory = f"{row['peak_bytes'] / 2**20:.1f} MB" if "peak_bytes" in row else ""
    mark = " (!)" if "why" in row else ""
    return (
        f"| {row['label']} | {row['ms']:.2f} | {ratio} | {row['of_floor']:.0%} | "
        f"{row['compile_s']:.1f} s | {memory} | {row['error']:.0e}{mark} |"
    )


def why_untimed(row: dict[str, Any]) -> str:
    """The cell of a peer that has no figures."""
    word = {"skip": "skipped", "wrong": "WRONG", "error": "failed"}[row["status"]]
    return f"{word}: {row['why'].replace('|', '/')}"


def write(results: Results, folder: Path) -> list[Path]:
    """Writes JSON, Markdown and PNG beside each other; their paths."""
    paths = write_text(results, markdown(results), folder, tag(results))
    paths.append(paths[0].with_suffix(".png"))
    plot_bars(paths[-1], results)
    return paths


def write_text(results: Results, text: str, folder: Path, name: str) -> list[Path]:
    """Writes the results as JSON, and as the Markdown ``text``; the paths of both."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    for path, content in zip(paths, (json.dumps(results, indent=1) + "\n", text), strict=True):
        path.write_text(content)
    return paths


# Of suites of targets alone.
_TITLES = {"streams": "Streams", "inside": "Looking inside", "scaling": "Many processes"}


def _targets_markdown(results: Results) -> str:
    about = results["machine"]
    lines = [
        f"# {_TITLES[results['suite']]}",
        "",
        f"{about['cpu']}, {about['threads']} threads ({about['instructions']}), torch "
        f"{about['versions']['torch']}; {about['date']}, commit {about['commit']}; medians over "
        f"{results['rounds']} rounds in which what is compared took turns.",
        "",
        *table(results["targets"]),
    ]
    for disturbance in disturbances(results):
        lines += ["", disturbance]
    for extra in results.get("tables", ()):
        lines += ["", f"## {extra['title']}", "", extra["about"], ""]
        lines.append("| " + " | ".join(extra["header"]) + " |")
        lines.append("| --- |" + " ---: |" * (len(extra["header"]) - 1))
        lines += ["| " + " | ".join(cells) + " |" for cells in extra["rows"]]
    return "\n".join(lines) + "\n"


def write_targets(folder: Path, results: Results) -> None:
    """Writes and prints the results of a suite of targets alone, ``results["targets"]``."""
    text = markdown(results)
    write_text(results, text, folder, tag(results))
    print(text)
