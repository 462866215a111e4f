"""The result of an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..._trees import Tree
from .norms import total_norm


@dataclass(slots=True, eq=False, repr=False)
class Update:
    """One update of the parameters.

    ``index``, ``epoch``
        numbers of the update in the run, and of the epoch, from 0
    ``position``
        the number of steps of the epoch that are done
    ``loss``
        the mean over the valid steps of the update: a tensor [] on the device (under ``vmap``
        [M]), so reading it waits for the device
    ``steps``
        the number of valid steps in the update, all rows together; a tensor [] if there is a mask
        (of an ensemble with a mask for each model [M]). With ``in_dims`` all steps count, since its
        loss is a mean over sequences
    ``state``
        the state after the update's last step, detached
    ``params``
        the parameters after the update
    ``grad_norm``
        the norm [] of the gradients of all that the optimizer has, together, before clipping (of
        an ensemble [M], one for each model); computed at the first access
    ``tokens_per_second``
        steps of all rows per second, since the last report
    ``learning_rate``
        the one that the update was made with, of the optimizer's first group; a number or a tensor.
        None if that has none, or for a functional optimizer

    >>> import ftbptt, torch
    >>> cell, x = torch.nn.GRUCell(3, 5), torch.randn(20, 2, 3)
    >>> segment = ftbptt.make_train_segment(cell, lambda out, y: out.mean(), backend="eager")
    >>> params, sgd = dict(cell.named_parameters()), torch.optim.SGD(cell.parameters())
    >>> for update in ftbptt.training.train_stream(
    ...     segment, params, None, (x, None), sgd, k1=10, progress=False
    ... ):
    ...     print(update.position, update.steps, update.grad_norm.shape)
    10 20 torch.Size([])
    20 20 torch.Size([])
    """

    index: int
    epoch: int
    position: int
    loss: Tensor
    steps: Any
    params: Tree
    state: Tree
    tokens_per_second: float
    learning_rate: float | Tensor | None
    _grads: list[Tensor]
    _norm: Tensor | None

    @property
    def grad_norm(self) -> Tensor:
        if self._norm is None:
            self._norm = total_norm(self._grads, self.loss)
        return self._norm

    def __repr__(self) -> str:
        return f"Update(index={self.index}, epoch={self.epoch}, position={self.position})"
