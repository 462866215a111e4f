"""Where ``torch.func.vmap`` meets a segment."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..compiler.signature import Level
from .call import Call


class Runs(Protocol):
    """The executables of a segment, as far as vmap is concerned."""

    def run(self, call: Call, with_grad: bool, info: CallInfo, tensors: Any) -> list[Tensor]: ...


class CallInfo:
    """What a call learns while it runs, passed through torch.func as it is."""

    out_spec: Any = None


class SegmentFunction(torch.autograd.Function):
    """Each level of vmap adds its axis to the call, and the last one runs it."""

    generate_vmap_rule = False

    @staticmethod
    def forward(
        executables: Runs, call: Call, with_grad: bool, info: CallInfo, *tensors: Tensor
    ) -> Any:
        return tuple(executables.run(call, with_grad, info, tensors))

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
        executables: Runs,
        call: Call,
        with_grad: bool,
        call_info: CallInfo,
        *tensors: Tensor,
    ) -> Any:
        dims = in_dims[4:]
        moved = [
            t if d is None else t.movedim(d, 1 if is_sequence else 0)
            for t, d, is_sequence in zip(tensors, dims, call.is_sequence(), strict=True)
        ]
        level = Level(info.batch_size, info.randomness)
        call = call.under_vmap(level, [d is not None for d in dims])
        flat = SegmentFunction.apply(executables, call, with_grad, call_info, *moved)
        before_out = len(flat) - len(call.results(flat, with_grad).out)  # what has no axis of time
        return flat, tuple(0 if i < before_out else 1 for i in range(len(flat)))
