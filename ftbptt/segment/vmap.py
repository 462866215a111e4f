"""Where ``torch.func.vmap`` meets a segment."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._compat.running import VmapLevel
from ..compiler.signature import Level
from .call import Call, CallInfo
from .executables import Executables


def run_mapped(
    executables: Executables, call: Call, info: CallInfo, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """The segment on tensors of any levels of vmap, and its results on the same levels.

    Each level, the innermost first, adds its axis to the call: behind time in sequences, in front
    of all others. The last one runs it.
    """
    level = VmapLevel.innermost()
    if level is None:
        return executables.run(call, info, tensors)
    unwrapped = [level.unwrapped(tensor) for tensor in tensors]
    flags = [dim is not None for _, dim in unwrapped]
    with level.outside():
        if not any(flags):
            return run_mapped(executables, call, info, tensors)
        moved = [
            tensor if dim is None else tensor.movedim(dim, 1 if is_sequence else 0)
            for (tensor, dim), is_sequence in zip(unwrapped, call.is_sequence(), strict=True)
        ]
        call = call.under_vmap(Level(level.size, level.randomness), flags)
        flat = run_mapped(executables, call, info, moved)
    first_out = len(flat) - len(call.results(flat, info.with_grad).out)  # out has an axis of time
    return [level.wrapped(tensor, int(i >= first_out)) for i, tensor in enumerate(flat)]
