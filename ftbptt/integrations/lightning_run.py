"""What a module for Lightning does in a Trainer's run, besides the windows: its callback."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import LBFGS, Optimizer

from .._trees import keystr, tree_flatten_with_path, tree_leaves
from ..training.checkpoint import as_plain, from_plain
from ..training.learner import Learner
from ..training.window_stats import WindowStats

Tree = Any


class TBPTTRun(Callback):
    """Updates, schedulers, logs and the carried state of a module in a Trainer's run.

    A callback, so that the carried state is in checkpoints and nothing depends on whether the
    module's own hooks call ``super()``.

    For a module in manual optimization Lightning refuses ``gradient_clip_val`` and
    ``accumulate_grad_batches`` when it verifies a fit, and drops ``monitor`` from the settings of
    schedulers when it reads them, for it would do nothing about them. Here they are all honoured.
    So the module is in automatic optimization while a fit is set up, which takes all of them, and
    in manual optimization from ``on_fit_start`` on.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._learner: Learner | None = None
        self._saved: dict[str, Any] | None = None  # of the carried state, from a checkpoint
        self._behind: tuple[int, Tree] | None = None  # epoch, the state after its last batch
        self.stages: dict[tuple[str, int], Tree] = {}  # the same for (stage, loader)
        self.waiting: list[WindowStats] = []  # windows since the last update
        self._norm: Tensor | None = None
        self._last: dict[str, Tensor] | None = None  # of the last update

    # -- a run ----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """A fit is about to be set up."""
        self._learner = self._saved = self._behind = self._last = None
        self.waiting.clear()
        self._module.automatic_optimization = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.automatic_optimization = False
        if trainer.world_size > 1:
            raise ValueError(
                f"devices: expected one device, found {trainer.world_size}: gradients are not made "
                "by autograd here, so no strategy sums them up. Use Trainer(devices=1)."
            )
        if len(trainer.optimizers) != 1:
            raise ValueError(
                "configure_optimizers: expected one optimizer, found none. Return one, such as "
                "torch.optim.Adam(self.parameters())."
            )
        if isinstance(trainer.optimizers[0], LBFGS):
            raise TypeError(
                "optimizer: LBFGS evaluates the loss many times in a step, which a window, run "
                "once, cannot give. Use another optimizer."
            )

    def learner(self, params: Tree) -> Learner:
        """What gathers gradients, for these parameters and the Trainer's optimizer."""
        if self._learner is None:
            # Clipping and scaling are left to Lightning, which has its own hooks for them.
            self._learner = Learner(
                params, self._module.trainer.optimizers[0], clip_norm=None, clip_value=None,
                scheduler=None, scaler=None, ema_decay=None,
            )  # fmt: skip
        if not self.waiting:
            self._learner.begin_update()
        return self._learner

    def scale(self) -> Tensor | None:
        """What the next loss is to be multiplied by, without waiting for the device."""
        scaler = getattr(self._module.trainer.precision_plugin, "scaler", None)
        if scaler is None:
            return None
        scale: Tensor = scaler.scale(torch.ones((), device=self._module.device))
        return scale

    # -- an update ------------------------------------------------------------------------------

    def update(self) -> None:
        """The optimizer's step with the gradients of the windows that wait."""
        module, learner = self._module, self._learner
        trainer = module.trainer
        assert learner is not None
        measured = WindowStats.joined(self.waiting)
        self.waiting.clear()
        learner.ready()
        optimizer = module.optimizers()
        assert not isinstance(optimizer, list)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not p.requires_grad:  # frozen, also in the midst of a run
                    p.grad = None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        schedulers = bool(trainer.lr_scheduler_configs)
        before = scaler.get_scale() if scaler is not None and schedulers else 0.0
        hook = trainer.optimizers[0].register_step_pre_hook(self._clip)
        try:
            optimizer.step()
        finally:
            hook.remove()
        self._show(measured)
        # A scaler makes no step with infinite gradients, and is smaller after that.
        if schedulers and (scaler is None or scaler.get_scale() >= before):
            self._step_schedulers("step", trainer.global_step, measured)

    def _clip(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Clips where automatic optimization does: behind ``on_before_optimizer_step``.

        Without a scaler Lightning calls those hooks in the closure of the optimizer's step.
        """
        closure = kwargs.get("closure")
        if closure is None:
            self._clip_now(optimizer)
            return None

        def closure_and_clip() -> Any:
            value = closure()
            self._clip_now(optimizer)
            return value

        return args, {**kwargs, "closure": closure_and_clip}

    @torch.no_grad()
    def _clip_now(self, optimizer: Optimizer) -> None:
        trainer = self._module.trainer
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        self._norm = get_total_norm(grads)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            self._norm = self._norm / scaler.get_scale()  # such an optimizer unscales inside
        self._module.configure_gradient_clipping(
            optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

    # -- schedulers -----------------------------------------------------------------------------

    def end_of_batch(self, is_last: bool) -> None:
        """Behind the last update of a batch."""
        trainer = self._module.trainer
        self._log_last()
        if is_last:
            self._step_schedulers("epoch", trainer.current_epoch + 1, None, plateau=False)
        # Lightning's own logs, as of val_loss or learning rates, have this counter of batches on
        # their axis; with the number of updates in it they stand beside those of updates. It is
        # raised by one after the batch, as trainer.global_step already is.
        trainer.fit_loop.epoch_loop._batches_that_stepped = max(0, trainer.global_step - 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_schedulers("epoch", trainer.current_epoch + 1, None, plateau=True)

    def _step_schedulers(
        self, interval: str, count: int, measured: WindowStats | None, plateau: bool | None = None
    ) -> None:
        """Those of an interval; ``plateau`` says whether those that want a metric, or all."""
        trainer = self._module.trainer
        for config in trainer.lr_scheduler_configs:
            if config.interval != interval or count % config.frequency:
                continue
            if plateau is not None and config.reduce_on_plateau != plateau:
                continue
            metric = None
            if config.reduce_on_plateau:
                known = dict(trainer.callback_metrics)
                if measured is not None:
                    known |= {"train_loss": measured.loss}
                metric = known.get(str(config.monitor))
                if metric is None and config.strict:
                    raise ValueError(
                        f"monitor: {config.monitor!r} of the scheduler is not logged; there are "
                        f"{', '.join(sorted(known)) or 'none'}. Name one of these, or one that is "
                        "logged before the scheduler's step."
                    )
                if metric is None:
                    continue
            self._module.lr_scheduler_step(config.scheduler, metric)

    # -- what is seen of it ---------------------------------------------------------------------

    def _show(self, measured: WindowStats) -> None:
        """The update in the loggers and the bar, if one is due."""
        trainer = self._module.trainer
        norm = measured.loss.new_tensor(float("nan")) if self._norm is None else self._norm
        self._last, self._norm = {"train_loss": measured.loss, "grad_norm": norm}, None
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or trainer.global_step % every:
            return
        found = {name: float(value) for name, value in self._last.items()}
        for logger in trainer.loggers:
            logger.log_metrics(
                {**found, "epoch": trainer.current_epoch}, step=trainer.global_step - 1
            )
        bar = trainer.progress_bar_callback
        if isinstance(bar, TQDMProgressBar) and not bar.is_disabled:
            self._log_last()
            bar.train_progress_bar.set_postfix(bar.get_metrics(trainer, self._module))

    def _log_last(self) -> None:
        """The last update for callbacks and the bar; each call takes longer than a small window."""
        if self._last is not None:
            loss, norm = self._last["train_loss"], self._last["grad_norm"]
            self._module.log("train_loss", loss, prog_bar=True, logger=False, batch_size=1)
            self._module.log("grad_norm", norm, logger=False, batch_size=1)

    # -- the carried state ----------------------------------------------------------------------

    def carried(self, start: Tree, epoch: int) -> Tree:
        """The state that a batch begins with, where ``start`` is the one of a sequence's start."""
        if self._saved is not None:
            if self._saved["epoch"] == epoch:
                self._resume(self._saved["state"], start, epoch)
            self._saved = None
        if self._behind is None or self._behind[0] != epoch:
            return start
        return _like(self._behind[1], start)

    def _resume(self, plain: Any, start: Tree, epoch: int) -> None:
        """In the midst of an epoch, whose data Lightning itself reads from the start again."""
        if hasattr(self._module.trainer.train_dataloader, "load_state_dict"):
            self._behind = epoch, from_plain(plain, start, self._module.device)
            return
        warnings.warn(
            "ftbptt: the checkpoint was made within an epoch, whose data begins anew, since the "
            "DataLoader has no state: the carried state begins anew too. One with state_dict and "
            "load_state_dict, such as torchdata's StatefulDataLoader, goes on where it was.",
            RuntimeWarning,
            stacklevel=2,
        )

    def keep(self, state: Tree, epoch: int) -> None:
        """The state after a batch."""
        if self._module.carry:
            self._behind = epoch, state

    def of_stage(self, stage: str, loader: int, batch_idx: int, start: Tree) -> Tree:
        """As :meth:`carried`, for a run of validation, test or prediction."""
        if batch_idx == 0 or not self._module.carry or (stage, loader) not in self.stages:
            return start
        return _like(self.stages[stage, loader], start)

    def state_dict(self) -> dict[str, Any]:
        if self._behind is None:
            return {}
        return {"epoch": self._behind[0], "state": as_plain(self._behind[1])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict


def _like(state: Tree, start: Tree) -> Tree:
    """The carried state, if it fits the batch."""
    found, wanted = tree_leaves(state), tree_flatten_with_path(start)[0]
    if len(found) != len(wanted):
        raise ValueError(
            f"carry: the state has {len(found)} leaves, but initial_state gives {len(wanted)}. "
            "Return the same structure from both."
        )
    for leaf, (path, like) in zip(found, wanted, strict=True):
        if leaf.shape != like.shape:
            raise ValueError(
                f"carry: state{keystr(path)} is {list(leaf.shape)} after the batch before, but "
                f"this batch begins with {list(like.shape)}. Give batches of the same rows in the "
                "same order (drop_last=True, shuffle=False), or carry=False."
            )
    return state
