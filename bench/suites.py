"""Suites: which cases run together, with which peers, and the targets of the fused kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .cases import Case

Best = tuple[tuple[str, ...], float]  # peers, and how many times faster than the best of them


@dataclass(frozen=True)
class Suite:
    """Cases and the peers that are timed in them; ``quick`` names the cases of a short run."""

    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    quick: tuple[str, ...]
    compile_steps: tuple[int, ...] = ()  # the first case's cold compile at these lengths
    targets: dict[str, tuple[Best, ...]] = field(default_factory=dict)  # by a case's name


DEFAULT = Suite(
    cases=(
        Case("lstm", "lstm", 64, 32, 64, 128, unrolled=True, recompute=True),
        Case("lstm-one-row", "lstm", 100, 1, 8, 50),
        Case("lstm-small", "lstm", 64, 16, 16, 32),
        Case("lstm-large", "lstm", 32, 256, 32, 256, unrolled=True),
        Case("layer-norm-lstm", "lnlstm", 64, 32, 64, 128),
        Case("gru-3-layers", "gru", 64, 32, 64, 128, layers=3),
        Case("vmap-64", "lstm", 32, 64, 16, 32, per_sequence=True),
        Case("lstm-long", "lstm", 1024, 32, 64, 128, recompute=True),
    ),
    peers=("engine", "engine-recompute", "eager", "torch-func", "unrolled", "library", "jax"),
    quick=("lstm", "lstm-one-row", "vmap-64"),
    compile_steps=(16, 1024),
)

CELLS = {
    "lstm": "lstm",
    "layer-norm-lstm": "lnlstm",
    "peephole": "peephole",
    "cho-gru": "chogru",
}
# T, B, D, H and layers; then how many times faster the LSTM is to be, and the other cells.
SHAPES = (
    ("-one-row", (100, 1, 8, 50, 1), 2.0, 2.0),
    ("-small", (64, 16, 16, 32, 1), 1.7, 2.0),
    ("", (64, 32, 64, 128, 1), 1.0, 1.7),
    ("-large", (32, 256, 32, 256, 1), 1.0, 1.2),
    ("-wide", (64, 64, 64, 512, 1), 1.0, 1.2),
    ("-3-layers", (64, 32, 64, 128, 3), 1.0, 1.5),
)
HALF = torch.bfloat16
OTHERS: tuple[tuple[Case, tuple[Best, ...]], ...] = (
    (Case("min-gru", "mingru", 256, 16, 64, 128), ((("jax",), 1.5),)),
    (
        Case("ensemble-16", "lstm", 32, 4, 8, 32, models=16),
        ((("library",), 4.0), (("jax",), 2.0)),
    ),
    (Case("lstm-bfloat16", "lstm", 64, 32, 64, 128, dtype=HALF), ((("library", "jax"), 1.0),)),
    (Case("lstm-wide-bfloat16", "lstm", 64, 64, 64, 512, dtype=HALF), ((("library", "jax"), 1.0),)),
    # (the gradient of the layer-norm LSTM has no correct digit in bfloat16, in any peer)
    (Case("peephole-bfloat16", "peephole", 64, 32, 64, 128, dtype=HALF), ((("jax",), 1.7),)),
    (Case("lstm-one-row-1024", "lstm", 64, 1, 64, 1024), ((("library", "jax"), 1.0),)),
    # the sizes of the large model of Zaremba et al. 2014
    (Case("lstm-1500", "lstm", 35, 20, 1500, 1500, layers=2), ((("library", "jax"), 1.0),)),
)


def _fused() -> Suite:
    cases: list[Case] = []
    targets: dict[str, tuple[Best, ...]] = {}
    for cell, kind in CELLS.items():
        for suffix, sizes, lstm, other in SHAPES:
            cases.append(Case(cell + suffix, kind, *sizes))
            best: Best = (("library", "jax"), lstm) if kind == "lstm" else (("jax",), other)
            targets[cell + suffix] = (best,)
    for case, bests in OTHERS:
        cases.append(case)
        targets[case.name] = bests
    return Suite(
        cases=tuple(cases),
        peers=("engine", "eager", "library", "jax"),
        quick=("lstm", "lstm-one-row", "peephole"),
        targets=targets,
    )


SUITES = {"default": DEFAULT, "fused": _fused()}
