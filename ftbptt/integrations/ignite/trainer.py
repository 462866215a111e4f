"""PyTorch-Ignite's TBPTT trainer, compiled. The same names under another import."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from ignite.engine import Engine, EventEnum, Events, _prepare_batch
from ignite.utils import apply_to_tensor
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from ..._checks import check_function, check_int, check_one_of, check_positive, check_tensors
from ..._trees import Tree, tree_leaves, tree_map
from ...backends import NAMES
from ...training.data.chunk import Chunk
from ...training.data.windows import Truncation
from .batch_windows import BatchWindow, BatchWindows
from .chunks import ChunkOutput, Chunks

LOSS_MEANS = ("steps", "chunks")


class Tbptt_Events(EventEnum):
    """Events fired before and after each chunk of time steps in an iteration of the trainer.

    >>> [event.value for event in Tbptt_Events]
    ['time_iteration_started', 'time_iteration_completed']
    """

    TIME_ITERATION_STARTED = "time_iteration_started"
    TIME_ITERATION_COMPLETED = "time_iteration_completed"


def create_supervised_tbptt_trainer(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    tbtt_step: int,
    dim: int = 0,
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., Any] = _prepare_batch,
    *,
    state: Tree | str = None,
    reset: Callable[[Any], Tensor | None] | None = None,
    k1: int | None = None,
    k2: int | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    autocast: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    accumulate: int = 1,
    loss_mean: str = "steps",
    backend: str = "auto",
) -> Engine:
    """create_supervised_tbptt_trainer : model, optimizer, loss_fn, tbtt_step -> ignite.Engine

    A drop-in replacement for ``ignite.contrib.engines.tbptt.create_supervised_tbptt_trainer``:
    the same positional arguments, events and outputs. One iteration computes::

        hidden = None
        for x_k, y_k in zip(x.split(tbtt_step, dim), y.split(tbtt_step, dim)):
            x_k, y_k = prepare_batch((x_k, y_k), device=device, non_blocking=non_blocking)
            fire(TIME_ITERATION_STARTED)
            model.train(); optimizer.zero_grad()
            out, hidden = model(x_k) if hidden is None else model(x_k, detach(hidden))
            loss = loss_fn(out, y_k); loss.backward(); optimizer.step()
            engine.state.output = loss.item()
            fire(TIME_ITERATION_COMPLETED)
        return the mean loss

    The first chunk of each kind (shapes, with or without a hidden state) runs eagerly, as above. If
    the same chunk compiled gives the same loss, state and gradients, further chunks of the kind run
    compiled. If not, or if the model's Python does more than call operations (counters, prints,
    hooks), all chunks run eagerly, and one warning says why. If only chunks without a hidden state
    differ, as for a model that does not start from zeros, only those run eagerly, again with one
    warning. A compiled model draws other random numbers, as for dropout, from the same
    distribution.

    ``model``
        Called as ``model(x)``, then as ``model(x, hidden)``, with ``x`` ``[tbtt_step, B, ...]``,
        or ``[B, tbtt_step, ...]`` for ``dim=1``; returns ``(out, hidden)``. ``hidden`` is any
        nesting of tensors.
    ``tbtt_step``, ``dim``
        The number of steps in a chunk (the last of a batch may have fewer), and the axis of time in
        ``x``, ``y`` and ``out``.
    ``state``
        None: each batch begins with ``model(x)``. A tree of tensors: the initial hidden state of
        the data, carried from each batch to the next. "carry": carried as well, but the data begins
        with ``model(x)``. The hidden state is in ``engine.state.hidden``: handlers may set it
        before and after an iteration, not between its chunks, and a ``Checkpoint`` of the trainer
        saves it.
    ``reset``
        ``reset(batch) -> bool [T], [T, B] or None`` (``[B, T]`` with ``dim=1``): where True, the
        hidden state of that row is set to ``state``, or to zeros, before that step. Batches may
        then have more parts than ``x`` and ``y``.
    ``k1``, ``k2``
        TBPTT(k1, k2): an update every ``k1`` steps, with gradients over the last ``k2`` steps of
        the batch. ``k1`` defaults to ``tbtt_step``, ``k2`` to the larger of both.
    ``clip_norm``, ``clip_value``
        Clip the gradients of the optimizer's parameters, first by norm, then by value.
    ``autocast``, ``scaler``
        ``torch.bfloat16`` or ``torch.float16``, and a ``torch.amp.GradScaler`` for the latter.
    ``accumulate``
        The number of chunks per update, also across batches; gradients are averaged by steps. Any
        chunks left at the end of an epoch make one more update.
    ``loss_mean``
        The loss of an iteration, in ``engine.state.output``: the mean over its chunks, weighted by
        "steps", or as in Ignite unweighted over "chunks".
    ``backend``
        "auto": as described above. "eager": everything runs eagerly, without a warning. "fused",
        "compile", ...: as in :func:`ftbptt.make_train_segment`; a model that the backend cannot run
        is an error.

    Raises TypeError and ValueError for invalid arguments; while running, TypeError and ValueError
    for invalid batches, and RuntimeError if a backend given by name cannot run the model.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.rnn, self.readout = nn.GRU(3, 5), nn.Linear(5, 2)
    ...     def forward(self, x, hidden=None):
    ...         out, hidden = self.rnn(x, hidden)
    ...         return self.readout(out), hidden
    >>> net = Net()
    >>> trainer = create_supervised_tbptt_trainer(
    ...     net, torch.optim.SGD(net.parameters(), 0.1), nn.MSELoss(), 4, backend="eager"
    ... )
    >>> def show(engine):
    ...     print(type(engine.state.output).__name__)
    >>> _ = trainer.on(Tbptt_Events.TIME_ITERATION_COMPLETED)(show)
    >>> _ = trainer.run([(torch.randn(10, 2, 3), torch.zeros(10, 2, 2))])
    float
    float
    float
    """
    step = check_int("tbtt_step", tbtt_step, 1)
    k1 = step if k1 is None else check_int("k1", k1, 1)
    k2 = max(step, k1) if k2 is None else check_int("k2", k2, 1)
    if k2 < k1:
        raise ValueError(
            f"k2: an update every k1={k1} steps with gradients over k2={k2} would leave steps out. "
            "Give k2 >= k1; ftbptt.training.train_stream has gaps."
        )
    accumulate = check_int("accumulate", accumulate, 1)
    _check_state(state)
    check_function("loss_fn", loss_fn, "(out, y)")
    check_function("prepare_batch", prepare_batch, "(batch, device=..., non_blocking=...)")
    if reset is not None:
        check_function("reset", reset, "(batch)")
    check_one_of("loss_mean", loss_mean, LOSS_MEANS)
    check_one_of("backend", backend, NAMES)
    for name, bound in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if bound is not None:
            check_positive(name, bound)
    carried = state is not None
    initial = None if state is None or isinstance(state, str) else tree_map(Tensor.detach, state)
    updates = _Updates(optimizer, scaler, clip_norm, clip_value, accumulate)
    iteration = _Iteration(
        model, BatchWindows(Truncation(k1, k2), dim, reset), updates,
        partial(prepare_batch, device=device, non_blocking=non_blocking),
        partial(
            Chunks, model, loss_fn, backend=backend, initial=initial, autocast=autocast,
            scaler=scaler,
        ), carried, loss_mean,
    )  # fmt: skip
    engine = Engine(iteration)
    engine.register_events(*Tbptt_Events)
    if accumulate > 1:
        engine.add_event_handler(Events.STARTED, updates.forget)
        engine.add_event_handler(Events.EPOCH_COMPLETED, updates.flush)
        engine.add_event_handler(Events.COMPLETED, updates.flush)
    if carried:
        _carry(engine, initial)
    return engine


@dataclass
class _Updates:
    """Zeroes gradients before chunks and steps the optimizer after them."""

    optimizer: Optimizer
    scaler: GradScaler | None
    clip_norm: float | None
    clip_value: float | None
    accumulate: int
    pending: int = 0  # chunks since the last step
    weight: float = 0.0  # of those chunks

    def before_chunk(self) -> None:
        if not self.pending:
            self.optimizer.zero_grad()

    def after_chunk(self, weight: float) -> None:
        self.pending += 1
        self.weight += weight
        if self.pending == self.accumulate:
            self.flush()

    def forget(self) -> None:
        """Drops pending gradients: of a run that an error ended, whose chunks may come again."""
        self.pending, self.weight = 0, 0.0

    def flush(self) -> None:
        """Makes a step with the pending gradients, if there are any."""
        if not self.pending:
            return
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.accumulate > 1:
            for p in parameters:
                if p.grad is not None:
                    p.grad /= self.weight
        self.pending, self.weight = 0, 0.0
        if self.clip_norm is not None:
            clip_grad_norm_(parameters, self.clip_norm)
        if self.clip_value is not None:
            clip_grad_value_(parameters, self.clip_value)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


@dataclass
class _Iteration:
    """What the engine does with a batch.

    ``make_chunks``: of the axis of time; ``carried``: the hidden state goes on to the next batch.
    """

    model: nn.Module
    windows: BatchWindows
    updates: _Updates
    prepare: Callable[[Any], Any]
    make_chunks: Callable[[int], Chunks]
    carried: bool
    loss_mean: str
    chunks: dict[int, Chunks] = field(default_factory=dict)  # by axis: dim may count from the end

    def __call__(self, engine: Engine, batch: Any) -> float:
        """Makes the updates of the batch; returns its mean loss."""
        losses: list[float] = []
        steps: list[int] = []
        hidden = engine.state.hidden if self.carried else None  # type: ignore[attr-defined]
        for window in self.windows.of(batch):
            x, y = self.prepare((window.x, window.y))
            x_device = next((t.device for t in tree_leaves(x) if isinstance(t, Tensor)), None)
            chunk = Chunk(x, y, None if window.reset is None else window.reset.to(x_device))
            engine.fire_event(Tbptt_Events.TIME_ITERATION_STARTED)
            self.model.train()
            hidden = _detached(hidden, x_device)
            output = self._run(chunk, hidden, window)
            if not window.repeats_start:
                hidden = output.state if window.save_at is None else output.saved
            if self.carried:
                engine.state.hidden = _detached(output.state, None)  # type: ignore[attr-defined]
            loss = output.loss.item()
            engine.state.output = loss  # type: ignore[assignment]
            losses.append(loss)
            steps.append(window.steps)
            engine.fire_event(Tbptt_Events.TIME_ITERATION_COMPLETED)
        if self.loss_mean == "chunks" or len(set(steps)) == 1:
            return sum(losses) / len(losses)
        return sum(map(operator.mul, losses, steps)) / sum(steps)

    def _run(self, chunk: Chunk, hidden: Tree, window: BatchWindow) -> ChunkOutput:
        if window.axis not in self.chunks:
            self.chunks[window.axis] = self.make_chunks(window.axis)
        self.updates.before_chunk()
        k2 = self.windows.truncation.k2
        weight = 1.0 if self.updates.accumulate == 1 else window.steps / k2
        output = self.chunks[window.axis].run(chunk, hidden, window.save_at, weight)
        self.updates.after_chunk(weight)
        return output


def _carry(engine: Engine, initial: Tree) -> None:
    """Keeps the hidden state in ``engine.state``, and resets it where the data starts over."""

    def restart(engine: Engine, iter_counter: int = 0) -> None:  # given by the last of the events
        engine.state.hidden = initial  # type: ignore[attr-defined]

    def start(engine: Engine) -> None:
        # A run that resumes within an epoch keeps the state it stopped with, or its checkpoint's.
        if engine.state.iteration % (engine.state.epoch_length or engine.state.iteration + 1) == 0:
            restart(engine)

    restart(engine)
    engine.state_dict_user_keys.append("hidden")
    engine.add_event_handler(Events.STARTED, start)
    for data_starts_over in (Events.DATALOADER_STOP_ITERATION, Events.TERMINATE_SINGLE_EPOCH):
        engine.add_event_handler(data_starts_over, restart)


def _detached(hidden: Tree, device: torch.device | None) -> Tree:
    """The hidden state, any nesting that Ignite supports, detached and on ``device``."""
    if hidden is None:
        return None
    return apply_to_tensor(hidden, lambda leaf: leaf.detach().to(device or leaf.device))


def _check_state(state: Tree) -> None:
    if state is None:
        return
    if isinstance(state, str):
        if state != "carry":
            raise ValueError(
                f'state: expected a tree of tensors, "carry" or None, found {state!r}.'
            )
        return
    check_tensors(
        "state", state,
        'Give the hidden state that the data begins with, or "carry" to begin with model(x).',
    )  # fmt: skip
