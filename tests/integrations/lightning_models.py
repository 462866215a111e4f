"""Modules and plain loops for the tests of Lightning."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ftbptt.integrations.lightning import TBPTTModule
from ftbptt.training import Truncation
from ftbptt.training.segments import Segments

from ..training.streams import cross_entropy, honest_updates, mean_cross_entropy, tagger, zeros


class Tagger(TBPTTModule):
    """The step of ``streams.Tagger`` as a module for chunks, in float64."""

    def __init__(self, time_dim: int = 0, backend: str = "eager", **options: Any) -> None:
        super().__init__(4, time_dim=time_dim, backend=backend, **options)
        self.step = tagger()
        self.renew()

    def renew(self, lr: float = 0.5, carry: bool = False, k_eval: int = 256, **windows: int) -> Any:
        """As new, with other options, but what was compiled is kept."""
        self.step.load_state_dict(tagger().state_dict())
        self.train()  # a trainer that has failed leaves it in eval mode
        for p in self.parameters():
            p.requires_grad_(True)
            p.grad = None
        self.lr, self.carry, self.k_eval = lr, carry, k_eval
        windows = {"k1": 4, "k2": None, "burn_in": 0, "context": 0} | windows
        self._truncation = Truncation.of(**windows, fresh=False)
        if self._batches is not None:
            self._batches.segments = Segments(
                self._batches.train_segment, context=self._truncation.context
            )
        self.outs: list[tuple[str, Tensor]] = []
        return self

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        outs = []
        for x_t in x.movedim(self.time_dim, 0):
            out, state = self.step(x_t, state)
            outs.append(out)
        return torch.stack(outs).movedim(0, self.time_dim), state

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return mean_cross_entropy(out, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_chunk(self, stage: str, out: Tensor, y: Tensor) -> None:
        self.outs.append((stage, out))


class Masked(Tagger):
    """A loss per step and row."""

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.movedim(-1, 1), y, reduction="none")


class Batchwise(Tagger):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


class ClassesFirst(Tagger):
    """``out`` is ``[B, C, T]``, as cross entropy has it."""

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, y)


class Classifier(TBPTTModule):
    """Layers of torch, whose state is None at first; dropout, which a trial run must not draw."""

    def __init__(self, **options: Any) -> None:
        super().__init__(k1=5, **{"backend": "eager"} | options)
        torch.manual_seed(0)
        self.lstm = nn.LSTM(3, 4, 2, batch_first=True)
        self.readout = nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        h, state = self.lstm(x, state)
        return self.readout(h), state

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class HC(NamedTuple):
    h: Tensor
    c: Tensor


class Structured(TBPTTModule):
    """A state in a dict with a named tuple, which begins at ones."""

    def __init__(self) -> None:
        super().__init__(4, time_dim=0, carry=True, backend="eager")
        self.step = tagger()

    def initial_state(self, x: Any) -> Any:
        h = torch.ones_like(x["first"][0, :, :1]).expand(-1, 5).contiguous()
        return {"cell": HC(h, torch.zeros_like(h)), "steps": torch.zeros_like(h[:, 0])}

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        outs = []
        for x_t in torch.cat([x["first"], *x["rest"]], -1):
            out, cell = self.step(x_t, state["cell"])
            state = {"cell": HC(*cell), "steps": state["steps"] + 1}
            outs.append(out)
        return {"scores": torch.stack(outs)}, state

    def loss(self, out: Any, y: Any) -> Tensor:
        return mean_cross_entropy(out["scores"], y[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def structured(batches: Any) -> Any:
    """Nested inputs and targets."""
    return [({"first": x[..., :2], "rest": [x[..., 2:]]}, (y, y)) for x, y in batches]


class Clipped(torch.optim.SGD):
    """SGD that clips by itself."""

    clip: Any = None

    def step(self, closure: Any = None) -> Any:
        self.clip([p for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def with_scheduler(own: Tagger, **config: Any) -> Any:
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    config.setdefault("interval", "step")
    config.setdefault("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    return {"optimizer": optimizer, "lr_scheduler": config}


_made: dict[Any, tuple[Tagger, int]] = {}  # with the number of times that it was given out
_MOST_USES = 6  # what tests patch may name its trainer: after the eighth one a warning says so


def model(kind: type[Tagger] = Tagger, time_dim: int = 0, **options: Any) -> Any:
    """A module as new; what was compiled for one of its kind is kept for some tests."""
    key = kind, time_dim
    made, uses = _made.get(key, (None, _MOST_USES))
    if made is None or uses == _MOST_USES:
        made, uses = kind(time_dim), 0
    _made[key] = made, uses + 1
    return made.renew(**options)


def trainer(**flags: Any) -> lightning.Trainer:
    quiet = {
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "accelerator": "cpu",
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }  # fmt: skip
    return lightning.Trainer(**quiet | flags)


def loader(batches: Any) -> Any:
    return torch.utils.data.DataLoader(list(batches), batch_size=None)


def fit(model: TBPTTModule, batches: Any, val: Any = None, **flags: Any) -> lightning.Trainer:
    made = trainer(**flags)
    made.fit(model, loader(batches), None if val is None else loader(val))
    return made


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((p.double() - q.double()).abs().max().item() for p, q in pairs)


def by_hand(batches: Any, *, carry: bool = False, lr: float = 0.5, **windows: Any) -> Any:
    """The module of the plain loops behind all batches, and the losses of its updates."""
    module, losses, state = tagger(), [], zeros()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    windows = {"k1": 4} | windows
    windows.setdefault("k2", windows["k1"])

    def on_update(loss: float, behind: Any) -> None:
        nonlocal state
        losses.append(loss)
        state = behind

    for x, y in batches:
        honest_updates(module, state if carry else zeros(), x, y, optimizer,
                       on_update=on_update, **windows)  # fmt: skip
    return module, losses


def whole_loss(batches: Any, module: nn.Module) -> float:
    """The mean over all steps of all batches, each from zeros, without chunks."""
    losses = []
    with torch.no_grad():
        for x, y in batches:
            state = zeros(x.shape[1])
            for x_t, y_t in zip(x, y, strict=True):
                out, state = module(x_t, state)
                losses.append(cross_entropy(out[None], y_t[None]).flatten())
    return torch.cat(losses).mean().item()
