"""A few segments of odd shapes on a GPU, to be run under a tool that watches its memory."""

from __future__ import annotations

import torch

from ftbptt import make_train_segment

from ..cells import problem
from ..oracle import check

NAMES = ("lstm_readout", "layer_norm_lstm", "nested_everything", "counter_and_flag")


def main() -> None:
    for name in NAMES:
        given = problem(name, torch.float64).on("cuda")
        segment = make_train_segment(
            given.step, given.loss, backend="fused", time_dim=given.time_dim or None
        )
        for steps in (3, 1):
            check(segment, given, steps)


if __name__ == "__main__":
    main()
