"""How far the loss of one step reaches back: reverse loops from single steps, side by side.

A plain reverse loop adds up what all later losses send back. Here the loss of each step has a loop
of its own, a window of a sliding gradient, so what it sends back can be told apart by lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .._execute import Executable
from .._trees import keystr, tree_flatten_with_path, tree_unflatten
from ..backends import EAGER
from ..compiler.distribute import distribute
from ..compiler.graphs import nbytes, value_of
from ..compiler.plan import Plan
from ..compiler.program import run_loop
from ..compiler.windows import Sliding, on_windows

Groups = dict[str, list[Tensor]]
_BLOCK_BYTES = 64 << 20  # of the windows that run at once


def norms_by_lag(
    plan: Plan, groups: Groups, first: int, max_lag: int, row_axes: Sequence[int] | None
) -> dict[str, Tensor]:
    """norms_by_lag : -> by state leaf ``[max_lag, losses, rows]``

    Entry ``[k - 1, i]`` is the norm of d loss_t / d (the state after step t - k), with t =
    ``first`` + i. ``row_axes``: where the rows lie in each state leaf; None: there are none.

    Runs operation by operation: a diagnosis is made once, compiling would take longer.
    """
    executable = Executable(plan, EAGER, lambda: None)
    given, x, rest, carries = executable.inputs(groups)
    prepared = [] if plan.preparation is None else plan.preparation.prepare(*given)
    invariants, steps, outs = [*given, *prepared], x[0].shape[0], plan.loops.outs
    run_scan = EAGER.run_scan
    _, stacked, _ = run_loop(plan.forward, run_scan, invariants, x, carries, steps)
    _, *d_outs = plan.loss.graphs_for(steps)[1].joint(*stacked[:outs], *rest)
    sequences = [*x, *stacked[outs:]]

    reverse = plan.loops.reverse
    loop = distribute(replace(reverse, stacked=list(reverse.carries), summed=[]))
    sliding = Sliding(max_lag + 1, 1)
    per_window = sliding.length * sum(map(nbytes, [*reverse.sequences, *reverse.carries]))
    count = min(steps - first, max(1, _BLOCK_BYTES // max(per_window, 1)))
    on_all = on_windows(run_scan, loop, count)
    start = [
        torch.zeros((count, *value_of(c).shape), dtype=value_of(c).dtype, device=x[0].device)
        for c in reverse.carries
    ]
    padded, d_padded = ([sliding.padded(s, count) for s in own] for own in (sequences, d_outs))
    found: list[dict[str, Tensor]] = []
    for block in sliding.blocks(first, steps, count):
        own = [sliding.side_by_side(sliding.part(s, block, count)) for s in padded]
        own += [sliding.with_loss(d_out, block, count) for d_out in d_padded]
        _, d_states, _ = run_loop(loop, on_all, invariants, own, start, sliding.length, count)
        # The last entry is what comes into step t itself: nothing, there is no later loss.
        d_states = [d[:-1, : block.windows].flip(0) for d in d_states]
        found.append(_of_leaves(plan, d_states, row_axes))
    return {name: torch.cat([own[name] for own in found], 1) for name in found[0]}


def _of_leaves(
    plan: Plan, d_states: list[Tensor], row_axes: Sequence[int] | None
) -> dict[str, Tensor]:
    """The norms ``[lags, windows, rows]`` of each state leaf that has a gradient."""
    spec, at = plan.signature.specs[1], 0
    paths = tree_flatten_with_path(tree_unflatten([0] * spec.num_leaves, spec))[0]
    trained = dict(zip(plan.loops.trained_carries, d_states, strict=True))
    norms: dict[str, Tensor] = {}
    for i, ((path, _), packing) in enumerate(zip(paths, plan.packings, strict=True)):
        parts = [trained[at + j] for j in range(packing.count) if at + j in trained]
        at += packing.count
        if not parts:
            continue
        if plan.signature.shared is not None:
            axis: int | None = 0
        else:
            axis = None if row_axes is None else packing.row_axis(row_axes[i])
        own = [_row_norms(part, axis) for part in parts]
        norms[f"state{keystr(path)}"] = torch.stack(own).square().sum(0).sqrt()
    return norms


def _row_norms(d_state: Tensor, axis: int | None) -> Tensor:
    """``[lags, windows, ...] -> [lags, windows, rows]``"""
    if axis is None:
        return torch.linalg.vector_norm(d_state.flatten(2), dim=2).unsqueeze(2)
    rows = d_state.movedim(axis + 2, 2)
    return torch.linalg.vector_norm(rows.reshape(*rows.shape[:3], -1), dim=3)


def gradients_by_reach(plan: Plan, groups: Groups, reaches: Sequence[int]) -> list[list[Tensor]]:
    """The parameters' gradients in which each loss reaches back so many steps, itself included."""
    found = []
    for reach in reaches:
        sliding = replace(plan, sliding=Sliding(reach, 1))
        result = Executable(sliding, EAGER, lambda: None).run(groups, with_grad=True)
        found.append(result[: len(groups["params"])])
    return found
