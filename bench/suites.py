"""Which cases are timed."""

from __future__ import annotations

from .cases import Case

CASES = (
    Case("lstm", "lstm", 64, 32, 64, 128, unrolled=True, recompute=True),
    Case("lstm-one-row", "lstm", 100, 1, 8, 50),
    Case("lstm-small", "lstm", 64, 16, 16, 32),
    Case("lstm-large", "lstm", 32, 256, 32, 256, unrolled=True),
    Case("layer-norm-lstm", "lnlstm", 64, 32, 64, 128),
    Case("gru-3-layers", "gru", 64, 32, 64, 128, layers=3),
    Case("vmap-64", "lstm", 32, 64, 16, 32, per_sequence=True),
    Case("lstm-long", "lstm", 1024, 32, 64, 128, recompute=True),
)
QUICK = ("lstm", "lstm-one-row", "vmap-64")
