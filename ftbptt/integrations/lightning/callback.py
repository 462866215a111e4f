"""The callback of a Lightning module: updates, schedulers, logs and the carried state."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, TQDMProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DistributedSampler

from ..._compat.training import unscales_itself
from ..._trees import Tree, tree_leaves
from ..._warnings import warn
from ...training.checkpoints.file import as_plain, from_plain
from ...training.data.shuffling import shuffling_sampler
from ...training.updates.learner import Learner, scale_of
from ...training.updates.window_stats import WindowStats
from .batches import check_like

# Of automatic optimization, around a backward that there is not, and its step.
_HOOKS_OF_BACKWARD = (
    "optimizer_step", "optimizer_zero_grad", "on_before_zero_grad", "on_before_backward",
    "backward", "on_after_backward",
)  # fmt: skip


class TBPTTRun(Callback):
    """Updates, schedulers, logs and the carried state of a module in a Trainer's run.

    This is a callback so that checkpoints include the carried state, and so that nothing depends on
    whether hooks of the user's module call ``super()``.

    For a module in manual optimization, which would ignore them, Lightning refuses
    ``gradient_clip_val`` and ``accumulate_grad_batches`` when it verifies a fit, and drops
    ``monitor`` from the configuration of schedulers. Here they all apply. So the module is in
    automatic optimization while a fit is set up, and in manual optimization from ``on_fit_start``.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.trainer: Trainer | None = None  # whose callback it was made
        self._learner: Learner | None = None
        self._loaded: dict[str, Any] | None = None  # the state_dict of a checkpoint
        self._carried: tuple[int, Tree] | None = None  # (epoch, the state after its last batch)
        self.stage_states: dict[tuple[str, int], Tree] = {}  # the same by (stage, dataloader_idx)
        self.pending: list[WindowStats] = []  # windows since the last update
        self._has_begun = self._has_trained = False  # the current batch; and updates of it
        self._grad_norm: Tensor | None = None
        self._last_logs: dict[str, Tensor] | None = None  # train_loss and grad_norm

    # -- the start of a fit ---------------------------------------------------------------------

    def prepare(self) -> None:
        """Called before Lightning sets up a fit."""
        self._learner = self._loaded = self._carried = self._last_logs = None
        self.pending.clear()
        self._has_begun = self._has_trained = False
        self._module.automatic_optimization = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.trainer = trainer

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module is not self._module:  # a Trainer keeps its callbacks for other modules
            return
        pl_module.automatic_optimization = False
        if trainer.world_size > 1:
            raise ValueError(
                f"devices: expected one device, found {trainer.world_size}. Gradients do not come "
                "from autograd here, so no strategy reduces them. Use Trainer(devices=1)."
            )
        self._check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers: expected one optimizer, found {len(trainer.optimizers)}. "
                "Return one, such as torch.optim.Adam(self.parameters()); several are one as "
                "ftbptt.training.ChainedOptimizer(*optimizers)."
            )
        if isinstance(trainer.optimizers[0], LBFGS):
            raise TypeError(
                "optimizer: LBFGS evaluates the loss many times per step, but each window runs "
                "once. Use another optimizer."
            )

    def _check_callbacks(self, callbacks: list[Callback]) -> None:
        """Warns of hooks that are not called. Raises ValueError for a callback that cannot work."""
        for owner in (self._module, *callbacks):
            base = LightningModule if owner is self._module else Callback
            for hook in _HOOKS_OF_BACKWARD:
                if hasattr(base, hook) and is_overridden(hook, owner, base):
                    warn(
                        f"ftbptt: {type(owner).__name__}.{hook} is not called: gradients do not "
                        "come from autograd here, and a batch makes many updates. Change the "
                        "learning rate by a scheduler, gradients in on_before_optimizer_step.",
                        RuntimeWarning,
                    )
            if not isinstance(owner, StochasticWeightAveraging):
                continue
            if owner.pl_module_contains_batch_norm(self._module):
                raise ValueError(
                    "callbacks: StochasticWeightAveraging computes the statistics of batch norm "
                    "anew in one more epoch, and asks for no updates in it, but windows do not "
                    "change statistics. Use WeightAveraging or EMAWeightAveraging."
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sampler = shuffling_sampler(trainer.train_dataloader)
        if pl_module is not self._module or not pl_module.carry or sampler is None:
            return
        if isinstance(sampler, DistributedSampler):
            advice = (
                "Lightning gives one to each loader where the strategy is for several devices, "
                "also with one: use Trainer(strategy='auto'), or use_distributed_sampler=False."
            )
        else:
            advice = "Use shuffle=False, or carry=False."
        raise ValueError(
            "carry: the batches are in a random order, since their sampler is a "
            f"{type(sampler).__name__}, so that a state would go on in another sequence. {advice}"
        )

    def on_train_batch_start(self, *_: Any) -> None:
        self._has_begun = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        has_trained = self._has_trained
        self._has_begun = self._has_trained = False
        if has_trained or pl_module is not self._module:
            return
        if outputs:
            raise RuntimeError(
                f"training_step: that of {type(pl_module).__name__} makes no updates. Leave it "
                "out, or call super().training_step(batch, batch_idx) in it and return the result."
            )
        if self.is_last(batch_idx):  # the batch was skipped, but it ends the epoch all the same
            self._end_without_batch(trainer)

    def _end_without_batch(self, trainer: Trainer) -> None:
        """What the last batch of an epoch does at its end, where it is not trained on."""
        if self.pending:
            loop = trainer.fit_loop.epoch_loop.manual_optimization
            loop.on_run_start()  # where steps of the optimizer are counted
            self.update()
            loop.on_run_end()
        self.end_of_batch(True)

    def is_last(self, batch_idx: int) -> bool:
        """Whether a batch is the last of its epoch."""
        trainer = self._module.trainer
        return trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches

    def learner(self, params: Tree) -> Learner:
        """The learner that accumulates gradients of these parameters, of a batch that begins."""
        self._has_trained = True
        before, optimizer = self._learner, self._module.trainer.optimizers[0]
        # A learner knows parameters by their order, which pruning changes, as does a new submodule.
        if before is None or before.optimizer is not optimizer or not _same(before.params, params):
            # Lightning clips and scales, in its own hooks.
            self._learner = Learner(params, optimizer)
            if before is not None:
                self._learner.take_over(before)
        assert self._learner is not None
        if not self.pending:
            self._learner.begin_update()
        return self._learner

    def scale(self) -> Tensor | None:
        """The scaler's factor for the next loss, on the device; None without a scaler."""
        return scale_of(self._scaler, self._module.device)

    @property
    def _scaler(self) -> Any:
        """Lightning's ``GradScaler``; None without one."""
        return getattr(self._module.trainer.precision_plugin, "scaler", None)

    # The module's own methods do not name these numbers: where ``torch.compile`` has put a method
    # into the module's attributes, a segment takes it for a part of its step.

    def show_progress(self) -> None:
        """Shows a segment what its step or loss may read of the Trainer, as a constant.

        It sees that an attribute has changed, but not what a property returns. (That is what the
        names still mean: a property comes before an attribute.)
        """
        module = self._module
        vars(module).update(current_epoch=module.current_epoch, global_step=module.global_step)

    @property
    def is_done(self) -> bool:
        """Whether the Trainer's ``max_steps`` are made."""
        trainer = self._module.trainer
        return 0 <= trainer.max_steps <= trainer.global_step

    # -- an update ------------------------------------------------------------------------------

    def update(self) -> None:
        """Makes an optimizer step with the gradients of the pending windows.

        Without the autocast that Lightning has around all of ``training_step``: an optimizer that
        multiplies matrices would do so in half precision, and so would hooks and clipping.
        """
        with torch.autocast(self._module.device.type, enabled=False):
            self._update()

    def _update(self) -> None:
        module, learner = self._module, self._learner
        trainer = module.trainer
        assert learner is not None
        stats = WindowStats.joined(self.pending)
        self.pending.clear()
        learner.ready(stats.loss)
        optimizer = module.optimizers()
        assert not isinstance(optimizer, list)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not p.requires_grad:  # may have been frozen during the run
                    p.grad = None
        scaler, has_schedulers = self._scaler, bool(trainer.lr_scheduler_configs)
        scale_before = scaler.get_scale() if scaler is not None and has_schedulers else 0.0
        hook = trainer.optimizers[0].register_step_pre_hook(self._clip)
        try:
            optimizer.step()
        finally:
            hook.remove()
        self._log(stats)
        # A scaler skips the step if gradients overflow, and then lowers its scale.
        if has_schedulers and (scaler is None or scaler.get_scale() >= scale_before):
            self._step_schedulers("step", trainer.global_step, stats)

    def _clip(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """A step pre-hook that clips where automatic optimization does.

        That is after ``on_before_optimizer_step``, which Lightning calls, without a scaler, in the
        closure of the optimizer's step.
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
        self._grad_norm = get_total_norm(grads)
        scaler = self._scaler
        if scaler is not None and unscales_itself(optimizer):
            self._grad_norm = self._grad_norm / scaler.get_scale()  # it unscales in its step
        self._module.configure_gradient_clipping(
            optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

    # -- schedulers -----------------------------------------------------------------------------

    def end_of_batch(self, is_last: bool) -> None:
        """Called after the last update of a batch."""
        trainer = self._module.trainer
        self._log_to_lightning()
        if is_last:
            self._step_schedulers("epoch", trainer.current_epoch + 1, None, plateau=False)
        # Lightning logs val_loss, learning rates and the like against this counter of batches. Set
        # to the number of updates, it puts them on the axis of the updates' logs. Lightning adds
        # one after the batch, which trainer.global_step already includes.
        trainer.fit_loop.epoch_loop._batches_that_stepped = max(0, trainer.global_step - 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module is not self._module:
            return
        if self._has_begun:  # the module's on_train_batch_start left the rest of the epoch out
            self._has_begun = False
            self._end_without_batch(trainer)
            trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        self._step_schedulers("epoch", trainer.current_epoch + 1, None, plateau=True)

    def _step_schedulers(
        self, interval: str, count: int, stats: WindowStats | None, plateau: bool | None = None
    ) -> None:
        """Steps the schedulers of an interval; ``plateau``: whether only those with a metric."""
        trainer = self._module.trainer
        for config in trainer.lr_scheduler_configs:
            if config.interval != interval or count % config.frequency:
                continue
            if plateau is not None and config.reduce_on_plateau != plateau:
                continue
            metric = None
            if config.reduce_on_plateau:
                metrics = dict(trainer.callback_metrics)
                if stats is not None:
                    metrics |= {"train_loss": stats.loss}
                metric = metrics.get(str(config.monitor))
                if metric is None and config.strict:
                    raise ValueError(
                        f"monitor: {config.monitor!r} of the scheduler is not logged; there are "
                        f"{', '.join(sorted(metrics)) or 'none'}. Name one of these, or log it "
                        "before the scheduler's step, which comes before the module's "
                        "on_train_epoch_end."
                    )
                if metric is None:
                    continue
            self._module.lr_scheduler_step(config.scheduler, metric)

    # -- logs -----------------------------------------------------------------------------------

    def _log(self, stats: WindowStats) -> None:
        """Records an update; every ``log_every_n_steps`` also in the loggers and the bar."""
        trainer = self._module.trainer
        norm = stats.loss.new_tensor(float("nan")) if self._grad_norm is None else self._grad_norm
        self._last_logs, self._grad_norm = {"train_loss": stats.loss, "grad_norm": norm}, None
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or trainer.global_step % every:
            return
        metrics = {name: float(value) for name, value in self._last_logs.items()}
        metrics["epoch"] = trainer.current_epoch
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)
            logger.save()  # as Lightning does: a process that is killed loses none
        bar = trainer.progress_bar_callback
        if isinstance(bar, TQDMProgressBar) and not bar.is_disabled:
            self._log_to_lightning()
            bar.train_progress_bar.set_postfix(bar.get_metrics(trainer, self._module))

    def _log_to_lightning(self) -> None:
        """Makes the last update's logs visible to callbacks and the bar.

        Not done for every update, since it takes longer than a small window.
        """
        if self._last_logs is not None:
            loss, norm = self._last_logs["train_loss"], self._last_logs["grad_norm"]
            self._module.log("train_loss", loss, prog_bar=True, logger=False, batch_size=1)
            self._module.log("grad_norm", norm, logger=False, batch_size=1)

    # -- the carried state ----------------------------------------------------------------------

    def carried(self, start: Tree) -> Tree:
        """The state a batch begins with; ``start``: the one for the start of a sequence."""
        epoch = self._module.current_epoch
        if self._loaded is not None:
            if self._loaded["epoch"] == epoch:
                self._resume(self._loaded["state"], start, epoch)
            self._loaded = None
        if self._carried is None or self._carried[0] != epoch:
            return start
        return check_like(self._carried[1], start)

    def _resume(self, plain: Any, start: Tree, epoch: int) -> None:
        """Resumes within an epoch; only a loader with a state resumes its data there."""
        if hasattr(self._module.trainer.train_dataloader, "load_state_dict"):
            self._carried = epoch, from_plain(plain, start, self._module.device)
            return
        warn(
            "ftbptt: the checkpoint was made within an epoch. Its data starts over, since the "
            "DataLoader has no state, so the carried state starts over too. A loader with "
            "state_dict and load_state_dict, such as torchdata's StatefulDataLoader, resumes.",
            RuntimeWarning,
        )

    def save_state(self, state: Tree) -> None:
        """Carries the state after a batch to the next one, if the module asks for it."""
        if self._module.carry:
            self._carried = self._module.current_epoch, state

    def stage_state(self, stage: str, loader: int, batch_idx: int, start: Tree) -> Tree:
        """As :meth:`carried`, for validation, test or prediction."""
        if batch_idx == 0 or not self._module.carry or (stage, loader) not in self.stage_states:
            return start
        return check_like(self.stage_states[stage, loader], start)

    def state_dict(self) -> dict[str, Any]:
        if self._carried is None:
            return {}
        epoch, state = self._carried
        return {"epoch": epoch, "state": as_plain(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict


def _same(before: Tree, params: Tree) -> bool:
    """Whether these are the same tensors in the same order."""
    return [*map(id, tree_leaves(before))] == [*map(id, tree_leaves(params))]
