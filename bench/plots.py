"""The pictures: the training curve of the main job, and the bars of the bench."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")


def plot_curve(
    path: Path,
    characters: Sequence[int],
    bits: Sequence[float],
    held_out: Mapping[str, float],
    source: str,
) -> None:
    """Training bits per character over characters; the held-out figures as horizontal lines."""
    figure = _figure(8, 4.8)
    axes = figure.subplots()
    millions = [count / 1e6 for count in characters]
    axes.plot(millions, bits, color=COLOURS[0], linewidth=1.2, label="training")
    for colour, style, (name, value) in zip(
        COLOURS[1:], ("--", "-.", "-"), held_out.items(), strict=False
    ):
        label = f"held-out, {name}: {value:.3f}"
        axes.axhline(value, color=colour, linestyle=style, linewidth=1.2, label=label)
    axes.set_xlabel("characters trained on (millions)")
    axes.set_ylabel("bits per character")
    axes.set_title(f"Character LSTM on {source}" if len(source) < 60 else "Character LSTM")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def plot_scaling(path: Path, counts: Sequence[int], curves: Mapping[str, Sequence[float]]) -> None:
    """Predicted efficiency over the number of GPUs."""
    figure = _figure(8, 4.8)
    axes = figure.subplots()
    for i, (label, shares) in enumerate(curves.items()):
        style = ("-", "--")[i % 2]
        axes.plot(counts, shares, style, color=COLOURS[i // 2], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("efficiency (predicted)")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # here: benches that draw nothing do without it

    return Figure(figsize=(width, height), dpi=120)  # no pyplot: needs no display


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the picture to a temporary file and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    figure.tight_layout()
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)


def peer_labels(results: Mapping[str, Any]) -> dict[str, str]:
    """The label of each peer, in order; without those that only show how a peer scales."""
    labels: dict[str, str] = {}
    for case in results["cases"].values():
        rows = case["peers"].items()
        labels |= {name: row["label"] for name, row in rows if "threads" not in row}
    return labels


def plot_bars(path: Path, results: Mapping[str, Any]) -> None:
    """How many times faster than the eager loop, a group of bars for each case."""
    cases = list(results["cases"].values())
    labels = peer_labels(results)
    height = 0.8 / max(len(labels), 1)
    figure = _figure(9, 1.2 + (0.1 + 0.15 * len(labels)) * len(cases))
    axes = figure.subplots()
    for place, (name, label) in enumerate(labels.items()):
        rows = [(group, case["peers"].get(name, {})) for group, case in enumerate(cases)]
        bars = [(group + place * height, row["ratio"]) for group, row in rows if "ratio" in row]
        if not bars:
            continue
        colour = COLOURS[place % len(COLOURS)]
        drawn = axes.barh([y for y, _ in bars], [x for _, x in bars], height, color=colour)
        drawn.set_label(label)
        axes.bar_label(drawn, fmt="%.1f", padding=2, fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks([group + 0.4 - height / 2 for group in range(len(cases))])
    axes.set_yticklabels([case["title"] for case in cases], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.25 / max(len(cases), 1))
    axes.set_xlabel("times faster than the eager autograd loop (log scale)")
    axes.set_title(f"One segment, forward and backward, float32\n{results['machine']['cpu']}")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)
