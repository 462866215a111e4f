"""``train_stream``: checks the arguments, and builds the parts of a :class:`Stream`."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed import DeviceMesh, ProcessGroup
from torch.optim import Optimizer

from .._checks import (
    check_bool,
    check_device,
    check_int,
    check_tensors,
    check_time_dim,
    warn_of_lost_training,
)
from .._trees import Tree, tree_map
from ..contract.output import SegmentOutput
from ..distributed.ranks import Ranks
from ..segment.train_segment import TrainSegment
from .checkpoints.file import as_bytes
from .checkpoints.stores import store_at
from .data.chunk import Chunk
from .data.chunk_stream import ChunkStream
from .data.cursor import Cursor
from .data.prefetch import Mover
from .data.source import Shareable, Source, as_source, leaving_data
from .data.windows import Truncation
from .option_checks import check_scheduler, check_types, check_values
from .reports.events import Events
from .reports.monitor import Monitor
from .reports.report import Meter
from .segments import Segments
from .stream import Stream
from .trainer import Limits, Trainer
from .updates.learner import Learner
from .updates.nonfinite import Guard
from .updates.optimizers import FunctionalOptimizer
from .updates.rank_sync import RankSync
from .updates.same_on_ranks import check_same
from .window_run import WindowRunner


def train_stream(
    train_segment: Callable[..., SegmentOutput],
    params: Tree,
    state: Tree,
    data: Any,
    optimizer: Optimizer | FunctionalOptimizer,
    *,
    k1: int,
    k2: int | None = None,
    burn_in: int = 0,
    context: int | None = None,
    fresh: bool = False,
    epochs: int | None = 1,
    updates: int | None = None,
    prepare: Callable[[Tree, Tree], tuple[Tree, Tree]] | None = None,
    device: str | torch.device | None = None,
    accumulate: int = 1,
    micro_batches: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    scheduler: Any = None,
    autocast: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    ema_decay: float | None = None,
    stop: Callable[[float], bool] | None = None,
    on_nonfinite: str = "stop",
    events: Events | None = None,
    progress: bool = True,
    interval: float = 0.5,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 1000,
    resume: bool | None = None,
    time_dim: int | None = None,
    mesh: DeviceMesh | ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Stream:
    """train_stream : train_segment, params, state, data, optimizer -> iterator of Update

    Trains on a stream of any length by TBPTT(k1, k2), one update for each ``next``, so that the
    caller stays in charge: evaluate, print, change the learning rate or ``break`` in the loop. The
    losses stay on the device; they are read each ``interval`` seconds, for the progress bar.

    ``train_segment``
        What :func:`ftbptt.make_train_segment` returns, or, for windows that neither overlap nor
        leave steps out, any function of its contract.
    ``params``, ``state``
        As for a segment. An optimizer of torch changes the tensors of ``params`` in place; each
        epoch begins with ``state`` (None: zeros, if the step's state is known to start there).
    ``data``
        ``(x, y)`` or a :class:`Chunk` of tensors ``[T, B, ...]`` or of arrays such as
        ``numpy.memmap`` or tables of pandas; an iterable of chunks of any lengths, such as a
        ``DataLoader``, through which the state is carried (which is warned about, RuntimeWarning,
        if it shuffles them, and neither resets nor ``fresh`` begin them anew); or a
        :class:`Source` such as :class:`ContiguousStreams` and :class:`PackedSequences`. A shorter
        last window counts by its valid steps.
    ``optimizer``
        A ``torch.optim.Optimizer`` on the tensors of ``params``, or an object with
        ``init(params) -> opt_state`` and ``update(grads, opt_state, params) -> (params,
        opt_state)``; the parameters are then in ``update.params``. The former does not change an
        ``nn.Parameter`` with ``requires_grad=False``, which is frozen. It does train a plain tensor
        with ``requires_grad=False``, if it holds it.
    ``k1``, ``k2``, ``burn_in``, ``context``, ``fresh``
        An update every ``k1`` steps, with gradients over the last ``k2`` (default: ``k1``), of
        which the first ``context`` have no loss (default: that of ``train_segment``, which is 0
        unless it was made with another); ``burn_in`` steps before them warm up the state without
        gradient. ``fresh``: windows start every ``k1`` steps, each from ``state``. See
        :class:`Truncation` for the loops that define this.
    ``epochs``, ``updates``
        The number of passes over the data (None: no limit), and the maximum number of updates.
    ``prepare``, ``device``
        ``prepare(x, y) -> (x, y)`` is applied to each window, such as a cast, and must keep its
        steps, and leave what it is given as it is; then the window is moved to ``device``, to a GPU
        while that works on the window before.
    ``accumulate``, ``micro_batches``
        Windows per update, and parts that the batch of a window is split into; both average
        gradients by valid steps. With ``in_dims`` the loss is a mean over sequences, each with its
        own mean over valid steps (0 if it has none); there sequences times steps are the weight.
    ``clip_norm``, ``clip_value``, ``scheduler``, ``ema_decay``
        Clipping of the gradient, by norm first (the norm of all gradients together; in an ensemble,
        where the loss is [M] and all gradients are [M, ...], that of each model's); a scheduler of
        torch, stepped at each update (``ReduceLROnPlateau`` at each report); a moving average of
        the parameters, ``ema_params`` of the iterator, which begins at those before the first
        update.
    ``autocast``, ``scaler``
        ``torch.bfloat16`` or ``torch.float16``, and a ``torch.amp.GradScaler`` for the latter.
    ``stop``
        A function of a report's mean loss that ends the run when it returns true, such as
        :class:`EarlyStop`. When reports come depends on the time that updates take; with
        ``interval=0`` there is one at each update.
    ``on_nonfinite``
        What to do if a loss is not finite; or a gradient, where there is a mask, or gradients are
        clipped by norm (``math.inf`` clips none). "stop" ends the run with a warning that says
        where it began; "raise" raises FloatingPointError; "skip" leaves the window out. On a CPU,
        and for "skip" on any device, this is noticed before the parameters change; otherwise when
        losses are next read. In an ensemble "stop" ends it for that model, which stays as it was
        before that, with a loss of NaN from then on; the run ends with the last one.
    ``events``, ``progress``, ``interval``
        Functions to call (:class:`Events`); whether to draw a progress bar; seconds between
        readings.
    ``checkpoint``, ``checkpoint_every``, ``resume``
        A file for the full state of the run. It is written every ``checkpoint_every`` updates, when
        the next update is asked for; at the end; and where the loop is left, also by an error or
        Ctrl-C; but not once parameters have become NaN or infinite. ``resume=True`` continues from
        the file, if it exists, bit for bit as if the run had not been interrupted, and writes the
        parameters, the module's buffers and the optimizer in place. ``resume=False`` replaces it
        when the run begins. With neither, an existing file is an error.
        A run that had made all of its updates makes none.
        A resumed run may have other limits (``epochs``, ``updates``, ``stop``), another clipping
        and ``accumulate``, and data that goes on further (a window that its end had cut short
        stays so); not other windows (``k1``, ``k2``, ...).
        The learning rate is that of the checkpoint.
        Data in a random order must draw it from torch's, NumPy's or Python's random numbers, from
        its ``generator``, or by ``set_epoch(epoch)``. Chunks after the first of an epoch, as of a
        shuffle buffer, draw such numbers apart from those of training. What the
        ``persistent_workers`` of a ``DataLoader`` draw after their first epoch cannot be restored,
        and differs when resumed.
        The same iterator can also be continued after an error or Ctrl-C: the update in progress is
        made again. Without a checkpoint, the windows that it had accumulated are left out.
    ``time_dim``
        The axis of time, for a ``train_segment`` that is not this package's own; under
        ``torch.func.vmap``, which adds an axis, it has to be given.
    ``mesh``, ``reduce_dtype``
        Ranks of ``torch.distributed`` that train together. All pass the same options, the full
        ``data`` and ``state``; each takes its share of the batch, and keeps it. Gradients and
        losses are averaged by valid steps, gradients in ``reduce_dtype`` (such as
        ``torch.bfloat16``; default: their own, but float32 for float16). All start from the
        parameters of the first rank, and read chunks in its random order. The ``checkpoint`` is
        then a folder that all ranks write, and any number of ranks can resume from it. An error on
        one rank ends the run on all. torch's ``ZeroRedundancyOptimizer`` shards the optimizer's
        state.

    TBPTT(k1, k2): Williams and Peng, 1990; Sutskever, 2013, section 2.8.6.

    Raises TypeError and ValueError for invalid arguments, or for ones that are not the same on all
    ranks, FileExistsError for a checkpoint that exists, unless ``resume`` says what to do with it,
    and OSError for one that could not be written.

    >>> import ftbptt
    >>> cell = torch.nn.GRUCell(3, 5)
    >>> train_segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: (out - y).square().mean(), backend="eager"
    ... )
    >>> params, x = dict(cell.named_parameters()), torch.randn(100, 2, 3)
    >>> adam = torch.optim.Adam(params.values())
    >>> data = (x, torch.zeros(100, 2, 5))
    >>> for update in train_stream(train_segment, params, None, data, adam, k1=25, progress=False):
    ...     print(update.index, update.position, update.state.shape)
    0 25 torch.Size([2, 5])
    1 50 torch.Size([2, 5])
    2 75 torch.Size([2, 5])
    3 100 torch.Size([2, 5])
    """
    check_time_dim(time_dim)
    segments = Segments(train_segment, context=context, autocast=autocast, time_dim=time_dim)
    truncation = Truncation.of(k1, k2, burn_in, segments.context, fresh)
    limits = Limits(
        None if epochs is None else check_int("epochs", epochs, 1),
        None if updates is None else check_int("updates", updates, 1),
        check_int("accumulate", accumulate, 1),
    )
    micro_batches = check_int("micro_batches", micro_batches, 1)
    checkpoint_every = check_int("checkpoint_every", checkpoint_every, 1)
    check_types(
        events=events, autocast=autocast, scaler=scaler, reduce_dtype=reduce_dtype,
        checkpoint=checkpoint, stop=stop, prepare=prepare,
    )  # fmt: skip
    check_scheduler(scheduler, is_saved=checkpoint is not None)
    check_values(clip_norm, clip_value, interval, ema_decay, on_nonfinite, autocast, reduce_dtype)
    if resume is not None:
        check_bool("resume", resume)
    if resume and checkpoint is None:
        raise ValueError("resume: give the file to resume from, checkpoint='run.pt'.")
    if scaler is not None and not isinstance(train_segment, TrainSegment):
        raise TypeError("scaler: needs what make_train_segment returns as train_segment.")
    if mesh is not None and segments.under_vmap:
        raise ValueError(
            "mesh: train_segment is under vmap, so that it returns many losses; ranks share the "
            "mean of one. An ensemble needs no mesh: each rank trains its own models, "
            "ftbptt.distributed.own_models. For many sequences pass in_dims to make_train_segment."
        )
    ranks = None if mesh is None else Ranks(mesh)
    source = as_source(data, segments.axes, carries=not fresh)
    if ranks is not None:
        options = asdict(truncation) | asdict(limits) | {
            "clip_norm": clip_norm, "clip_value": clip_value, "ema_decay": ema_decay,
            "checkpoint": "none" if checkpoint is None else "one", "resume": resume,
            "checkpoint_every": checkpoint_every, "reduce_dtype": reduce_dtype,
            "scheduler": type(scheduler).__name__, "scaler": type(scaler).__name__,
        }  # fmt: skip
        trees = {"params": params, "state": state, "buffers": segments.buffers()}
        check_same(ranks, options, trees, source, optimizer)
    store = None
    if checkpoint is not None:
        store = store_at(Path(checkpoint), ranks, segments.row_axis, resume)
    if state is not None:
        check_tensors("state", state, "None is the state that the step starts from.")
        warn_of_lost_training(state)
        state = tree_map(Tensor.detach, state)
    all_rows = state
    if ranks is not None:
        params, state = _on_rank(ranks, segments, params, state, optimizer)
    learner = Learner(
        params, optimizer, clip_norm=clip_norm, clip_value=clip_value, scheduler=scheduler,
        scaler=scaler, ema_decay=ema_decay,
    )  # fmt: skip
    source, transforms = _own_source(source, segments, ranks, all_rows, prepare)
    cursor = Cursor(source, truncation, segments.axes, transforms, Mover(check_device(device)))
    rank_sync = None if ranks is None else RankSync(ranks, learner, reduce_dtype)
    guard, events = Guard(on_nonfinite, learner), events or Events()
    shows = progress and (ranks is None or ranks.rank == 0)
    monitor = Monitor(Meter(interval), events, guard, learner, stop, shows)
    windows = WindowRunner(
        segments, learner, truncation, state, guard, events, micro_batches,
        rank_sync if limits.accumulate == 1 else None,
    )  # fmt: skip
    keeps_resume_point = store is not None or rank_sync is not None
    trainer = Trainer(windows, cursor, monitor, limits, rank_sync, keeps_resume_point)
    stream = Stream(trainer, store, checkpoint_every)
    saved = store.load() if resume and store is not None else None
    if saved is not None:
        stream.resume(saved)
    return stream


# -- parts of the run -----------------------------------------------------------------------------


def _on_rank(
    ranks: Ranks, segments: Segments, params: Tree, state: Tree, optimizer: Any
) -> tuple[Tree, Tree]:
    """The parameters of the first rank, and this rank's rows of the state.

    The module gets the buffers of the first rank.
    """
    if not isinstance(optimizer, Optimizer):  # the caller's tensors must not change in place
        params = tree_map(lambda leaf: leaf.detach().clone(), params)
    ranks.broadcast_params(params)
    sent = ranks.gather(as_bytes(segments.buffers()) if ranks.rank == 0 else None)[0]
    # Not to the device of the first rank, from which they come.
    buffers = torch.load(io.BytesIO(sent), map_location="cpu", weights_only=True)
    segments.set_buffers(buffers)
    return params, segments.own_state(ranks.rank, ranks.size, state)


def _own_source(
    source: Source,
    segments: Segments,
    ranks: Ranks | None,
    state: Tree,
    prepare: Callable[..., Any] | None,
) -> tuple[Source, list[Callable[[Chunk], Chunk]]]:
    """The source of this rank's data, and the functions that are applied to each chunk of it.

    ``state`` is that of all rows.
    """
    transforms: list[Callable[[Chunk], Chunk]] = []
    if prepare is not None:
        prepare = leaving_data(prepare, source)
    if ranks is not None and isinstance(source, Shareable):
        if (rows := getattr(source, "rows", None)) is not None:
            segments.set_share(rows, ranks.rank, ranks.size)
        source = source.share(ranks.rank, ranks.size)
    elif ranks is not None:
        if isinstance(source, ChunkStream):
            source.begin_as(ranks.gather(source.beginning())[0])
        transforms.append(partial(segments.own_rows, ranks.rank, ranks.size, state))
    if prepare is not None:
        transforms.append(partial(segments.prepared, prepare))
    return source, transforms
