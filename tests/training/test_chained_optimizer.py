"""Several optimizers as one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Muon, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from ftbptt import make_train_segment
from ftbptt.training import ChainedOptimizer, train_stream

from .streams import Tagger, honest_updates, mean_cross_entropy, stream, tagger, zeros


def parts(module: nn.Module) -> tuple[Optimizer, Optimizer]:
    params = list(module.parameters())
    return (
        Muon([p for p in params if p.ndim == 2], lr=0.02),
        Adam([p for p in params if p.ndim != 2], lr=0.05),
    )


def trained(module: Tagger, optimizer: Optimizer, steps: int = 20, **options: Any) -> list[Tensor]:
    segment = make_train_segment(module, mean_cross_entropy, backend="eager")
    params = dict(module.named_parameters())
    run = train_stream(
        segment, params, zeros(), stream(steps), optimizer, k1=4, progress=False, **options
    )
    return [update.loss for update in run]


class Shards(SGD):
    """As ZeroRedundancyOptimizer."""

    rank = 0

    def consolidate_state_dict(self, to: int = 0) -> None: ...


def test_it_steps_all() -> None:
    module, other = tagger(), tagger()
    optimizer, (muon, adam) = ChainedOptimizer(*parts(module)), parts(other)
    schedule = ExponentialLR(optimizer, 0.5)
    trained(module, optimizer, scheduler=schedule)

    class Both(SGD):
        def step(self, closure: Any = None) -> None:
            muon.step()
            adam.step()
            for group in (*muon.param_groups, *adam.param_groups):
                group["lr"] *= 0.5

    x, y = stream(20)
    both = Both(other.parameters(), lr=1.0)
    honest_updates(other, zeros(), x, y, both, k1=4, k2=4, on_update=lambda loss, state: None)
    torch.testing.assert_close(module.state_dict(), other.state_dict())


def test_its_state_goes_on() -> None:
    """In the optimizers themselves, whose schedulers see what was loaded."""
    module = tagger()
    optimizer = ChainedOptimizer(*parts(module))
    optimizer.param_groups[1]["lr"] = 0.25
    trained(module, optimizer)
    other = copy.deepcopy(module)
    resumed = ChainedOptimizer(*parts(other))
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert resumed.param_groups[1] is resumed.optimizers[1].param_groups[0]
    assert resumed.param_groups[1]["lr"] == 0.25
    assert torch.equal(
        torch.stack(trained(module, optimizer)), torch.stack(trained(other, resumed))
    )


def test_a_copy() -> None:
    module = tagger()
    module, optimizer = copy.deepcopy((module, ChainedOptimizer(*parts(module))))
    before = [p.detach().clone() for p in module.parameters()]
    trained(module, optimizer)
    assert all(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_a_closure() -> None:
    module = tagger()
    optimizer = ChainedOptimizer(*parts(module))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p.square().sum() for p in module.parameters()), torch.zeros(()))
        loss.backward()
        return loss.detach()

    with torch.no_grad():
        losses = [optimizer.step(closure) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_what_is_refused() -> None:
    module = tagger()
    first, second = parts(module)
    with pytest.raises(TypeError, match=r"optimizers\[1\]: expected a torch.optim.Opt.* found str"):
        ChainedOptimizer(first, "adam")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizers\[0\]: .* found Shards"):
        ChainedOptimizer(Shards(module.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"optimizers\[0\]: .* once in a step, found LBFGS"):
        ChainedOptimizer(LBFGS(module.parameters()))
    with pytest.raises(ValueError, match="parameters appear in more than one parameter group"):
        ChainedOptimizer(first, SGD(module.parameters(), lr=0.1))
    optimizer = ChainedOptimizer(first, second)
    with pytest.raises(ValueError, match="param_group: it is not known which of the optimizers"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    for state in (first.state_dict(), {"optimizers": [first.state_dict()]}):
        with pytest.raises(ValueError, match="state_dict: expected the states of 2 optimizers, fo"):
            optimizer.load_state_dict(state)
