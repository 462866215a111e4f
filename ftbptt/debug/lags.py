"""Gradients of single steps' losses, split by lag.

A plain reverse loop sums the gradients of all later losses. Here each step's loss has its own
reverse loop, a window of a sliding gradient, so that its contributions can be told apart by lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .._trees import leaf_names
from ..backends import EAGER
from ..compiler.distribute import distribute
from ..compiler.graphs import nbytes, value_of
from ..compiler.plan import Plan
from ..compiler.run_loop import ChunkInputs, run_loop
from ..compiler.sliding_window import Sliding, on_windows
from ..segment.execute import Executable

Groups = dict[str, list[Tensor]]
_BATCH_BYTES = 64 << 20  # of windows that run at once


def norms_by_lag(
    plan: Plan, groups: Groups, first_loss: int, max_lag: int, row_axes: Sequence[int] | None
) -> dict[str, Tensor]:
    """norms_by_lag : -> for each state leaf ``[max_lag, losses, B]``

    Entry ``[k - 1, i]`` is the norm of d loss_t / d (the state after step t - k), with t =
    ``first_loss`` + i. ``row_axes``: the batch axis of each state leaf; None without a batch.

    Runs eagerly: this is called once, and compiling would take longer.
    """
    run_scan = EAGER.run_scan
    invariants, sequences, d_outs, steps = _forward(plan, groups)
    reverse = plan.loops.reverse
    # Without the sums over time; instead, every step returns the gradients of its state.
    loop = distribute(replace(reverse, stacked=list(reverse.carries), summed=[]))
    sliding = Sliding(max_lag + 1, 1)
    window_bytes = sliding.length * sum(map(nbytes, [*reverse.sequences, *reverse.carries]))
    count = min(steps - first_loss, max(1, _BATCH_BYTES // max(window_bytes, 1)))
    scan_windows = on_windows(run_scan, loop, count)
    device = sequences[0].device
    start = [
        torch.zeros((count, *value_of(c).shape), dtype=value_of(c).dtype, device=device)
        for c in reverse.carries
    ]
    padded = [sliding.padded(sequence, count) for sequence in sequences]
    padded_d_outs = [sliding.padded(d_out, count) for d_out in d_outs]
    norms: list[dict[str, Tensor]] = []
    for batch in sliding.batches(first_loss, steps, count):
        windows = [sliding.side_by_side(sliding.part(s, batch, count)) for s in padded]
        windows += [sliding.with_loss(d_out, batch, count) for d_out in padded_d_outs]
        inputs = ChunkInputs(invariants, windows, start)
        _, d_states, _ = run_loop(loop, scan_windows, inputs, sliding.length, count)
        # The last entry is the gradient that enters step t from later losses: always zero.
        d_states = [d[:-1, : batch.windows].flip(0) for d in d_states]
        norms.append(_norms_by_leaf(plan, d_states, row_axes))
    return {name: torch.cat([of_batch[name] for of_batch in norms], 1) for name in norms[0]}


def _forward(plan: Plan, groups: Groups) -> tuple[list[Tensor], list[Tensor], list[Tensor], int]:
    """``(invariants, sequences, d_outs, steps)``: what the reverse loop reads, time first."""
    executable = Executable(plan, EAGER)
    inputs = executable.inputs(groups)
    steps = inputs.x[0].shape[0]
    found = executable.run_forward(inputs, [None], with_grad=True)
    _, *d_outs = plan.loss.graphs_for(steps).joint(*found.out, *inputs.targets)
    return found.invariants, [*inputs.x, *found.saved[0]], d_outs, steps


def _norms_by_leaf(
    plan: Plan, d_states: list[Tensor], row_axes: Sequence[int] | None
) -> dict[str, Tensor]:
    """The norms ``[lags, windows, B]`` of each state leaf that has a gradient."""
    names = leaf_names("state", plan.signature.specs.state)
    d_carries = dict(zip(plan.loops.trained_carries, d_states, strict=True))
    norms: dict[str, Tensor] = {}
    first_carry = 0  # of the leaf: a leaf may be packed into several carries
    for i, (name, packing) in enumerate(zip(names, plan.packings, strict=True)):
        carries = range(first_carry, first_carry + packing.count)
        first_carry += packing.count
        parts = [d_carries[carry] for carry in carries if carry in d_carries]
        if not parts:
            continue
        if plan.signature.mean_axis is not None:
            row_axis: int | None = 0
        else:
            row_axis = None if row_axes is None else packing.row_axis(row_axes[i])
        part_norms = torch.stack([_row_norms(part, row_axis) for part in parts])
        norms[name] = part_norms.square().sum(0).sqrt()
    return norms


def _row_norms(d_state: Tensor, row_axis: int | None) -> Tensor:
    """``[lags, windows, ...] -> [lags, windows, B]``, at least in float32."""
    d_state = d_state.to(torch.promote_types(d_state.dtype, torch.float32))
    if row_axis is None:
        entries = d_state.reshape(*d_state.shape[:2], -1)  # also of a state that is one number
        return torch.linalg.vector_norm(entries, dim=2).unsqueeze(2)
    rows = d_state.movedim(row_axis + 2, 2)
    return torch.linalg.vector_norm(rows.reshape(*rows.shape[:3], -1), dim=3)


def gradients_by_reach(plan: Plan, groups: Groups, reaches: Sequence[int]) -> list[list[Tensor]]:
    """For each reach the parameters' gradients if each loss reaches back that many steps.

    A reach counts the step of the loss itself.
    """
    gradients = []
    for reach in reaches:
        windowed = replace(plan, sliding=Sliding(reach, 1))
        outputs = Executable(windowed, EAGER).run(groups, with_grad=True)
        gradients.append(outputs[: len(groups["params"])])
    return gradients
