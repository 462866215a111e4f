"""The oracle itself, against a plainer loop and against what the contract says in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import as_step, make_train_segment, reference_segment

from ..cells import CELLS, NOT_BFLOAT16, problem
from ..cells.problems import OUT, B, D, Draw, H, mse, per_row
from ..oracle import assert_close, assert_same_structure, reference, unchanged

K = 6
Tree = Any


def lstm_weights(draw: Draw) -> dict[str, Tensor]:
    shapes = {"w": (4 * H, D), "u": (4 * H, H), "b": (4 * H,), "v": (OUT, H)}
    return {name: draw(*shape) for name, shape in shapes.items()}


def lstm_step(p: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
    h, c = state
    i, f, g, o = (x_t @ p["w"].T + h @ p["u"].T + p["b"]).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h @ p["v"].T, (h, c)


def test_a_hand_written_training_loop() -> None:
    """Two segments of an LSTM by hand: backward(), .grad, detach(), nothing of ftbptt."""
    draw = Draw(0)
    weights = lstm_weights(draw)
    x, y = draw(2 * K, B, D), draw(2 * K, B, OUT)
    start = draw(B, H), draw(B, H)

    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    h, c = start
    for first in (0, K):
        for w in leaves.values():
            w.grad = None
        outs = []
        for t in range(first, first + K):
            gates = x[t] @ leaves["w"].T + h @ leaves["u"].T + leaves["b"]
            i, f, g, o = (
                gates[:, :H],
                gates[:, H : 2 * H],
                gates[:, 2 * H : 3 * H],
                gates[:, 3 * H :],
            )
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outs.append(h @ leaves["v"].T)
        out = torch.stack(outs)
        value = ((out - y[first : first + K]) ** 2).mean()
        value.backward()
        h, c = h.detach(), c.detach()

    state: Tree = start
    for first in (0, K):
        now = slice(first, first + K)
        found = reference_segment(lstm_step, mse, weights, state, x[now], y[now])
        state = found.state
    grads = {name: w.grad for name, w in leaves.items()}
    assert_close(tuple(found), (grads, (h, c), value.detach(), out.detach()))


def test_module_and_function_agree() -> None:
    cell, draw = nn.LSTMCell(D, H).double(), Draw(1)
    x, y, state = draw(K, B, D), draw(K, B, H), (draw(B, H), draw(B, H))
    own = {
        "w": cell.weight_ih, "u": cell.weight_hh, "b": cell.bias_ih + cell.bias_hh,
        "v": torch.eye(H).double(),
    }  # fmt: skip
    one = reference_segment(cell, mse, dict(cell.named_parameters()), state, x, y)
    two = reference_segment(lstm_step, mse, own, state, x, y)
    assert_close((one.state, one.loss, one.out), (two.state, two.loss, two.out))
    assert_close(one.grads["weight_ih"], two.grads["w"])
    assert_close(one.grads["bias_hh"], two.grads["b"])


def test_a_layer_is_what_torch_computes() -> None:
    given = problem("lstm_no_bias")
    params, state, x, y = given.data(K)
    out, after = given.step(x, state)
    value = (out - y).square().mean()
    grads = torch.autograd.grad(value, list(params.values()))
    found = reference(given, K)
    assert_close(found.out, out.detach())
    assert_close(found.state, tuple(leaf.detach() for leaf in after))
    assert_close(list(found.grads.values()), list(grads))


def test_nothing_given_is_changed() -> None:
    for name in ("in_place_temporaries", "nested_everything", "aliases"):
        given = problem(name)
        data = given.data(K)
        with unchanged(*data):
            found = reference_segment(given.step, given.loss, *data)
        assert found.loss.isfinite()


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_of_the_table_is_a_fair_question(name: str) -> None:
    """Finite, with a gradient that is not trivial, and of the same form in lower precision."""
    given = problem(name)
    found = reference(given, 3)
    assert found.loss.isfinite()
    assert 0.01 < found.loss < 100
    graded = [g for g in torch.utils._pytree.tree_leaves(found.grads) if g.is_floating_point()]
    assert max(g.abs().max() for g in graded) > 1e-3
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16 and name in NOT_BFLOAT16:
            continue
        low = problem(name, dtype)
        lower = reference(low, 3)
        assert lower.loss.dtype == dtype
        assert_same_structure(lower.grads, low.params)
        assert_same_structure(lower.state, low.state)


def test_data_of_fewer_steps_is_a_prefix() -> None:
    given = problem("gru_batch_first")
    assert torch.equal(given.x(3), given.x(7)[:, :3])


# -- reset --------------------------------------------------------------------------------------


def test_reset_of_all_rows_is_two_segments() -> None:
    given = problem("lstm_readout")
    params, state, x, y = given.data(K)
    zeros = tuple(map(torch.zeros_like, state))
    reset = torch.tensor([False, False, True, False, False, False])
    whole = reference(given, K, reset=reset)
    one = reference_segment(given.step, given.loss, params, state, x[:2], y[:2])
    two = reference_segment(given.step, given.loss, params, zeros, x[2:], y[2:])
    assert_close(whole.out, torch.cat([one.out, two.out]))
    assert_close(whole.state, two.state)
    assert_close(whole.loss, (2 * one.loss + 4 * two.loss) / 6)
    joined = {n: (2 * one.grads[n] + 4 * two.grads[n]) / 6 for n in params}
    assert_close(whole.grads, joined)


def test_rows_reset_on_their_own() -> None:
    given = problem("lstm")  # state [L, B, H]: the rows are on axis 1
    params, state, x, y = given.data(K)
    reset = torch.zeros(K, B, dtype=torch.bool)
    reset[3, 1] = reset[0, 2] = True
    found = reference(given, K, reset=reset)
    for row in range(B):
        flags = reset[:, row]
        alone = reference_segment(
            given.step, given.loss, params,
            tuple(s[:, row : row + 1] for s in state), x[:, row : row + 1], y[:, row : row + 1],
            reset=flags,
        )  # fmt: skip
        assert_close(found.out[:, row], alone.out[:, 0])
        assert_close(tuple(s[:, row : row + 1] for s in found.state), alone.state)
    without = reference(given, K)
    assert_close(found.out[:, 0], without.out[:, 0])
    assert not torch.allclose(found.out[3:, 1], without.out[3:, 1])


def test_no_gradient_crosses_a_reset() -> None:
    def step(params: Tensor, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h + params * x_t
        return h, h

    x, y = torch.arange(1.0, 5.0), torch.zeros(4)

    def last(out: Tensor, y: Tensor) -> Tensor:
        return out[-1]

    reset = torch.tensor([False, False, True, False])
    found = reference_segment(step, last, torch.tensor(2.0), torch.tensor(9.0), x, y, reset=reset)
    assert found.loss == 2 * (3 + 4)
    assert found.grads == 3 + 4


def test_reset_to_a_given_and_to_a_learned_state() -> None:
    given, draw = problem("elman"), Draw(5)
    params, state, x, y = given.data(K)
    start = draw(B, H)
    reset = torch.tensor([True] + [False] * (K - 1))
    found = reference(given, K, reset=reset, initial_state=start)
    assert_close(found, reference_segment(given.step, mse, params, start, x, y))

    def learned(params: Tree) -> Tensor:
        return params["start"].tanh().expand(B, H)

    own = params | {"start": draw(H)}
    found = reference_segment(given.step, mse, own, state, x, y, reset=reset, initial_state=learned)
    leaf = own["start"].clone().requires_grad_()
    outs, h = [], leaf.tanh().expand(B, H)
    for t in range(K):
        out, h = given.step(params, x[t], h)
        outs.append(out)
    (grad,) = torch.autograd.grad(mse(torch.stack(outs), y), leaf)
    assert_close(found.grads["start"], grad)
    assert grad.abs().max() > 1e-4


# -- mask ---------------------------------------------------------------------------------------


def test_mask_leaves_out_steps() -> None:
    given = problem("gru_cell")
    params, state, x, y = given.data(K)
    mask = torch.tensor([True, False, True, True, False, False])
    found = reference(given, K, mask=mask)
    expected = reference_segment(given.step, given.loss, params, state, x[mask], y[mask])
    assert_close(found.out[mask], expected.out)
    assert_close((found.grads, found.state, found.loss), expected[:3])


def test_ragged_rows() -> None:
    """Padding, as users have it: each row is as long as its own sequence."""
    given, lengths = problem("lstm_cell"), (6, 2, 4)
    params, state, x, y = given.data(K)
    mask = torch.arange(K).unsqueeze(1) < torch.tensor(lengths)
    found = reference(given, K, mask=mask)
    total: Any = 0
    grads = {name: torch.zeros_like(p) for name, p in params.items()}
    for row, length in enumerate(lengths):
        alone = reference_segment(
            given.step, given.loss, params, tuple(s[row] for s in state),
            x[:length, row], y[:length, row],
        )  # fmt: skip
        assert_close(tuple(s[row] for s in found.state), alone.state)
        total = total + length * alone.loss
        grads = {name: grads[name] + length * alone.grads[name] for name in grads}
    assert_close(found.loss, total / sum(lengths))
    assert_close(found.grads, {name: g / sum(lengths) for name, g in grads.items()})


def test_nothing_valid_gives_zero() -> None:
    given = problem("gru_cell")
    found = reference(given, K, mask=torch.zeros(K, B, dtype=torch.bool))
    assert found.loss == 0
    assert all(not grad.any() for grad in found.grads.values())
    assert_close(found.state, given.state)


def test_reset_counts_in_an_invalid_step() -> None:
    """Reset comes first: a masked step leaves the state as the reset made it."""
    given = problem("gru_cell")
    flags = torch.tensor([False] * (K - 1) + [True])
    found = reference(given, K, reset=flags, mask=~flags)
    assert not found.state.any()


# -- time and parameters ------------------------------------------------------------------------


def test_time_dim() -> None:
    given = problem("gru_cell")
    params, state, x, y = given.data(K)
    reset = torch.rand(K, B) < 0.3
    mask = torch.rand(K, B) < 0.7
    first = reference(given, K, reset=reset, mask=mask)
    second = reference_segment(
        given.step, given.loss, params, state, x.transpose(0, 1), y.transpose(0, 1),
        time_dim=1, reset=reset.T, mask=mask.T,
    )  # fmt: skip
    assert_close(second._replace(out=second.out.transpose(0, 1)), first)


def test_no_state_and_no_y() -> None:
    """Both are as in a segment: zeros, or what is learned, through which the gradient flows."""
    given = problem("gru_cell")
    params, state, x, _ = given.data(K)

    def loss(out: Tree, y: Tree) -> torch.Tensor:
        assert y is None
        return out.square().mean()

    found = reference_segment(given.step, loss, params, None, x.transpose(0, 1), None, time_dim=1)
    zeros = reference_segment(given.step, loss, params, torch.zeros_like(state), x, None)
    assert_close(found._replace(out=found.out.transpose(0, 1)), zeros)
    learned = {**params, "start": state}

    def start(params: Tree) -> Tree:
        return params["start"]

    def step(params: Tree, x_t: Tree, h: Tree) -> Tree:
        own = {name: leaf for name, leaf in params.items() if name != "start"}
        return as_step(given.step).apply(own, {}, x_t, h)

    segment = make_train_segment(step, loss, initial_state=start, backend="eager")
    found = reference_segment(step, loss, learned, None, x, None, initial_state=start)
    assert found.grads["start"].any()
    assert_close(segment(learned, None, x, None), found)
    with pytest.raises(TypeError, match="state: None is known only for torch's own cells"):
        reference_segment(step, loss, params, None, x, None)


def test_bad_numbers() -> None:
    given = problem("gru_cell")
    for wrong in ("1", -1, 2, True, 1.0):
        with pytest.raises(ValueError, match="time_dim: expected 0 or 1, or None"):
            reference(given, K, time_dim=wrong)
        with pytest.raises(ValueError, match="time_dim: expected 0 or 1, or None"):
            make_train_segment(given.step, given.loss, time_dim=wrong)
    empty = (given.params, given.state, torch.zeros(0, B, D), torch.zeros(0, B, H))
    with pytest.raises(ValueError, match="x: has 0 steps; a segment needs at least one"):
        reference_segment(given.step, given.loss, *empty)
    with pytest.raises(TypeError, match=r"context: expected a whole number, found 1\.5"):
        reference(given, K, context=1.5)


def test_batch_first_has_time_on_axis_1() -> None:
    given, plain = problem("gru_batch_first"), problem("gru_batch_first").step
    params, state, x, y = given.data(K)
    found = reference_segment(plain, given.loss, params, state, x, y)
    assert found.out.shape == (B, K, H)
    assert_close(found.out, plain(x, state)[0].detach())


def test_unused_and_integer_parameters() -> None:
    found = reference(problem("unused_parameters"), K)
    assert not found.grads["unused"].any()
    assert found.grads["unused"].shape == (2, 3)
    assert found.grads["order"].dtype == torch.int64
    assert not found.grads["order"].any()
    assert found.grads["w"].any()


def test_a_loss_without_gradient() -> None:
    """The loss does not read out: all gradients are zero, nothing fails."""
    given = problem("elman")
    params, state, x, y = given.data(K)
    found = reference_segment(given.step, lambda out, y: y.square().mean(), params, state, x, y)
    assert all(not grad.any() for grad in found.grads.values())


def test_grad_mode_and_requires_grad_do_not_matter() -> None:
    given = problem("gru_cell")
    params, state, x, y = given.data(K)
    expected = reference(given, K)
    plain = {name: p.detach() for name, p in params.items()}
    attached = state.clone().requires_grad_() * 1
    assert_close(reference_segment(given.step, given.loss, plain, attached, x, y), expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():  # and on tensors of that mode
            copies = {name: p.clone() for name, p in params.items()}, *map(torch.clone, (x, y))
            arguments = copies[0], state.clone(), *copies[1:]
            assert_close(reference_segment(given.step, given.loss, *arguments), expected)
        assert_close(reference_segment(given.step, given.loss, *arguments), expected)


def test_out_is_per_row_of_the_loss() -> None:
    """A sanity check of the table's own loss helpers."""
    out, y = torch.ones(K, B, 2), torch.zeros(K, B, 2)
    assert per_row(out, y).shape == (K, B)
    assert as_step(nn.GRUCell(D, H)).name == "GRUCell"
