"""The command line of a benchmark that consists of parts, each with rows of targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import report
from .options import check_can_draw, check_folder, folder_for, parser_of


@dataclass(frozen=True)
class Table:
    """An extra table of results: a title, an explanation, and rows of cells."""

    title: str
    about: str
    header: list[str]
    rows: list[list[str]]


Part = Callable[[], list[Any]]  # returns target rows and Tables


def run_parts(
    suite: str,
    about: str | None,
    rounds: int,
    parts_of: Callable[[bool, int, Path], list[Part]],
    arguments: Sequence[str] | None,
    *,
    draws: bool = False,
) -> int:
    """Runs ``parts_of(quick, rounds, folder)`` and writes the results; returns the exit status.

    ``draws``: a part of it draws a picture.
    """
    parser = parser_of(suite, about)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument("--out", type=Path, help="folder (default bench/results)")
    options = parser.parse_args(arguments)
    folder = folder_for(options.out, is_part=options.quick)
    check_folder(parser, folder)
    if draws:
        check_can_draw(parser)
    rounds = 3 if options.quick else rounds
    results: dict[str, Any] = {"machine": report.machine(), "suite": suite, "rounds": rounds}
    parts = parts_of(options.quick, rounds, folder)
    outputs = [output for part in tqdm(parts, desc=suite) for output in part()]
    results["targets"] = [output for output in outputs if not isinstance(output, Table)]
    results["tables"] = [asdict(output) for output in outputs if isinstance(output, Table)]
    report.write_targets(folder, results)
    return 0
