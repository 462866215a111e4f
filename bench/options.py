"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """The options of ``python -m bench.<name>``, none of them added yet."""
    return argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def folder_for(out: Path | None, *, is_part: bool) -> Path:
    """Where results go: to ``out``, if it is given; else those of a part not beside full ones."""
    return out or Path("runs/bench" if is_part else "bench/results")


def check_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Makes the folder. Ends with a message, before anything is measured, if it is of no use."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        parser.error(f"--out: no file can be written in {folder}: {error.strerror or error}")


def check_can_draw(parser: argparse.ArgumentParser) -> None:
    """Ends with a message if a picture could not be drawn when all is done."""
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("pictures need matplotlib; install it with pip install .[bench]")
