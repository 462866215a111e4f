"""Where ``torch.func.vmap`` meets a segment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compiler.signature import Level
from .call import Call, CallInfo
from .executables import Executables


class SegmentFunction(torch.autograd.Function):
    """Each level of vmap adds its axis to the call, and the last one runs it."""

    generate_vmap_rule = False

    @staticmethod
    def forward(executables: Executables, call: Call, info: CallInfo, *tensors: Tensor) -> Any:
        return tuple(executables.run(call, info, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("ftbptt: a segment is not differentiable; it returns the gradients.")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        executables: Executables,
        call: Call,
        call_info: CallInfo,
        *tensors: Tensor,
    ) -> Any:
        dims = in_dims[3:]
        moved = [
            t if d is None else t.movedim(d, 1 if is_sequence else 0)
            for t, d, is_sequence in zip(tensors, dims, call.is_sequence(), strict=True)
        ]
        level = Level(info.batch_size, info.randomness)
        call = call.under_vmap(level, [d is not None for d in dims])
        flat = SegmentFunction.apply(executables, call, call_info, *moved)
        before_out = len(flat) - len(
            call.results(flat, call_info.with_grad).out
        )  # what has no axis of time
        return flat, tuple(0 if i < before_out else 1 for i in range(len(flat)))
