"""TBPTT in Lightning: a successor to the Trainer's former ``truncated_bptt_steps``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import Tensor

from ..._checks import check_bool, check_int, check_one_of
from ..._trees import Tree, keystr, tree_flatten_with_path, tree_leaves, tree_map
from ..._warnings import warn
from ...backends import NAMES
from ...training.data.chunk import Chunk
from ...training.data.windows import Truncation
from ...training.updates.window_stats import WindowStats
from .batches import Batches, Windows, zero_state
from .callback import TBPTTRun


class TBPTTModule(LightningModule):
    """TBPTTModule : forward, loss, configure_optimizers -> a module for Lightning's Trainer

    Base class of modules that a ``Trainer`` trains by TBPTT(k1, k2). A batch is ``(x, y)``,
    ``(x, y, reset, mask)`` or a :class:`ftbptt.training.Chunk` of full sequences, with ``x`` and
    ``y`` any nesting of tensors. It runs in windows that fit into memory, with an optimizer step
    for each. Define

    ``forward(x, state) -> (out, state)``
        The model, for a chunk of any length; ``state`` is any nesting of tensors. Steps may depend
        on each other through the state only: the model is traced on chunks of one step.
    ``loss(out, y)``
        The loss of a chunk: a scalar mean, or one value per step and row, which a mask requires. It
        must not read parameters.
    ``configure_optimizers()``
        As in any module, with one optimizer.
    ``initial_state(x) -> state``
        Only for a state that does not start from zeros, and for models that do not take ``None``.

    Options:

    ``k1``, ``k2``, ``burn_in``, ``context``
        Make an update every ``k1`` steps, with gradients over the last ``k2`` steps (default:
        ``k1``), of which the first ``context`` have no loss; the ``burn_in`` steps before them
        warm up the state without gradient. See :class:`ftbptt.training.Truncation`; windows stay
        within a batch.
    ``time_dim``
        The axis of time in ``x``, ``y`` and ``out``. It may count from the end, as for ``[B, C,
        T]`` and ``[B, T]``. ``reset`` and ``mask`` are ``[T]`` or ``[B, T]``; with ``time_dim=0``
        ``[T, B]``.
    ``carry``
        Whether a batch begins with the final state of the batch before it, which a loader that
        shuffles must not be; each epoch starts over.
    ``k_eval``
        The number of steps per chunk in validation, test and prediction.
    ``backend``, ``recompute``
        As for :func:`ftbptt.make_train_segment`.

    Since one batch makes many updates, some of the Trainer's flags have another meaning:
    ``global_step``, ``max_steps`` and ``log_every_n_steps`` count updates; schedulers with
    ``interval="step"`` step after each; ``accumulate_grad_batches=n`` makes one update of n
    windows, with gradients averaged by valid steps (the last of an epoch may have fewer windows);
    ``gradient_clip_val`` and ``configure_gradient_clipping`` apply to each update; ``precision``
    works as usual. Whatever counts batches (``val_check_interval``, ``limit_train_batches``,
    ``estimated_stepping_batches``) counts full sequences.

    Logs ``train_loss`` and ``grad_norm`` (before clipping) for each update, and
    ``train_loss_epoch``, ``val_loss`` and ``test_loss`` as means over all valid steps. Checkpoints
    include the carried state.

    Raises TypeError and ValueError for invalid options when constructed, and for invalid batches,
    states and Trainer settings when run. A ``configure_callbacks`` of your module must extend
    ``super()``'s.

    >>> import lightning, torch
    >>> class Tagger(TBPTTModule):
    ...     def __init__(self):
    ...         super().__init__(k1=25, time_dim=1, backend="eager")
    ...         self.lstm = torch.nn.LSTM(3, 4, batch_first=True)
    ...     def forward(self, x, state):
    ...         return self.lstm(x, state)
    ...     def loss(self, out, y):
    ...         return torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
    ...     def configure_optimizers(self):
    ...         return torch.optim.Adam(self.parameters())
    >>> x, y = torch.randn(2, 100, 3), torch.randint(4, (2, 100))            # [B, T, D], [B, T]
    >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
    >>> trainer = lightning.Trainer(
    ...     max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    ...     enable_model_summary=False, accelerator="cpu",
    ... )
    >>> trainer.fit(Tagger(), loader)
    >>> trainer.global_step
    12
    """

    def __init__(
        self,
        k1: int,
        *,
        k2: int | None = None,
        burn_in: int = 0,
        context: int = 0,
        time_dim: int = 1,
        carry: bool = False,
        k_eval: int = 256,
        backend: str = "auto",
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self._truncation = Truncation.of(k1, k2, burn_in, context, fresh=False)
        self.time_dim = check_int("time_dim", time_dim, None)
        self.k_eval = check_int("k_eval", k_eval, 1)
        check_bool("carry", carry)
        check_one_of("backend", backend, NAMES)
        check_bool("recompute", recompute)
        self.carry = carry
        self._options: dict[str, Any] = {
            "time_dim": self.time_dim,
            "backend": backend,
            "recompute": recompute,
        }
        self._batches: Batches | None = None
        self._zeros: tuple[Any, Tree] | None = None  # the last zero state, with its key
        self._run = TBPTTRun(self)

    # -- defined by the user --------------------------------------------------------------------

    def forward(self, x: Tree, state: Tree) -> tuple[Tree, Tree]:
        """The model, for a chunk of any length."""
        raise NotImplementedError(
            f"forward: {type(self).__name__} must define forward(self, x, state) -> (out, state)."
        )

    def loss(self, out: Tree, y: Tree) -> Tensor:
        """The mean loss of a chunk, or one value per step and row."""
        raise NotImplementedError(
            f"loss: {type(self).__name__} must define loss(self, out, y) -> tensor."
        )

    def initial_state(self, x: Tree) -> Tree:
        """The state before the first step of ``x``.

        By default zeros with the structure that ``forward`` returns for ``state=None``, which
        ``forward`` must treat as zeros, as torch's own layers do.
        """
        first = tree_map(lambda leaf: leaf.narrow(self.time_dim, 0, 1), x)
        leaves = tree_leaves(first)
        autocast = torch.is_autocast_enabled(self.device.type)
        key = [autocast, self.dtype, *((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves)]
        if self._zeros is None or self._zeros[0] != key:
            self._zeros = key, zero_state(self, first)
        return self._zeros[1]

    def chunk(self, batch: Any) -> Any:
        """Converts a batch to ``(x, y)``, ``(x, y, reset, mask)`` or a ``Chunk``."""
        return batch

    def on_chunk(self, stage: str, out: Tree, y: Tree) -> None:
        """Called after each window of training and each chunk of evaluation, for custom metrics.

        ``stage`` is "train", "val" or "test"; ``out`` and ``y`` are detached. With a mask they
        include the padding: to leave it out here, put the mask into ``y`` as well, which may be
        ``(target, mask)``.
        """

    # -- called by Lightning --------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        """The callback that this module needs; an override must extend this list."""
        try:
            to_uncompiled(self)
        except ValueError:  # it is not compiled
            pass
        else:
            warn(
                f"ftbptt: torch.compile around {type(self).__name__} has no effect: its windows "
                "are compiled by its backend. Give the Trainer the module itself.",
                RuntimeWarning,
            )
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._run.prepare()
        return [] if self._run in self._callbacks() else [self._run]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Makes all updates of a batch; returns its mean loss."""
        if self._run not in self._callbacks():
            if self._run.trainer is self.trainer:
                raise RuntimeError(
                    "Tuner: Lightning's search for a learning rate or a batch size takes away the "
                    "callback that makes this module's updates. Compare short fits instead, such "
                    "as Trainer(max_steps=100), one for each value."
                )
            raise RuntimeError(
                "configure_callbacks: this module's own callback is missing. Return "
                "[*super().configure_callbacks(), ...]."
            )
        trainer, run = self.trainer, self._run
        batches = self._current_batches()
        params = batches.params()
        learner = run.learner(params)
        chunk = batches.chunk(self.chunk(batch))
        state = run.carried(self._start(batches, chunk))
        windows = Windows(batches.segments, self._truncation, params, state, chunk)
        stats: list[WindowStats] = []
        is_last = run.is_last(batch_idx)
        run.show_progress()
        for window in windows.run(run.scale):
            learner.add(window.grads, window.stats.weight)
            stats.append(window.stats)
            run.pending.append(window.stats)
            self._call_on_chunk(batches, "train", window.out, window.y)
            if len(run.pending) >= trainer.accumulate_grad_batches:
                run.update()
                run.show_progress()
                if run.is_done:
                    break
        if not stats:
            raise ValueError(
                f"batch: no window of its {len(tree_leaves(chunk.x)[0])} steps has a loss, since "
                f"context={self._truncation.context}. Give longer sequences, or a smaller context."
            )
        if is_last and run.pending:
            run.update()
        run.save_state(windows.state)
        batch_stats = WindowStats.joined(stats)
        self.log(
            "train_loss_epoch", batch_stats.loss, on_step=False, on_epoch=True,
            batch_size=int(batch_stats.weight),
        )  # fmt: skip
        run.end_of_batch(is_last)
        return batch_stats.loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs ``val_loss`` of a batch."""
        self._evaluate("val", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs ``test_loss`` of a batch."""
        self._evaluate("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tree:
        """``out`` for a batch as in training, or for ``x`` alone."""
        batches, item = self._current_batches(), self.chunk(batch)
        if not isinstance(item, (tuple, list)):
            item = Chunk(item)
        elif isinstance(item, Chunk) or len(item) in (1, 2, 4):
            item = Chunk(*item)._replace(y=None)
        chunk = batches.chunk(item)  # which refuses other tuples, as in training
        self._run.show_progress()
        start = self._start(batches, chunk)
        state = self._run.stage_state("predict", dataloader_idx, batch_idx, start)
        out, state = batches.predict(state, chunk, self.k_eval)
        self._run.stage_states["predict", dataloader_idx] = state
        return out

    def __getstate__(self) -> dict[str, Any]:
        # Compiled segments are neither copied nor saved, but built again.
        return {**super().__getstate__(), "_batches": None, "_zeros": None, "_run": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._run = TBPTTRun(self)

    # -- internal -------------------------------------------------------------------------------

    def _callbacks(self) -> list[Callback]:
        return self.trainer.callbacks  # type: ignore[attr-defined, no-any-return]

    def _current_batches(self) -> Batches:
        """The segments, built again only if submodules or parameters were added or removed."""
        if self._batches is None or not self._batches.is_current():
            context = self._truncation.context
            self._batches = Batches(self, self.loss, context=context, **self._options)
            self._zeros = None
        return self._batches

    def _start(self, batches: Batches, chunk: Chunk) -> Tree:
        """``initial_state`` for a chunk, checked."""
        state = self.initial_state(batches.layout.time_back(chunk.x))
        for path, leaf in tree_flatten_with_path(state)[0]:
            name = f"initial_state{keystr(path)}"
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{name}: expected a tensor, found {type(leaf).__name__}.")
            if leaf.requires_grad:
                raise ValueError(
                    f"{name}: has a gradient, which would be lost: a window starts from a "
                    "detached state. Return constants or .detach() the result; "
                    "make_train_segment(..., initial_state=) trains a start, in a loop of your own "
                    "or in train_stream."
                )
            if chunk.reset is not None and leaf.any():
                raise ValueError(
                    f"{name}: is not zero, but reset restarts rows from zeros. Return zeros, or "
                    "give batches without reset."
                )
        return state

    def _evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        batches = self._current_batches()
        chunk = batches.chunk(self.chunk(batch))
        start = self._start(batches, chunk)
        state = self._run.stage_state(stage, dataloader_idx, batch_idx, start)
        stats = []
        self._run.show_progress()
        for part in batches.evaluate(state, chunk, self.k_eval):
            state = part.state
            stats.append(part.stats)
            self._call_on_chunk(batches, stage, part.out, part.y)
        self._run.stage_states[stage, dataloader_idx] = state
        batch_stats = WindowStats.joined(stats)
        self.log(
            f"{stage}_loss", batch_stats.loss, on_step=False, on_epoch=True, prog_bar=True,
            batch_size=int(batch_stats.weight),
        )  # fmt: skip

    def _call_on_chunk(self, batches: Batches, stage: str, out: Tree, y: Tree) -> None:
        self.on_chunk(stage, batches.layout.time_back(out), batches.layout.time_back(y))
