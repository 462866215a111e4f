"""Targets: what was required, what was measured, and whether that is enough."""

from __future__ import annotations

import statistics
from itertools import compress
from typing import Any

from .suites import SUITES, Best

Results = dict[str, Any]
Row = dict[str, Any]

SCALING = 1.7  # times faster with two threads than with one,
SCALING_ROWS = 32  # from this many rows on,
SCALING_GAIN = 0.8  # in rounds in which a GEMM in cache gained so much of each thread,
SCALING_ROUNDS = 3  # if there were so many


def targets(results: Results) -> list[Row]:
    """A row for each target of the suite; those that were not measured say so."""
    suite = results.get("suite", "default")
    rows = _default(results) if suite == "default" else []
    for name, bests in SUITES[suite].targets.items():
        if name in results["cases"]:
            rows += _against_best(results["cases"][name], bests)
    for case in results["cases"].values():
        rows += _scaling(case)
    return rows


def row(what: str, measured: float | None, sign: str, target: float, unit: str = "x") -> Row:
    """A line of the table: ``target`` is a lower (``sign`` ">=") or an upper bound."""
    if measured is None:
        verdict = "not measured"
    else:
        reached = measured >= target if sign == ">=" else measured <= target
        verdict = "ok" if reached else "short"
    return {
        "what": what,
        "target": f"{'at least' if sign == '>=' else 'at most'} {target:g}{unit}",
        "measured": measured,
        "unit": unit,
        "verdict": verdict,
    }


def table(rows: list[Row]) -> list[str]:
    """The rows in Markdown."""
    lines = ["| what | target | measured | |", "| --- | --- | ---: | --- |"]
    for target in rows:
        measured = "" if target["measured"] is None else f"{target['measured']:.2f}{target['unit']}"
        lines.append(
            f"| {target['what']} | {target['target']} | {measured} | {target['verdict']} |"
        )
    return lines


def _default(results: Results) -> list[Row]:
    def value(case: str, key: str, peer: str = "engine") -> float | None:
        row = results["cases"].get(case, {}).get("peers", {}).get(peer, {})
        return row.get(key) if row.get("status") == "ok" else None

    def memory(peer: str) -> float | None:
        peak = value("lstm-long", "peak_bytes", peer)
        return _divided(peak, value("lstm-long", "peak_bytes", "eager"))

    cold = results.get("compile_s") or {}
    longer = _divided(cold.get("1024"), cold.get("16"))
    over_torch_func = _divided(value("lstm", "ratio"), value("lstm", "ratio", "torch-func"))
    first = "LSTM T=64 B=32 D=64 H=128"
    return [
        row(f"{first}, vs eager autograd loop", value("lstm", "ratio"), ">=", 1.8),
        row(f"{first}, vs torch.func eager", over_torch_func, ">=", 3.0),
        row("LSTM T=100 B=1 D=8 H=50, vs eager", value("lstm-one-row", "ratio"), ">=", 12.0),
        row("layer-norm LSTM, vs eager", value("layer-norm-lstm", "ratio"), ">=", 1.8),
        row("3-layer GRU, vs eager", value("gru-3-layers", "ratio"), ">=", 1.8),
        row("vmap over 64 sequences, vs a loop over them", value("vmap-64", "ratio"), ">=", 20.0),
        row(f"{first}, cold compile", value("lstm", "compile_s"), "<=", 15.0, " s"),
        row("cold compile at T=1024, vs T=16", longer, "<=", 1.3),
        row("peak memory at T=1024, vs eager", memory("engine"), "<=", 1.0),
        row("the same with recompute=True", memory("engine-recompute"), "<=", 0.5),
    ]


def _against_best(case: Row, bests: tuple[Best, ...]) -> list[Row]:
    """Each of this package's peers against the best of others, if all of them were measured."""
    rows = []
    peers = case["peers"]
    for others, factor in bests:
        labels = {peer: peers[peer]["label"] if peer in peers else peer for peer in others}
        for name, peer_row in peers.items():
            if not name.startswith("engine") or "threads" in peer_row:
                continue
            ratios = {peer: _faster(peer_row, peers.get(peer, {})) for peer in others}
            known = {peer: ratio for peer, ratio in ratios.items() if ratio is not None}
            best = min(known, key=known.__getitem__) if len(known) == len(others) else None
            against = labels[best] if best else " and ".join(labels.values())
            what = f"{case['title']}: {peer_row['label']}, vs {against}"
            rows.append(row(what, known[best] if best else None, ">=", factor))
    return rows


def _scaling(case: Row) -> list[Row]:
    """The fewest threads of a peer against each larger number of them."""
    rows = []
    peers = case["peers"]
    by_label: dict[str, dict[int, Row]] = {}
    for name, peer in peers.items():
        if "threads" in peer:
            label = peer["label"].rpartition(", ")[0]
            by_label.setdefault(label, {})[peer["threads"]] = peer
            plain = peers.get(name.partition("@")[0], {})
            if "all_threads" in plain:
                by_label[label][plain["all_threads"]] = plain
    for label, same in by_label.items():
        few, *more = sorted(same)
        for threads in more:
            what = f"{case['title']}: {label}, {threads} threads, vs {few}"
            many = same[threads]
            gains = many.get("thread_gains", [threads] * len(many.get("round_ms", [])))
            had_cores = [gain >= SCALING_GAIN * threads for gain in gains]
            if "thread_gains" in many:
                what += f" ({sum(had_cores)} of {len(had_cores)} rounds"
                if any(had_cores):
                    gain = statistics.median(compress(gains, had_cores))
                    what += f", in which the GEMM gained {gain:.2f}x"
                what += ")"
            is_conclusive = sum(had_cores) >= min(SCALING_ROUNDS, len(had_cores))
            measured = _faster(many, same[few], had_cores) if is_conclusive else None
            line = row(what, measured, ">=", SCALING)
            if case["batch"] < SCALING_ROWS:
                line.update(target=f"none below B={SCALING_ROWS}", verdict="")
            rows.append(line)
    return rows


def _faster(one: Row, other: Row, rounds: list[bool] | None = None) -> float | None:
    """How many times faster one is than the other: the median over the rounds' own ratios.

    ``rounds`` says which of them count.
    """
    if one.get("status") != "ok" or other.get("status") != "ok":
        return None
    pairs = zip(one["round_ms"], other["round_ms"], strict=True)
    chosen = compress(pairs, rounds) if rounds is not None else pairs
    return statistics.median(others / ones for ones, others in chosen)


def _divided(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
