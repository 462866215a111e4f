"""``F.embedding_bag`` in a step, compared with the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import B, Draw, H, mse
from ..oracle import assert_close

Tree = Any
K = 4


def checked(bag: Callable[[Tree, Tensor, Tensor], Tensor], x: Tree, dense: bool = False) -> None:
    """``bag(x_t, table, h)``; ``dense``: the loop's gradient of the table is sparse."""

    def step(params: Tree, x_t: Tree, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(bag(x_t, params["table"], h) + h @ params["w"])
        return h, h

    draw = Draw(0)
    params = {"w": draw(H, H), "table": draw(5, H)}
    given = (params, draw(B, H), x, draw.sequence(B, H)(K))
    expected = reference_segment(step, mse, *given)
    if dense:
        expected.grads["table"] = expected.grads["table"].to_dense()
    assert_close(make_train_segment(step, mse, backend="eager")(*given), expected)


def tokens(*shape: int) -> Tensor:
    return Draw(0).tokens(5, *shape)(K)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2, -3])
def test_bags_of_equal_lengths(mode: str, padding: int | None) -> None:
    x = tokens(B, 3)
    x[:, 0] = 2  # a bag of nothing but padding
    checked(lambda x_t, w, h: F.embedding_bag(x_t, w, mode=mode, padding_idx=padding), x)


def test_the_largest_of_equal_ones() -> None:
    """One of them gets the gradient."""

    def bag(x_t: Tensor, table: Tensor, h: Tensor) -> Tensor:
        rounded = table + (table.round() - table).detach()
        return F.embedding_bag(x_t, rounded, mode="max")

    checked(bag, tokens(B, 3))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_padding_without_a_value(mode: str) -> None:
    def bag(x_t: Tensor, table: Tensor, h: Tensor) -> Tensor:
        is_padding = (torch.arange(5) == 2).unsqueeze(1)
        table = table.masked_fill(is_padding, torch.nan)
        return F.embedding_bag(x_t, table, mode=mode, padding_idx=2)

    checked(bag, tokens(B, 3))


@pytest.mark.parametrize("has_end", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_unequal_lengths(mode: str, padding: int | None, has_end: bool) -> None:
    """Other ones at each step, some of them empty."""

    def bag(x_t: Tree, table: Tensor, h: Tensor) -> Tensor:
        return F.embedding_bag(
            x_t["tokens"], table, x_t["offsets"], mode=mode, padding_idx=padding,
            include_last_offset=has_end,
        )  # fmt: skip

    ends = Draw(1).tokens(8, B)(K).sort(1).values
    offsets = torch.cat([ends.new_zeros(K, 1), ends if has_end else ends[:, 1:]], 1)
    if has_end:
        offsets[:, -1] = 7
    checked(bag, {"tokens": tokens(7), "offsets": offsets})


def test_weighted_bags() -> None:
    indices = torch.tensor([[0, 1, 2, 3, 4, 1, 0]] * B)

    def bag(x_t: Tensor, table: Tensor, h: Tensor) -> Tensor:
        return F.embedding_bag(indices, table, mode="sum", per_sample_weights=x_t)

    checked(bag, Draw(0).sequence(B, 7)(K))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("embed", [F.embedding, F.embedding_bag])
def test_vectors_of_a_largest_norm(embed: Callable[..., Tensor]) -> None:
    """They are made shorter unseen by autograd: the gradient of a computed table stays."""

    def bag(x_t: Tensor, table: Tensor, h: Tensor) -> Tensor:
        found = embed(x_t, 2 * table, max_norm=1.0, norm_type=1.0)
        return found if embed is F.embedding_bag else found.sum(1)

    checked(bag, tokens(B, 3))


def test_a_parameter_of_a_largest_norm() -> None:
    """It would be written to."""
    module = torch.nn.Embedding(5, H, max_norm=1.0)
    module.forward = lambda x_t, h: (h, h + torch.nn.Embedding.forward(module, x_t))
    segment = make_train_segment(module, lambda out, y: out.sum(), backend="eager")
    before = module.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"changes params\['weight'\] in place"):
        segment(dict(module.named_parameters()), torch.zeros(B, H), tokens(B), None)
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("weighted", [False, True])
def test_sparse_gradients_of_bags_are_dense(weighted: bool) -> None:
    def bag(x_t: Tensor, table: Tensor, h: Tensor) -> Tensor:
        weights = h[:, :3] if weighted else None
        return F.embedding_bag(x_t, table, mode="sum", per_sample_weights=weights, sparse=True)

    checked(bag, tokens(B, 3), dense=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offsets": torch.arange(3)}, "offsets has to be None"),
        ({"mode": "maximum"}, "mode has to be one of sum, mean or max"),
        ({"mode": "mean", "per_sample_weights": torch.ones(B, 2)}, "only supported for mode='sum'"),
        ({"mode": "sum", "scale_grad_by_freq": True}, "torch takes the counts of other tokens"),
    ],
)
def test_bags_that_are_refused(options: Any, words: str) -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        own = {name: v.to(h) if name == "per_sample_weights" else v for name, v in options.items()}
        bag = F.embedding_bag(torch.zeros(B, 2, dtype=torch.long), params["table"], **own)
        return h, torch.tanh(bag + h @ params["w"])

    draw = Draw(0)
    params = {"w": draw(H, H), "table": draw(5, H)}
    segment = make_train_segment(step, mse, backend="eager")
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=words):
        segment(params, draw(B, H), draw.sequence(B, H)(K), draw.sequence(B, H)(K))
