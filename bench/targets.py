"""What was to be reached, what was measured, and whether it is enough."""

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
    for name, wanted in SUITES[suite].targets.items():
        if name in results["cases"]:
            rows += _against_best(results["cases"][name], wanted)
    for case in results["cases"].values():
        rows += _scaling(case)
    return rows


def row(what: str, measured: float | None, sign: str, wanted: float, unit: str = "x") -> Row:
    """A line of the table: ``wanted`` is the least (``sign`` ">=") or the most that is wanted."""
    if measured is None:
        verdict = "not measured"
    else:
        reached = measured >= wanted if sign == ">=" else measured <= wanted
        verdict = "ok" if reached else "short"
    return {
        "what": what,
        "target": f"{'at least' if sign == '>=' else 'at most'} {wanted:g}{unit}",
        "measured": measured,
        "unit": unit,
        "verdict": verdict,
    }


def _default(results: Results) -> list[Row]:
    def value(case: str, key: str, peer: str = "engine") -> float | None:
        row = results["cases"].get(case, {}).get("peers", {}).get(peer, {})
        return row.get(key) if row.get("status") == "ok" else None

    def against(case: str, peer: str) -> float | None:
        """How many times faster than the peer."""
        return _divided(value(case, "ratio"), value(case, "ratio", peer))

    def memory(peer: str) -> float | None:
        peak = value("lstm-long", "peak_bytes", peer)
        return _divided(peak, value("lstm-long", "peak_bytes", "eager"))

    cold = results.get("compile_s") or {}
    longer = _divided(cold.get("1024"), cold.get("16"))
    first = "LSTM T=64 B=32 D=64 H=128"
    return [
        row(f"{first}, vs eager autograd loop", value("lstm", "ratio"), ">=", 1.8),
        row(f"{first}, vs torch.func eager", against("lstm", "torch-func"), ">=", 3.0),
        row("LSTM T=100 B=1 D=8 H=50, vs eager", value("lstm-one-row", "ratio"), ">=", 12.0),
        row("layer-norm LSTM, vs eager", value("layer-norm-lstm", "ratio"), ">=", 1.8),
        row("3-layer GRU, vs eager", value("gru-3-layers", "ratio"), ">=", 1.8),
        row("vmap over 64 sequences, vs a loop over them", value("vmap-64", "ratio"), ">=", 20.0),
        row(f"{first}, cold compile", value("lstm", "compile_s"), "<=", 15.0, " s"),
        row("cold compile at T=1024, vs T=16", longer, "<=", 1.3),
        row("peak memory at T=1024, vs eager", memory("engine"), "<=", 1.0),
        row("the same with recompute=True", memory("engine-recompute"), "<=", 0.5),
    ]


def _against_best(case: Row, wanted: tuple[Best, ...]) -> list[Row]:
    """Each of this package's peers against the best of others, if all of them were measured."""
    rows = []
    peers = case["peers"]
    for others, factor in wanted:
        labels = {peer: peers[peer]["label"] if peer in peers else peer for peer in others}
        for name, own in peers.items():
            if not name.startswith("engine") or "threads" in own:
                continue
            ratios = {peer: _faster(own, peers.get(peer, {})) for peer in others}
            known = {peer: ratio for peer, ratio in ratios.items() if ratio is not None}
            best = min(known, key=known.__getitem__) if len(known) == len(others) else None
            against = labels[best] if best else " and ".join(labels.values())
            what = f"{case['title']}: {own['label']}, vs {against}"
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
            had_them = [gain >= SCALING_GAIN * threads for gain in gains]
            if "thread_gains" in many:
                what += f" ({sum(had_them)} of {len(had_them)} rounds"
                if any(had_them):
                    gain = statistics.median(compress(gains, had_them))
                    what += f", in which the GEMM gained {gain:.2f}x"
                what += ")"
            enough = sum(had_them) >= min(SCALING_ROUNDS, len(had_them))
            measured = _faster(many, same[few], had_them) if enough else None
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
    return statistics.median(theirs / own for own, theirs in chosen)


def _divided(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
