"""Runs a chunk compiled, as a segment of the model taken step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..._messages import first_line
from ..._trees import Tree
from ...contract.as_step import as_step
from ...segment.make_segment import make_train_segment
from ...training.data.chunk import Chunk
from ...training.segments import Segments
from ...training.updates.learner import scale_of
from .agreement import Outcome


class NotCompiled(Exception):
    """Why a model is run as it is written; a clause that follows "not compiled: "."""


class CompiledChunk:
    """The segments of a model as it is now, and its parameters.

    Raises NotCompiled if the model cannot be one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tree, Tree], Tensor],
        dim: int,
        *,
        backend: str,
        initial: Tree,
        autocast: torch.dtype | None,
        scaler: GradScaler | None,
    ) -> None:
        if dim not in (0, 1):
            raise NotCompiled(f"dim={dim}, and only time on axis 0 or 1 is compiled")
        self.params = dict(model.named_parameters())
        self._scaler = scaler
        try:
            step = as_step(model, sequence=True, batch_first=dim == 1)
            segment = make_train_segment(
                # Whether it mixes steps is found out by comparing gradients and losses as well.
                replace(step, call_chunk=None),
                loss,
                # "auto" would fall back to an eager segment; the model itself is faster.
                backend="fused" if backend == "auto" else backend,
                time_dim=dim,
                initial_state=initial,
            )
            self._segments = Segments(segment, autocast=autocast)
        except (TypeError, ValueError) as error:
            raise NotCompiled(first_line(error)) from error

    def run(self, chunk: Chunk, state: Tree, save_at: int | None) -> Outcome:
        """The gradients, scaled as the scaler does, are of all parameters that are not frozen."""
        scale = scale_of(self._scaler, next(iter(self.params.values())).device)
        result, saved = self._segments.train(self.params, state, chunk, save_at, scale)
        grads = {name: result.grads[name] for name, p in self.params.items() if p.requires_grad}
        return Outcome(result.loss, result.state, None if save_at is None else saved, grads)
