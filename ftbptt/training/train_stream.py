"""``train_stream``: what the caller asks for, checked, as a :class:`Stream`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.amp import GradScaler
from torch.distributed import DeviceMesh, ProcessGroup
from torch.optim import Optimizer

from .._arguments import check_positive, whole
from .._output import SegmentOutput
from .._trees import tree_map
from ..distributed.ranks import Ranks
from .checkpoint import has_checkpoint, previous
from .chunk_stream import ChunkStream
from .cursor import Cursor
from .events import Events
from .learner import FunctionalOptimizer, Learner
from .prefetch import Mover
from .rank_sync import RankSync
from .report import Meter
from .segments import Segments
from .source import Shareable, as_source
from .stores import FileStore, SharedStore, Store
from .stream import Stream
from .trainer import Limits
from .windows import Truncation

Tree = Any
ON_NONFINITE = ("stop", "skip", "raise")


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
    context: int = 0,
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
        epoch begins with ``state`` (None: zeros, where the step's are known).
    ``data``
        ``(x, y)`` or a :class:`Chunk` of tensors ``[T, B, ...]`` or of arrays such as
        ``numpy.memmap``; an iterable of chunks of any lengths, such as a ``DataLoader``, through
        which the state is carried; or a :class:`Source` such as :class:`ContiguousStreams` and
        :class:`PackedSequences`. A last window that is shorter counts by its valid steps.
    ``optimizer``
        A ``torch.optim.Optimizer`` on the tensors of ``params``, or an object with
        ``init(params) -> opt_state`` and ``update(grads, opt_state, params) -> (params,
        opt_state)``; the parameters are then in ``update.params``. The former leaves a parameter
        that does not require a gradient as it is.
    ``k1``, ``k2``, ``burn_in``, ``context``, ``fresh``
        An update every ``k1`` steps, with gradients over the last ``k2`` (default: ``k1``), of
        which the first ``context`` have no loss; ``burn_in`` steps before them warm up the state
        without gradient. ``fresh``: windows start every ``k1`` steps, each from ``state``. See
        :class:`Truncation` for the loops that define this.
    ``epochs``, ``updates``
        How often the data is gone through (None: for ever), and at most how many updates.
    ``prepare``, ``device``
        ``prepare(x, y) -> (x, y)`` on each window, such as a cast, which keeps its steps; then it
        is moved to ``device``, to a GPU while that works on the window before.
    ``accumulate``, ``micro_batches``
        Windows to an update, and parts of the rows a window is run in; both average gradients by
        valid steps.
    ``clip_norm``, ``clip_value``, ``scheduler``, ``ema_decay``
        Clipping of the gradient, by norm first; a scheduler of torch, stepped at each update
        (``ReduceLROnPlateau`` at each report); a moving average of the parameters.
    ``autocast``, ``scaler``
        ``torch.bfloat16`` or ``torch.float16``, and a ``torch.amp.GradScaler`` for the latter.
    ``stop``
        A function of a report's mean loss that ends the run when true, such as
        :class:`EarlyStop`.
    ``on_nonfinite``
        What to do about a loss, or a norm that is clipped by, that is not finite. "stop" ends the
        run with a warning that says where it began; "raise" raises FloatingPointError; "skip"
        leaves the window out. On a CPU, and for "skip" everywhere, it is noticed before the
        parameters are touched; else when losses are next read.
    ``events``, ``progress``, ``interval``
        Functions to call (:class:`Events`); whether to draw a bar; seconds between readings.
    ``checkpoint``, ``checkpoint_every``, ``resume``
        A file for the whole run, written every so many updates, when the next is asked for; at the
        end; and where the loop is left, also by an error or Ctrl-C. With ``resume=True`` the run
        goes on from it, if it is there, bit for bit as if it had not been cut off, the parameters
        and the optimizer written in place; with ``resume=False`` it is replaced when the run
        begins; where neither is said, one that is there already is an error. Data that comes in a
        random order must draw it from torch's, NumPy's or Python's random numbers, its
        ``generator``, or by ``set_epoch(epoch)``. What the ``persistent_workers`` of a
        ``DataLoader`` draw after their first epoch is out of reach, and other when resumed.
        The same iterator goes on after an error or Ctrl-C as well: the update that was at work is
        made anew. Without a checkpoint, the windows that it had accumulated are left out.
    ``time_dim``
        The axis of time, for a ``train_segment`` that is not this package's own.
    ``mesh``, ``reduce_dtype``
        Ranks of ``torch.distributed`` that train together: each takes its share of the rows of
        ``data`` and ``state``, which are given whole to all of them, and keeps it; gradients are
        averaged by valid steps (in ``reduce_dtype`` if that is given, such as
        ``torch.bfloat16``), losses too. All begin with the parameters of the first rank, and read
        chunks in its random order. The ``checkpoint`` is a folder then, which all ranks write and
        any number of them can go on from. An error on one ends all. torch's
        ``ZeroRedundancyOptimizer`` shares the optimizer's state out.

    TBPTT(k1, k2): Williams and Peng, 1990; Sutskever, 2013, section 2.8.6.

    Raises TypeError and ValueError for invalid arguments, FileExistsError for a checkpoint that is
    there already.

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
    own_context = getattr(train_segment, "context", 0)  # of make_train_segment(context=)
    truncation = Truncation.of(k1, k2, burn_in, context or own_context, fresh)
    epochs = None if epochs is None else whole("epochs", epochs, 1)
    updates = None if updates is None else whole("updates", updates, 1)
    accumulate = whole("accumulate", accumulate, 1)
    micro_batches = whole("micro_batches", micro_batches, 1)
    checkpoint_every = whole("checkpoint_every", checkpoint_every, 1)
    for name, given, kind, words in (
        ("events", events, Events, "ftbptt.training.Events(...)"),
        ("autocast", autocast, torch.dtype, "a dtype such as torch.bfloat16"),
        ("scaler", scaler, GradScaler, "a torch.amp.GradScaler"),
        ("reduce_dtype", reduce_dtype, torch.dtype, "a dtype such as torch.bfloat16"),
    ):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"{name}: expected {words}, found {given!r}.")
    for name, function in (("stop", stop), ("prepare", prepare)):
        if function is not None and not callable(function):
            raise TypeError(f"{name}: expected a function, found {function!r}.")
    for name, bound in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if bound is not None:
            check_positive(name, bound)
    if not interval >= 0:
        raise ValueError(f"interval: expected at least 0 seconds, found {interval}.")
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(f"ema_decay: expected a number from 0 to below 1, found {ema_decay}.")
    if on_nonfinite not in ON_NONFINITE:
        raise ValueError(
            f"on_nonfinite: expected one of {', '.join(ON_NONFINITE)}, found {on_nonfinite!r}."
        )
    if reduce_dtype is torch.float16:
        raise ValueError(
            "reduce_dtype: float16 has no room for sums over the steps of all ranks. Use "
            "torch.bfloat16, which takes as many bytes."
        )
    if resume and checkpoint is None:
        raise ValueError("resume: give the file to resume from, checkpoint='run.pt'.")
    segments = Segments(
        train_segment, context=context, scaled=scaler is not None, autocast=autocast,
        time_dim=time_dim,
    )  # fmt: skip
    ranks = None if mesh is None else Ranks(mesh)
    store = None
    if checkpoint is not None:
        store = _store(Path(checkpoint), ranks, segments, resume)
    if ranks is not None:
        if not isinstance(optimizer, Optimizer):  # whose parameters are not written in place
            params = tree_map(lambda leaf: leaf.detach().clone(), params)
        ranks.begin_alike(params)
        state = segments.own_state(ranks.rank, ranks.size, state)
    learner = Learner(
        params, optimizer, clip_norm=clip_norm, clip_value=clip_value, scheduler=scheduler,
        scaler=scaler, ema_decay=ema_decay,
    )  # fmt: skip
    mover = Mover(None if device is None else torch.device(device))
    prepares = [] if prepare is None else [partial(segments.prepared, prepare)]
    source = as_source(data, segments.axes)
    if ranks is not None:
        if isinstance(source, Shareable):
            source = source.share(ranks.rank, ranks.size)
        else:
            prepares.insert(0, partial(segments.own_rows, ranks.rank, ranks.size))
            if isinstance(source, ChunkStream):
                source.begin_as(ranks.gather(source.beginning())[0])
    cursor = Cursor(source, truncation, segments.axes, prepares, mover)
    stream = Stream(
        segments,
        state,
        cursor,
        learner,
        Meter(interval),
        events or Events(),
        Limits(epochs, updates, accumulate, micro_batches, on_nonfinite, stop),
        store=store,
        checkpoint_every=checkpoint_every,
        progress=progress and (ranks is None or ranks.rank == 0),
        together=None if ranks is None else RankSync(ranks, learner, reduce_dtype),
    )
    found = store.load() if resume and store is not None else None
    if found is not None:
        stream.load_state_dict(found)
    return stream


def _store(path: Path, ranks: Ranks | None, segments: Segments, resume: bool | None) -> Store:
    """Where the run is kept. Raises ValueError if ``path`` is no such thing."""
    if ranks is None:
        if path.is_dir():
            raise ValueError(f"checkpoint: {path} is a folder. Give the name of a file.")
        there = has_checkpoint(path)
    else:
        if path.is_file():
            raise ValueError(
                f"checkpoint: {path} is a file. With a mesh, give the name of a folder."
            )
        there = any(ranks.gather(path.is_dir() and any(path.iterdir())))
    if there and resume is None:
        own = path if path.exists() else previous(path)
        raise FileExistsError(
            f"checkpoint: {own} already exists. Pass resume=True to continue from it, or "
            "resume=False to overwrite it."
        )
    replaces = there and not resume
    if ranks is None:
        return FileStore(path, replaces)
    return SharedStore(path, ranks, segments.row_axis, replaces)
