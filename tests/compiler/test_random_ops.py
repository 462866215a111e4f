"""Noise without a vmap rule: different numbers at each step, as in the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Binomial, Normal
from torch.func import vmap
from torch.nn.functional import gumbel_softmax

from ftbptt import make_train_segment

from ..cells import slow_but
from ..cells.problems import mse

Tree = Any
K, B, H = 6, 3, 4

NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda h: torch.empty_like(h).normal_(),
    "in place, of a value": lambda h: h.clone().normal_(2.0, 0.5),
    "of a size": lambda h: torch.normal(2.0, 0.5, h.shape),
    "means": lambda h: torch.normal(h.detach(), 0.5) - h.detach(),
    "deviations": lambda h: torch.normal(1.0, h.detach() ** 2 + 1),
    "both": lambda h: torch.normal(h.detach(), torch.ones(H)) - h.detach(),
    "distribution": lambda h: Normal(h, torch.ones_like(h)).rsample() - h,
    "uniform": lambda h: torch.empty_like(h).uniform_(2.0, 3.0),
    "integers": lambda h: torch.empty_like(h).random_(1, 1000),
    "integers below": lambda h: torch.zeros_like(h, dtype=torch.int64).random_(1000).to(h.dtype),
    "any integers": lambda h: torch.empty_like(h).random_() / 2**24,
    "exponential": lambda h: torch.empty_like(h).exponential_(2.0),
    "log normal": lambda h: torch.empty_like(h).log_normal_(0.0, 0.25),
    "cauchy": lambda h: torch.empty_like(h).cauchy_(3.0, 0.5).atan(),
    "geometric": lambda h: torch.empty_like(h, dtype=torch.int64).geometric_(1e-3).to(h.dtype),
    "gumbel": lambda h: gumbel_softmax(h.detach()),
    "one of many": lambda h: torch.multinomial(torch.ones(B, 1000), 1).to(h.dtype),
    "some of many": lambda h: torch.multinomial(torch.ones(B, 1000), 4).to(h.dtype),
    "some, repeated": lambda h: torch.multinomial(torch.ones(B, 1000), 4, True).to(h.dtype),
    "trials": lambda h: torch.empty(B, 200).bernoulli_(torch.full((200,), 0.25)),
    "rand": lambda h: torch.rand(B, H),
    "randn": lambda h: torch.randn(B, H),
}


def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tree, Tensor]:
    """All of them outside the recurrence, and one in it."""
    h = torch.tanh(x_t @ params["w"] + h) + 0.1 * h.clone().normal_()
    return {name: draw(h) for name, draw in NOISE.items()}, h


def loss(out: Tree, y: Tensor) -> Tensor:
    return mse(out["distribution"], y)


def problem() -> tuple[Tree, Tensor, Tensor, Tensor]:
    return {"w": torch.randn(H, H)}, torch.zeros(B, H), torch.randn(K, B, H), torch.zeros(K, B, H)


@pytest.mark.parametrize("backend", slow_but(["eager"], ["eager", "compile"]))
def test_noise_is_drawn_at_each_step(backend: str) -> None:
    segment = make_train_segment(step, loss, backend=backend)
    data = problem()
    one, two = segment(*data).out, segment(*data).out
    for name, noise in one.items():
        for t in range(K - 1):
            assert not torch.equal(noise[t], noise[t + 1]), name
        assert not torch.equal(noise, two[name]), name
    assert 2 <= one["uniform"].min() < one["uniform"].max() <= 3
    assert 1 <= one["integers"].min() < one["integers"].max() < 1000
    assert 0 <= one["any integers"].min() < 0.5 < one["any integers"].max() <= 1


@pytest.mark.parametrize("name", ["gumbel", "exponential", "rand", "one of many"])
def test_randomness_under_vmap(name: str) -> None:
    """As torch's vmap has it: the sequences' noise is the same, or different, or an error."""
    segment = make_train_segment(
        lambda params, x_t, h: (NOISE[name](x_t) * params["w"], h),
        lambda out, y: out.mean(),
        backend="eager",
    )
    x = torch.zeros(2, K, B, H)
    outs = {}
    for randomness in ("same", "different"):
        mapped = vmap(segment, in_dims=(None, None, 0, 0), randomness=randomness)
        outs[randomness] = mapped({"w": torch.ones(1)}, torch.zeros(()), x, torch.zeros(2, K)).out
    assert torch.equal(*outs["same"])
    assert not torch.equal(*outs["different"])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(segment, in_dims=(None, None, 0, 0))(
            {"w": torch.ones(1)}, torch.zeros(()), x, torch.zeros(2, K)
        )


def test_categories_are_drawn_by_their_probability() -> None:
    p = torch.tensor([0.0, 1.0, 3.0, 4.0])
    segment = make_train_segment(
        lambda params, x_t, h: ((torch.multinomial(p.expand(200, 4), 1) * params["w"],
                                 torch.multinomial(p, 3), torch.multinomial(p, 400, True)), h),
        lambda out, y: out[0].float().mean(), backend="eager",
    )  # fmt: skip
    one, without, repeated = segment(
        {"w": torch.ones(1)}, torch.zeros(()), torch.ones(20, 1), None
    ).out
    for drawn in (one, repeated):
        share = torch.bincount(drawn.long().flatten(), minlength=4) / drawn.numel()
        torch.testing.assert_close(share, p / p.sum(), rtol=0, atol=0.04)
    assert torch.equal(without.sort(1).values, torch.tensor([[1, 2, 3]]).expand(20, 3))


def test_moments() -> None:
    segment = make_train_segment(
        lambda params, x_t, h: ({name: draw(x_t) for name, draw in NOISE.items()}, h),
        lambda out, y: (out["means"] * y[0, 0, 0]).mean(),
        backend="eager",
    )
    x = torch.zeros(2000, B, H)
    out = segment({"w": torch.ones(1)}, torch.zeros(()), x, x).out
    for name, mean, deviation in [
        ("in place", 0, 1), ("in place, of a value", 2, 0.5), ("of a size", 2, 0.5),
        ("means", 0, 0.5), ("deviations", 1, 1), ("both", 0, 1), ("uniform", 2.5, 12**-0.5),
        ("exponential", 0.5, 0.5), ("log normal", 1.032, 0.262),
        ("trials", 0.25, 0.433),
    ]:  # fmt: skip
        assert abs(out[name].mean() - mean) < 0.05, name
        assert abs(out[name].std() - deviation) < 0.05, name


def test_trials_of_a_number_each(capfd: Any) -> None:
    """Where p changes from step to step and the count does not, torch resizes, and warns."""

    def draw(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tree, Tensor]:
        p = torch.sigmoid(x_t).detach()
        few = torch.binomial(torch.full((B, H), 20.0), p), Binomial(20, p).sample()
        return (*few, torch.empty_like(x_t).bernoulli_(p), x_t * params["w"]), h

    segment = make_train_segment(draw, lambda out, y: out[3].mean(), backend="eager")
    x = torch.zeros(2000, B, H)
    x[1000:] = 1
    *drawn, _ = segment({"w": torch.ones(1)}, torch.zeros(()), x, None).out
    for noise, count in zip(drawn, (20, 20, 1), strict=True):
        for half, p in ((noise[:1000], 0.5), (noise[1000:], 0.731)):
            assert abs(half.mean() / count - p) < 0.02
            assert abs(half.var() - count * p * (1 - p)) < 0.05 * count
            assert half.min() >= 0
            assert half.max() <= count
    assert "resized" not in capfd.readouterr().err


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bfloat16, torch.float32,
]  # fmt: skip


def test_the_largest_number_is_drawn_too() -> None:
    def draw(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tree, Tensor]:
        return [torch.empty(8000, dtype=dtype).random_() for dtype in DTYPES], h * params["w"]

    segment = make_train_segment(draw, lambda out, y: y.mean(), backend="eager")
    x = torch.zeros(10, 1)
    out = segment.evaluate({"w": torch.ones(1)}, torch.zeros(1), x, x).out
    assert [drawn.dtype for drawn in out] == DTYPES
    for drawn, largest in zip(out, [1, 255, 127, None, None, 256, None], strict=True):
        assert drawn.min() >= 0
        assert largest is None or drawn.max() == largest


def test_vmap_asks_how_noise_is_meant() -> None:
    params, *rest = problem()
    data = [leaf.expand(2, *leaf.shape) for leaf in rest]
    segment = make_train_segment(step, loss, backend="eager")
    with pytest.raises(RuntimeError, match="random operation while in randomness error mode"):
        torch.vmap(segment, in_dims=(None, 0, 0, 0))(params, *data)
    mapped = torch.vmap(segment, in_dims=(None, 0, 0, 0), randomness="different")
    for name, noise in mapped(params, *data).out.items():
        assert not torch.equal(noise[0], noise[1]), name
