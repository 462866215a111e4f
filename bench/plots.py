"""The pictures: the training curve of the main job, and the bars of the bench."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    figure = Figure(figsize=(8, 4.8), dpi=120)  # no pyplot: draws to a file, needs no display
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


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the picture to a temporary file and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    figure.tight_layout()
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
