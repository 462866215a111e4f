"""Gradients in, parameters out: accumulation, clipping, the optimizer, and what follows it."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import get_total_norm
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .._compat import forget_unscaled, versions_of
from .._trees import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten
from .window_stats import share

Tree = Any


@runtime_checkable
class FunctionalOptimizer(Protocol):
    """An optimizer as two pure functions."""

    def init(self, params: Tree) -> Tree:
        """The optimizer's state before the first update."""

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """The parameters after an update, and the optimizer's state."""


@runtime_checkable
class Sharded(Protocol):
    """An optimizer of which each rank has a part, as torch's ``ZeroRedundancyOptimizer``."""

    rank: int

    def consolidate_state_dict(self, to: int = 0) -> None:
        """All parts to one rank; to be called by all of them."""

    def state_dict(self) -> dict[str, Any]:
        """All of it, on that rank."""


def differentiable(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


class Learner:
    """Gathers gradients of windows and, when enough are there, makes an update of them."""

    def __init__(
        self,
        params: Tree,
        optimizer: Optimizer | FunctionalOptimizer,
        *,
        clip_norm: float | None,
        clip_value: float | None,
        scheduler: Any,
        scaler: GradScaler | None,
        ema_decay: float | None,
    ) -> None:
        self.params, self.optimizer = params, optimizer
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.scheduler, self.scaler = scheduler, scaler
        self.trained_places: list[int] = []
        self.opt_state: Tree = None
        if isinstance(optimizer, Optimizer):
            if isinstance(optimizer, LBFGS):
                raise TypeError(
                    "optimizer: LBFGS evaluates the loss many times in a step, but a window of a "
                    "stream is run once. Give another one, or call train_segment in its closure."
                )
            self._take_up(optimizer)
        elif isinstance(optimizer, FunctionalOptimizer):
            leaves = tree_leaves(params)
            self.trained_places = [i for i, leaf in enumerate(leaves) if differentiable(leaf)]
            self.opt_state = optimizer.init(params)
        else:
            raise TypeError(
                "optimizer: expected a torch.optim.Optimizer, or an object with init(params) and "
                f"update(grads, state, params), found {type(optimizer).__name__}."
            )
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError(
                "scheduler: it changes the learning rate of another optimizer than the one that is "
                "given. Build it from this one."
            )
        if scaler is not None and not isinstance(optimizer, Optimizer):
            raise TypeError("scaler: needs a torch.optim.Optimizer, which it steps itself.")
        self._average = None if ema_decay is None else get_ema_multi_avg_fn(ema_decay)
        self.ema: list[Tensor] | None = None
        if ema_decay is not None:
            self.ema = [leaf.detach().clone() for leaf in self._averaged()]
        self.gathered: tuple[list[Tensor], Any] | None = None  # gradients and their weight
        # Whether a step writes to them, as Nesterov's over many tensors at once does. Seen at work.
        self.changes_gradients = True

    def _take_up(self, optimizer: Optimizer) -> None:
        """Which leaves of the parameters the optimizer holds."""
        _check_owned(optimizer, self.params)
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._groups = len(optimizer.param_groups)
        leaves = tree_leaves(self.params)
        self.trained_places = [
            i for i, p in enumerate(leaves) if id(p) in owned and differentiable(p)
        ]
        self._own = [leaves[i] for i in self.trained_places]
        self._unique = list({id(p): p for p in self._own}.values())

    def begin_update(self) -> None:
        """To be called before an update's first window: a group may have been added since."""
        own = self.optimizer
        if isinstance(own, Optimizer) and len(own.param_groups) != self._groups:
            self._take_up(own)

    @property
    def trained(self) -> list[Tensor]:
        """The leaves of the parameters that updates change."""
        leaves = tree_leaves(self.params)
        return [leaves[i] for i in self.trained_places]

    @property
    def is_sharded(self) -> bool:
        """Whether a step is one of all ranks, which wait for each other in it."""
        return isinstance(self.optimizer, Sharded)

    @property
    def learning_rate(self) -> float | None:
        if not isinstance(self.optimizer, Optimizer):
            return None
        return float(self.optimizer.param_groups[0]["lr"])

    def scale(self) -> Tensor | None:
        """What the loss is to be multiplied by, without waiting for the device."""
        if self.scaler is None:
            return None
        return self.scaler.scale(torch.ones((), device=self._own[0].device))

    def add(self, grads: Tree, weight: Any) -> None:
        """Gathers gradients of the mean over ``weight`` valid steps: a weighted mean of all."""
        new = tree_leaves(grads)
        if len(new) > len(self.trained_places):
            new = [new[i] for i in self.trained_places]
        if self.gathered is not None:
            (old, n), m = self.gathered, weight
            weight = n + m
            part = share(m, weight)
            new = [a + (b - a) * part for a, b in zip(old, new, strict=True)]
        self.gathered = new, weight

    def forget(self) -> None:
        """Drops what was gathered: a window that is run again must not count twice."""
        self.gathered = None
        if self.scaler is not None:
            forget_unscaled(self.scaler, self.optimizer)

    def ready(self) -> tuple[list[Tensor], Tensor | None]:
        """The gradients of the update, unscaled and clipped; and their norm before, if they are."""
        assert self.gathered is not None
        grads, _ = self.gathered
        self.gathered = None
        if isinstance(self.optimizer, Optimizer):
            grads = self._give(grads)
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
        clips = self.clip_norm is not None or self.clip_value is not None
        norm = get_total_norm(grads) if clips else None
        if self.clip_norm is not None and norm is not None:
            factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            for grad in grads:
                grad.mul_(factor)
        if self.clip_value is not None:
            for grad in grads:
                grad.clamp_(-self.clip_value, self.clip_value)
        return grads, norm

    def _give(self, grads: list[Tensor]) -> list[Tensor]:
        """Puts gradients where an optimizer of torch finds them; none for what is frozen now."""
        if len(self._unique) < len(self._own):  # one tensor stands in params twice
            total: dict[int, Tensor] = {}
            for p, grad in zip(self._own, grads, strict=True):
                total[id(p)] = total[id(p)] + grad if id(p) in total else grad
            grads = list(total.values())
        given = []
        for p, grad in zip(self._unique, grads, strict=True):
            if p.requires_grad or not isinstance(p, nn.Parameter):
                p.grad = grad
                given.append(grad)
            else:  # a plain tensor need not ask for a gradient to be trained, but a parameter must
                p.grad = None
        return given

    def step(self, grads: list[Tensor]) -> bool:
        """The update; false if a scaler left it out. ``grads`` are those of :meth:`ready`."""
        stepped, versions = True, versions_of(grads)
        if not isinstance(self.optimizer, Optimizer):
            leaves, spec = tree_flatten(self.params)
            whole = [torch.zeros_like(leaf) for leaf in leaves]
            for i, grad in zip(self.trained_places, grads, strict=True):
                whole[i] = grad
            self.params, self.opt_state = self.optimizer.update(
                tree_unflatten(whole, spec), self.opt_state, self.params
            )
        elif self.scaler is None:
            self.optimizer.step()
        else:
            before = self.scaler.get_scale() if self.scheduler is not None else 0.0
            self.scaler.step(self.optimizer)
            self.scaler.update()
            # It makes no step with infinite gradients, and is smaller after that.
            stepped = self.scheduler is None or self.scaler.get_scale() >= before
        self.changes_gradients = versions != versions_of(grads)
        if self._average is not None and self.ema is not None:
            self._average(self.ema, self._averaged(), 0)
        return stepped

    def follow_schedule(self) -> None:
        """To be called after each step that was made."""
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def _averaged(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(self.params) if differentiable(leaf)]

    @property
    def ema_params(self) -> Tree:
        """The moving average, in the structure of the parameters; None if none was asked for."""
        if self.ema is None:
            return None
        leaves, spec = tree_flatten(self.params)
        average = iter(self.ema)
        return tree_unflatten(
            [next(average) if differentiable(leaf) else leaf for leaf in leaves], spec
        )

    def after_report(self, loss: float) -> None:
        """A scheduler that wants the loss is stepped when that was read."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)

    def state_dict(self) -> dict[str, Any]:
        own = self.optimizer
        return {
            "kinds": self._kinds(),
            "names": _names(self.params),
            "params": tree_leaves(self.params),
            "optimizer": _state_of(own)
            if isinstance(own, Optimizer)
            else tree_leaves(self.opt_state),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "ema": self.ema,
        }

    def _kinds(self) -> dict[str, str | None]:
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        kinds = {name: None if own is None else type(own).__name__ for name, own in parts.items()}
        return kinds | {"ema": None if self.ema is None else "moving average"}

    def check(self, state: dict[str, Any]) -> None:
        """Raises ValueError for a state of other parameters, or made with other options."""
        for name, own in self._kinds().items():
            there = state["kinds"][name]
            if own != there:
                raise ValueError(
                    f"{name}: this run has {own or 'none'}, but the checkpoint was made with "
                    f"{there or 'none'}. Resume with the options that the run was started with."
                )
        _check_like("params", "model", self.params, state["params"])
        names = _names(self.params)
        if names != state.get("names", names):
            raise ValueError(
                f"params: its leaves are {', '.join(names)}, but in the checkpoint "
                f"{', '.join(state['names'])}: it belongs to a different model, or to one that "
                "was built in another order."
            )
        if isinstance(self.optimizer, Optimizer):
            sizes = [len(group["params"]) for group in self.optimizer.param_groups]
            found = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
            if sizes != found:
                raise ValueError(
                    f"optimizer: its groups have {sizes} tensors, but the checkpoint's {found}. "
                    "Resume with the same groups."
                )
        else:
            _check_like("optimizer's state", "optimizer", self.opt_state, state["optimizer"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` gave, and :meth:`check` has let pass.

        Tensors of the caller are written in place.
        """
        leaves, spec = tree_flatten(self.params)
        if isinstance(self.optimizer, Optimizer):
            with torch.no_grad():
                for leaf, value in zip(leaves, state["params"], strict=True):
                    leaf.copy_(value)
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            own, opt_spec = tree_flatten(self.opt_state)
            self.params = tree_unflatten(_moved(state["params"], leaves), spec)
            self.opt_state = tree_unflatten(_moved(state["optimizer"], own), opt_spec)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            for average, value in zip(self.ema, state["ema"], strict=True):
                average.copy_(value)


def _state_of(optimizer: Optimizer) -> dict[str, Any] | None:
    """What to keep of it; of one that is shared out over ranks, on the first of them only.

    That is to be called by all of them.
    """
    if isinstance(optimizer, Sharded):
        optimizer.consolidate_state_dict(to=0)
        return optimizer.state_dict() if optimizer.rank == 0 else None
    return optimizer.state_dict()


def _names(tree: Tree) -> list[str]:
    return [keystr(path) for path, _ in tree_flatten_with_path(tree)[0]]


def _moved(values: list[Any], like: list[Any]) -> list[Any]:
    """The values, tensors on the devices of those in ``like``."""
    return [
        value.to(leaf.device) if isinstance(leaf, Tensor) else value
        for value, leaf in zip(values, like, strict=True)
    ]


def _check_like(name: str, whole: str, tree: Tree, found: list[Any]) -> None:
    """What the checkpoint has must be as ``tree``, but for the values."""
    leaves = tree_leaves(tree)
    if len(leaves) != len(found):
        raise ValueError(
            f"{name}: has {len(leaves)} leaves, but the checkpoint has {len(found)}: it belongs "
            f"to a different {whole}."
        )
    for path, leaf, value in zip(_names(tree), leaves, found, strict=True):
        if not (isinstance(leaf, Tensor) and isinstance(value, Tensor)):
            continue
        if leaf.shape != value.shape or leaf.dtype != value.dtype:
            raise ValueError(
                f"{name}{path}: is {leaf.dtype} {list(leaf.shape)}, but in the checkpoint "
                f"{value.dtype} {list(value.shape)}: it belongs to a "
                f"different {whole}."
            )


def _check_owned(optimizer: Optimizer, params: Tree) -> None:
    """The optimizer must hold the very tensors of ``params``."""
    own = {id(leaf) for leaf in tree_leaves(params)}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in own:
                raise ValueError(
                    f"optimizer: its tensor {i} of group {g}, of shape {list(p.shape)}, is not "
                    "one of the tensors in params, so it would never get a gradient. Build the "
                    "optimizer from those tensors: params = dict(model.named_parameters()); "
                    "torch.optim.Adam(params.values())."
                )
