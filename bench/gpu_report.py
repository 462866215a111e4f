"""The GPU benchmark's results as JSON and Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import file_name, why_untimed, write_text
from .targets import table

_LABELS = {
    "fused": "ftbptt, fused", "cudagraph": "ftbptt, cudagraph", "eager": "eager autograd loop",
    "library": "cuDNN", "split": "cuDNN, split and padded", "scan": "torch's scan, compiled",
    "vmap": "vmap of an eager loop", "jax": "JAX scan, jit",
}  # fmt: skip
_LONGEST_NAME = 60


def write(results: dict[str, Any], folder: Path) -> None:
    """Writes both files."""
    write_text(results, markdown(results), folder, tag(results))


def tag(results: dict[str, Any]) -> str:
    """Their name, such as ``nvidia-h200-gpu``."""
    about = results["machine"]
    return file_name(about.get("gpu") or about["cpu"], "gpu")


def markdown(results: dict[str, Any]) -> str:
    about, ceilings = results["machine"], results["ceilings"]
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items() if v)
    lines = [
        "# On a GPU",
        "",
        f"{about.get('gpu', 'no GPU: ' + about['cpu'])}; {versions}; {about['date']}, commit "
        f"{about['commit']}; medians over {results['rounds']} rounds in which the peers took "
        "turns. One segment: forward, loss and the gradients of all parameters. *ms* is of calls "
        "in a row, as in training, *alone* of one call that the GPU waits for; *error* the "
        "worst of the loss's and the gradients' from the loop in float64, marked (!) above three "
        "times the eager loop's own, and measured in fp32 where gradients are chaotic in TF32; *of "
        "floor*: the case's FLOPs or bytes at the ceilings, over its time; *kernels*: in one call.",
        "",
        "Ceilings measured in this run: "
        + ", ".join(f"{ceilings[p] / 1e12:.1f} TFLOP/s in {p}" for p in ("fp32", "tf32", "bf16"))
        + f", {ceilings['bytes'] / 1e9:.0f} GB/s.",
        "",
        *table(results["targets"]),
    ]
    lines += [f"\nFailed: {title} ({why})." for title, why in results["failed"].items()]
    if results["left_out"]:
        lines.append(f"\nNot measured: {', '.join(results['left_out'])}.")
    for case in results["cases"].values():
        lines += ["", f"## {case['title']}", "", f"Floor {case['floor_ms']:.3f} ms.", ""]
        lines.append("| | ms | alone | of floor | kernels | first call | error |")
        lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        lines += [_row(_LABELS.get(name, name), row) for name, row in case["peers"].items()]
        lines += _where_time_goes(case["peers"])
    return "\n".join(lines) + "\n"


def _where_time_goes(peers: dict[str, dict[str, Any]]) -> list[str]:
    """The kernels that take longest, of each peer that was profiled."""
    lines = []
    for name, row in peers.items():
        if kernels := row.get("longest"):
            shares = ", ".join(f"{count} × `{_short(k)}` {ms:.3f} ms" for k, count, ms in kernels)
            lines.append(f"- {_LABELS.get(name, name)}: {shares}")
    return ["", "Kernels that take longest, in one call:", "", *lines] if lines else []


def _short(kernel: str) -> str:
    return kernel if len(kernel) <= _LONGEST_NAME else f"{kernel[: _LONGEST_NAME - 1]}…"


def _row(label: str, row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"| {label} | {why_untimed(row)} | | | | | |"
    kernels = "" if row["kernels"] is None else str(row["kernels"])
    mark = " (!)" if "why" in row else " in fp32" if "in_fp32" in row else ""
    return (
        f"| {label} | {row['ms']:.3f} | {row['alone_ms']:.3f} | {row['of_floor']:.0%} | {kernels} "
        f"| {row['first_s']:.1f} s | {row['error']:.0e}{mark} |"
    )
