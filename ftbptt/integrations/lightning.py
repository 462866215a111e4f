"""Truncated backpropagation through time in Lightning: what ``truncated_bptt_steps`` was."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from .._arguments import whole
from .._trees import keystr, tree_flatten_with_path, tree_leaves, tree_map
from ..training.chunk import Chunk
from ..training.window_stats import WindowStats
from ..training.windows import Truncation
from .batches import Batches, Windows, zero_state
from .lightning_run import TBPTTRun

Tree = Any


class TBPTTModule(LightningModule):
    """TBPTTModule : forward, loss, configure_optimizers -> a module for Lightning's Trainer

    The base of modules that a ``Trainer`` trains by TBPTT(k1, k2). A batch is ``(x, y)``, ``(x, y,
    reset)`` or ``(x, y, reset, mask)`` of whole sequences, ``x`` and ``y`` any nesting of tensors;
    it is run in windows that fit into memory, with an optimizer step for each. You write

    ``forward(x, state) -> (out, state)``
        The model on a chunk of any length, ``state`` any nesting of tensors. Steps meet in the
        state alone: it is traced on chunks of one step, and compiled.
    ``loss(out, y)``
        Of a chunk: a scalar mean over it, or one value per step and row, which a mask needs. It
        reads no parameters.
    ``configure_optimizers()``
        As ever, with one optimizer.
    ``initial_state(x) -> state``
        Only for states that do not start from zeros, and models that do not take ``None``.

    Options:

    ``k1``, ``k2``, ``burn_in``, ``context``
        An update every ``k1`` steps, with gradients over the last ``k2`` (default: ``k1``), of
        which the first ``context`` have no loss; ``burn_in`` steps before them warm up the state
        without gradient: :class:`ftbptt.training.Truncation`, within each batch.
    ``time_dim``
        The axis of time in all of ``x``, ``y`` and ``out``; it may count from the end, as for
        ``[B, C, T]`` and ``[B, T]``. ``reset`` and ``mask`` are ``[T]`` or ``[B, T]``, for
        ``time_dim=0`` ``[T, B]``.
    ``carry``
        Whether a batch begins with the state after the batch before, each epoch anew.
    ``k_eval``
        The length of the chunks for validation, test and prediction, which have no gradient.
    ``backend``, ``recompute``
        As for :func:`ftbptt.make_train_segment`.

    What the Trainer's flags mean, since one batch makes many updates: ``global_step``,
    ``max_steps`` and ``log_every_n_steps`` count updates; a scheduler with ``interval="step"`` is
    stepped at each; ``accumulate_grad_batches=n`` makes an update of n windows, their gradients
    averaged by valid steps (the last of an epoch may have fewer); ``gradient_clip_val`` and
    ``configure_gradient_clipping`` hold for each update; ``precision`` as ever. What counts batches
    (``val_check_interval``, ``limit_train_batches``, ``estimated_stepping_batches``) counts whole
    sequences.

    Logged are ``train_loss`` and ``grad_norm`` (before clipping) of updates, ``train_loss_epoch``,
    ``val_loss`` and ``test_loss``, means over all valid steps. Checkpoints have the carried state.

    Raises TypeError and ValueError for arguments and data that cannot be meant, at once or when
    the first batch is there. An own ``configure_callbacks`` must add to ``super()``'s.

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
        self.time_dim, self.k_eval = whole("time_dim", time_dim, None), whole("k_eval", k_eval, 1)
        self.carry = carry
        self._options: dict[str, Any] = {
            "time_dim": self.time_dim,
            "backend": backend,
            "recompute": recompute,
        }
        self._batches: Batches | None = None
        self._zeros: tuple[Any, Tree] | None = None  # of the last batch that asked for them
        self._run = TBPTTRun(self)

    # -- what a user writes ---------------------------------------------------------------------

    def forward(self, x: Tree, state: Tree) -> tuple[Tree, Tree]:
        raise NotImplementedError(
            f"forward: {type(self).__name__} must define forward(self, x, state) -> (out, state)."
        )

    def loss(self, out: Tree, y: Tree) -> Tensor:
        """The mean loss of a chunk, or one value per step and row."""
        raise NotImplementedError(
            f"loss: {type(self).__name__} must define loss(self, out, y) -> tensor."
        )

    def initial_state(self, x: Tree) -> Tree:
        """The state before the first step of ``x``: by default zeros like what ``forward`` returns
        for ``state=None``, which must mean zeros to it, as it does to torch's own layers.
        """
        first = tree_map(lambda leaf: leaf.narrow(self.time_dim, 0, 1), x)
        leaves = tree_leaves(first)
        autocast = torch.is_autocast_enabled(self.device.type)
        key = [autocast, self.dtype, *((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves)]
        if self._zeros is None or self._zeros[0] != key:
            self._zeros = key, zero_state(self, first)
        return self._zeros[1]

    def chunk(self, batch: Any) -> Any:
        """What ``(x, y)``, ``(x, y, reset)`` or ``(x, y, reset, mask)`` is in a batch."""
        return batch

    def on_chunk(self, stage: str, out: Tree, y: Tree) -> None:
        """Called after each window and chunk, for metrics of your own.

        ``stage`` is "train", "val" or "test"; ``out`` and ``y`` are detached.
        """

    # -- what Lightning calls -------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        """The callback that this module needs; an override must add to it."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._run.prepare()
        return [] if self._run in self._callbacks() else [self._run]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.automatic_optimization or self._run not in self._callbacks():
            raise RuntimeError(
                "configure_callbacks: this module's own callback is missing. Return "
                "[*super().configure_callbacks(), ...]."
            )
        trainer, run = self.trainer, self._run
        batches = self._ready()
        params = batches.params()
        learner = run.learner(params)
        chunk = batches.chunk(self.chunk(batch))
        state = run.carried(self._start(batches, chunk), self.current_epoch)
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        windows = Windows(batches, self._truncation, params, state, chunk, scaled=scaled)
        done: list[WindowStats] = []
        is_last = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
        for trained in windows.run(run.scale):
            learner.add(trained.grads, trained.measured.weight)
            done.append(trained.measured)
            run.waiting.append(trained.measured)
            self._tell(batches, "train", trained.out, trained.chunk.y)
            if len(run.waiting) >= trainer.accumulate_grad_batches:
                run.update()
                if 0 <= trainer.max_steps <= trainer.global_step:
                    break
        if not done:
            raise ValueError(
                f"batch: no window of its {len(tree_leaves(chunk.x)[0])} steps has a loss, since "
                f"context={self._truncation.context}. Give longer sequences, or a smaller context."
            )
        if is_last and run.waiting:
            run.update()
        run.keep(windows.state, self.current_epoch)
        measured = WindowStats.joined(done)
        self.log(
            "train_loss_epoch", measured.loss, on_step=False, on_epoch=True,
            batch_size=int(measured.weight),
        )  # fmt: skip
        run.end_of_batch(is_last)
        return measured.loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("val", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tree:
        """``out`` for a batch as in training, or ``x`` alone."""
        batches, found = self._ready(), self.chunk(batch)
        given = Chunk(found) if isinstance(found, Tensor) else Chunk(*found)
        chunk = batches.chunk(given._replace(y=None))
        state = self._run.of_stage(
            "predict", dataloader_idx, batch_idx, self._start(batches, chunk)
        )
        out, state = batches.predict(batches.params(), state, chunk, self.k_eval)
        self._run.stages["predict", dataloader_idx] = state
        return out

    def __getstate__(self) -> dict[str, Any]:
        # What is compiled is neither copied nor saved, but made again.
        return {**super().__getstate__(), "_batches": None, "_zeros": None, "_run": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._run = TBPTTRun(self)

    # -- inside ---------------------------------------------------------------------------------

    def _callbacks(self) -> list[Callback]:
        return self.trainer.callbacks  # type: ignore[attr-defined, no-any-return]

    def _ready(self) -> Batches:
        """What is compiled, made anew only if the module got other parts."""
        if self._batches is None or not self._batches.is_current():
            self._batches = Batches(self, self.loss, **self._options)
        return self._batches

    def _start(self, batches: Batches, chunk: Chunk) -> Tree:
        """The state before the first step of a chunk."""
        state = self.initial_state(batches.time_back(chunk.x))
        for path, leaf in tree_flatten_with_path(state)[0]:
            here = f"initial_state{keystr(path)}"
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{here}: expected a tensor, found {type(leaf).__name__}.")
            if leaf.requires_grad:
                raise ValueError(
                    f"{here}: has a gradient, which would be lost: a window's state comes in "
                    "detached. Return zeros or constants, .detach() what is computed, or learn the "
                    "start as part of forward."
                )
            if chunk.reset is not None and leaf.any():
                raise ValueError(
                    f"{here}: is not zero, but reset restarts rows at zeros. Give batches without "
                    "reset, or a state that starts from zeros."
                )
        return state

    def _evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        batches = self._ready()
        chunk = batches.chunk(self.chunk(batch))
        state = self._run.of_stage(stage, dataloader_idx, batch_idx, self._start(batches, chunk))
        found = []
        for out, part, measured, after in batches.evaluate(
            batches.params(), state, chunk, self.k_eval
        ):
            state = after
            found.append(measured)
            self._tell(batches, stage, out, part.y)
        self._run.stages[stage, dataloader_idx] = state
        whole = WindowStats.joined(found)
        self.log(
            f"{stage}_loss", whole.loss, on_step=False, on_epoch=True, prog_bar=True,
            batch_size=int(whole.weight),
        )  # fmt: skip

    def _tell(self, batches: Batches, stage: str, out: Tree, y: Tree) -> None:
        self.on_chunk(stage, batches.time_back(out), batches.time_back(y))
