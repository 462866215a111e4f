"""Gradients in, parameters out: accumulation, clipping, the optimizer's step, the averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..._checks import check_tensors, kind_of
from ..._compat.running import versions_of
from ..._compat.training import forget_unscaled
from ..._memory import with_strides_of
from ..._trees import (
    Tree,
    differentiable,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)
from ..checkpoints.comparison import check_like, check_names, names_of
from .average import MovingAverage
from .norms import clip_by_norm, total_norm
from .optimizers import (
    FunctionalOptimizer,
    Sharded,
    check_in_params,
    functional_update,
    has_groups,
    load_optimizer,
)
from .stopped_models import StoppedModels
from .window_stats import moved_mean, share


class Learner:
    """Averages the gradients of windows, and updates the parameters with the average."""

    def __init__(
        self,
        params: Tree,
        optimizer: Optimizer | FunctionalOptimizer,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        scheduler: Any = None,
        scaler: GradScaler | None = None,
        ema_decay: float | None = None,
    ) -> None:
        remedy = "The parameters of a module are dict(module.named_parameters())."
        check_tensors("params", params, remedy)
        self.params, self.optimizer = params, optimizer
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.scheduler, self.scaler = scheduler, scaler
        self.trained_indices: list[int] = []  # among the leaves of params
        self._shapes_checked = False
        self.opt_state: Tree = None
        if isinstance(optimizer, Optimizer):
            if isinstance(optimizer, LBFGS):
                raise TypeError(
                    "optimizer: LBFGS evaluates the loss many times in a step, but a window of a "
                    "stream is run once. Give another one, or call train_segment in its closure."
                )
            self._find_trained(optimizer)
        elif isinstance(optimizer, FunctionalOptimizer) and not isinstance(optimizer, type):
            leaves = tree_leaves(params)
            self.trained_indices = [i for i, leaf in enumerate(leaves) if differentiable(leaf)]
            with torch.no_grad():
                self.opt_state = optimizer.init(params)
        else:
            several = " Several are one as ChainedOptimizer(*optimizers)."
            raise TypeError(
                "optimizer: expected a torch.optim.Optimizer, or an object with init(params) and "
                f"update(grads, state, params), found {kind_of(optimizer)}."
                f"{several if isinstance(optimizer, (list, tuple)) else ''}"
            )
        if clip_value is not None and any(p.is_complex() for p in self.trained):
            raise ValueError(
                "clip_value: a complex gradient has no largest value. Clip by clip_norm instead."
            )
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError(
                "scheduler: it changes the learning rate of another optimizer. Build it from the "
                "one that is passed as optimizer."
            )
        if scaler is not None and not isinstance(optimizer, Optimizer):
            raise TypeError("scaler: needs a torch.optim.Optimizer, which it steps itself.")
        self.ema = None if ema_decay is None else MovingAverage(params, ema_decay)
        # The mean of the gradients so far, and its weight in valid steps.
        self.gathered: tuple[list[Tensor], Any] | None = None
        self.stopped_models = StoppedModels()
        # Whether the step writes to the gradients, as SGD(foreach=True, nesterov=True) does. Known
        # after the first step.
        self.changes_gradients = True

    def _find_trained(self, optimizer: Optimizer) -> None:
        """Finds the leaves of the parameters that the optimizer holds."""
        check_in_params(optimizer, self.params)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._group_sizes = _group_sizes(optimizer)
        self.trained_indices = [
            i
            for i, leaf in enumerate(tree_leaves(self.params))
            if id(leaf) in held and differentiable(leaf)
        ]
        self._trained = self.trained
        self._unique = list({id(p): p for p in self._trained}.values())
        self._shapes_checked = False

    def begin_update(self) -> None:
        """Must be called before an update's first window: a group, or one's tensor, may be new."""
        optimizer = self.optimizer
        if isinstance(optimizer, Optimizer) and _group_sizes(optimizer) != self._group_sizes:
            self._find_trained(optimizer)

    @property
    def trained(self) -> list[Tensor]:
        """The leaves of the parameters that updates change."""
        leaves = tree_leaves(self.params)
        return [leaves[i] for i in self.trained_indices]

    @property
    def is_sharded(self) -> bool:
        """Whether the step is a collective: all ranks have to make it."""
        return isinstance(self.optimizer, Sharded)

    @property
    def learning_rate(self) -> float | Tensor | None:
        """That of the optimizer's first group; a copy of one in a tensor, which is not read."""
        if not isinstance(self.optimizer, Optimizer):
            return None
        rate = self.optimizer.param_groups[0].get("lr")
        return rate.detach().clone() if isinstance(rate, Tensor) else rate

    def scale(self) -> Tensor | None:
        """The factor of the next loss; None without a scaler."""
        return None if self.scaler is None else scale_of(self.scaler, self._trained[0].device)

    def add(self, grads: Tree, weight: Any) -> None:
        """Adds the gradients of a mean loss over ``weight`` valid steps to the weighted mean."""
        if not self._shapes_checked:
            self._check_shapes(grads)
        new = self.of_trained(grads)
        if self.gathered is not None:
            old, old_weight = self.gathered
            total = old_weight + weight
            fraction = share(weight, total)
            new = [moved_mean(a, b, fraction) for a, b in zip(old, new, strict=True)]
            weight = total
        self.gathered = new, weight

    def of_trained(self, grads: Tree) -> list[Tensor]:
        """The gradients of what is trained, of those of all parameters."""
        leaves: list[Tensor] = tree_leaves(grads)
        if len(leaves) > len(self.trained_indices):
            leaves = [leaves[i] for i in self.trained_indices]
        return leaves

    def _check_shapes(self, grads: Tree) -> None:
        """Raises ValueError for gradients whose shapes are not those of the parameters.

        Only the first gradients are checked: later ones come from the same segment.
        """
        leaves = tree_flatten_with_path(grads)[0]
        if len(leaves) > len(self.trained_indices):
            leaves = [leaves[i] for i in self.trained_indices]
        for (path, grad), leaf in zip(leaves, self.trained, strict=True):
            if grad.shape != leaf.shape:
                raise ValueError(
                    f"grads{keystr(path)}: has shape {list(grad.shape)}, but the parameter has "
                    f"{list(leaf.shape)}. A segment under torch.func.vmap returns a gradient for "
                    "each of the samples that it maps over: average them first, in a function "
                    "around it."
                )
        self._shapes_checked = True

    def take_over(self, other: Learner) -> None:
        """Goes on with what another learner has gathered, for the parameters that both have."""
        if other.gathered is not None:
            grads, weight = other.gathered
            known = {id(p): grad for p, grad in zip(other.trained, grads, strict=True)}
            own = [known[id(p)] if id(p) in known else torch.zeros_like(p) for p in self.trained]
            self.gathered = own, weight

    def forget(self) -> None:
        """Drops the gradients so far: a window that is run again must not count twice."""
        self.gathered = None
        if self.scaler is not None:
            forget_unscaled(self.scaler, self.optimizer)

    def ready(self, loss: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """The gradients of the update, unscaled and clipped, and their norm before clipping.

        The norm is None if nothing is clipped. ``loss``: that of the update.
        """
        assert self.gathered is not None
        grads, _ = self.gathered
        self.gathered = None
        if isinstance(self.optimizer, Optimizer):
            grads = self._assign(grads)
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
        self.stopped_models.silence(grads)
        clips = self.clip_norm is not None or self.clip_value is not None
        norm = total_norm(grads, loss) if clips else None
        if self.clip_norm is not None and norm is not None:
            clip_by_norm(grads, norm, self.clip_norm)
        if self.clip_value is not None:
            for grad in grads:
                grad.clamp_(-self.clip_value, self.clip_value)
        return grads, norm

    def _assign(self, grads: list[Tensor]) -> list[Tensor]:
        """Assigns the gradients to ``.grad``, and returns those that were assigned."""
        if len(self._unique) < len(self._trained):  # a tensor occurs in params more than once
            total: dict[int, Tensor] = {}
            for p, grad in zip(self._trained, grads, strict=True):
                total[id(p)] = total[id(p)] + grad if id(p) in total else grad
            grads = list(total.values())
        assigned = []
        for p, grad in zip(self._unique, grads, strict=True):
            # A parameter without requires_grad is frozen, by torch's convention. For a plain tensor
            # that is just the default, and gradients do not come from autograd here: one that
            # the optimizer holds is meant to be trained.
            if p.requires_grad or not isinstance(p, nn.Parameter):
                p.grad = with_strides_of(p, grad)
                assigned.append(p.grad)
            else:
                p.grad = None
        return assigned

    def step(self, grads: list[Tensor]) -> bool:
        """Makes the update, with the gradients of :meth:`ready`; false if the scaler skipped it."""
        stepped, versions = True, versions_of(grads)
        leaves_before = (
            [p.detach().clone() for p in self.trained] if self.stopped_models.matter else []
        )
        if not isinstance(self.optimizer, Optimizer):
            leaves, spec = tree_flatten(self.params)
            all_grads = [torch.zeros_like(leaf) for leaf in leaves]
            for i, grad in zip(self.trained_indices, grads, strict=True):
                all_grads[i] = grad
            self.params, self.opt_state = functional_update(
                self.optimizer, tree_unflatten(all_grads, spec), self.opt_state, self.params
            )
        elif self.scaler is None:
            self.optimizer.step()
        else:
            before = self.scaler.get_scale() if self.scheduler is not None else 0.0
            self.scaler.step(self.optimizer)
            self.scaler.update()
            # The scaler skips a step with infinite gradients, and lowers its scale after it.
            stepped = self.scheduler is None or self.scaler.get_scale() >= before
        self.changes_gradients = versions != versions_of(grads)
        if leaves_before:
            self._keep_stopped(leaves_before)
        if self.ema is not None:
            self.ema.update(self.params)
        return stepped

    def _keep_stopped(self, before: list[Tensor]) -> None:
        """Undoes a step for the models that have stopped; ``before``: the trained leaves then."""
        leaves, spec = tree_flatten(self.params)
        with torch.no_grad():
            for i, leaf in zip(self.trained_indices, before, strict=True):
                kept = self.stopped_models.kept(leaf, leaves[i])
                if isinstance(self.optimizer, Optimizer):
                    leaves[i].copy_(kept)
                else:
                    leaves[i] = kept
        if not isinstance(self.optimizer, Optimizer):
            self.params = tree_unflatten(leaves, spec)

    def follow_schedule(self) -> None:
        """Steps the scheduler. To be called after each step of the optimizer."""
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    @property
    def ema_params(self) -> Tree:
        """The moving average, in the structure of the parameters; None without ``ema_decay``."""
        return None if self.ema is None else self.ema.like(self.params)

    def after_report(self, loss: float) -> None:
        """Steps a scheduler that needs the loss, which has just been read."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)

    def state_dict(self) -> dict[str, Any]:
        opt_state: Any
        if isinstance(self.optimizer, Optimizer):
            opt_state = _full_state(self.optimizer)
        else:
            opt_state = tree_leaves(self.opt_state)
        return {
            "kinds": self._kinds(),
            "names": names_of(self.params),
            "params": tree_leaves(self.params),
            "optimizer": opt_state,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.leaves,
            "stopped_models": self.stopped_models.state_dict(),
        }

    def _kinds(self) -> dict[str, str | None]:
        """The classes of the optimizer, the scheduler, ...; None for those that are not used."""
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        kinds = {name: None if x is None else type(x).__name__ for name, x in parts.items()}
        return kinds | {"ema": None if self.ema is None else "moving average"}

    def check(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the state of another model, or of a run with other options."""
        for name, kind in self._kinds().items():
            saved_kind = state["kinds"][name]
            if kind != saved_kind:
                raise ValueError(
                    f"{name}: this run has {kind or 'none'}, but the checkpoint was made with "
                    f"{saved_kind or 'none'}. Resume with the options that the run was started "
                    "with."
                )
        check_like("params", "model", self.params, state["params"])
        check_names("params", names_of(self.params), state["names"])
        if isinstance(self.optimizer, Optimizer):
            if not has_groups(state["optimizer"]):
                return
            sizes = _group_sizes(self.optimizer)
            saved_sizes = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
            if sizes != saved_sizes:
                raise ValueError(
                    f"optimizer: its groups have {sizes} tensors, but the checkpoint's "
                    f"{saved_sizes}. "
                    "Resume with the same groups."
                )
        else:
            check_like("optimizer's state", "optimizer", self.opt_state, state["optimizer"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, once :meth:`check` has accepted it.

        Writes the caller's tensors in place.
        """
        leaves, spec = tree_flatten(self.params)
        if isinstance(self.optimizer, Optimizer):
            with torch.no_grad():
                for leaf, value in zip(leaves, state["params"], strict=True):
                    leaf.copy_(value)
            load_optimizer(self.optimizer, state["optimizer"])
        else:
            opt_leaves, opt_spec = tree_flatten(self.opt_state)
            self.params = tree_unflatten(_moved(state["params"], leaves), spec)
            self.opt_state = tree_unflatten(_moved(state["optimizer"], opt_leaves), opt_spec)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            self.ema.load(state["ema"])
        if leaves:
            self.stopped_models.load_state_dict(state.get("stopped_models"), leaves[0].device)


def _group_sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _full_state(optimizer: Optimizer) -> dict[str, Any] | None:
    """The optimizer's state. For a sharded one a collective, and None but on the first rank."""
    if isinstance(optimizer, Sharded):
        optimizer.consolidate_state_dict(to=0)
        return optimizer.state_dict() if optimizer.rank == 0 else None
    return optimizer.state_dict()


def _moved(values: list[Any], like: list[Any]) -> list[Any]:
    """The values, each tensor on the device of its counterpart in ``like``."""
    return [
        value.to(leaf.device) if isinstance(leaf, Tensor) else value
        for value, leaf in zip(values, like, strict=True)
    ]


def scale_of(scaler: Any, device: torch.device) -> Tensor | None:
    """A gradient scaler's factor of the next loss, read without waiting for the device."""
    if scaler is None:
        return None
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale
