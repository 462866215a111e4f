"""A sliding window in the gradient: the reverse loops of all windows, many at once."""

from __future__ import annotations

from torch import Tensor

from .._trees import in_groups
from ..compiler.run_loop import ChunkInputs, run_loop
from ..compiler.sliding_window import Sliding, on_windows
from .programs import Programs


def reverse_windows(
    programs: Programs,
    sliding: Sliding,
    most: int,
    invariants: list[Tensor],
    sequences: list[Tensor],
    d_outs: list[Tensor],
) -> list[Tensor]:
    """The gradient of each trained invariant, summed over windows, up to ``most`` at once."""
    split, steps = programs.split_reverse, sequences[0].shape[0]
    count = min(most, 1 << (-(-steps // sliding.stride) - 1).bit_length())
    zeros = programs.plan.loops.zero_gradients(sequences[0].device)
    carries = [zero.expand(count, *zero.shape).contiguous() for zero in zeros]
    padded = {
        i: sliding.padded(sequence, count)
        for i, sequence in enumerate([*sequences, *d_outs])
        if i in split.reads
    }
    totals: list[Tensor] = []
    for batch in sliding.batches(0, steps, count) if split.recurrences.loop.stacked else ():
        parts = [
            sliding.part(leaf, batch, count)
            if i < len(sequences)
            else sliding.with_loss(leaf, batch, count)
            for i, leaf in padded.items()
        ]
        n_read = sum(i < len(sequences) for i in padded)
        handed_back = _windows(programs, sliding, invariants, parts, n_read, carries)
        if not totals:
            room = len(sequences[0]) + 2 * sliding.length + count * sliding.stride
            totals = [leaf.new_zeros((room, *leaf.shape[2:])) for leaf in handed_back]
        for total, leaf in zip(totals, handed_back, strict=True):
            sliding.add(total, batch, leaf)
    totals = [total[sliding.length - 1 :][:steps] for total in totals]
    all_sequences = [*sequences, *d_outs, *totals]
    return programs.run_chunk("rest", split.rest, ChunkInputs(invariants, all_sequences, []))


def _windows(
    programs: Programs,
    sliding: Sliding,
    invariants: list[Tensor],
    sequences: list[Tensor],
    n_read: int,
    carries: list[Tensor],
) -> list[Tensor]:
    """What the recurrences of some windows hand back, ``[length, windows, ...]``.

    The first ``n_read`` sequences are parts of padded ones, the others side by side already.
    """
    given = ChunkInputs(invariants, sequences, carries)
    count, sizes = carries[0].shape[0], [len(group) for group in given]
    name = ("windows", count)
    if name not in programs.functions:
        loop = programs.split_reverse.recurrences
        run_scan = on_windows(programs.backend.run_scan, loop, count)

        def function(*args: Tensor) -> list[Tensor]:
            inputs = ChunkInputs(*in_groups(args, sizes))
            windows = list(inputs.sequences)
            windows[:n_read] = map(sliding.side_by_side, windows[:n_read])
            inputs = inputs._replace(sequences=windows)
            return run_loop(loop, run_scan, inputs, sliding.length, count)[1]

        programs.build_once(name, function, given.flat(), 0, 0)
    return programs.functions[name](*given.flat())
