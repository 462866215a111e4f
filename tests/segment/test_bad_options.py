"""Flags, devices, losses and in_dims that do not fit: an error names them and the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, reference_segment

from ..cells import problem
from ..cells.problems import B, D, H, cross_entropy, mse, per_row
from .spoiled_calls import K, arguments, call, dict_step, refused

Tree = Any


# -- reset and mask -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reset", "mask"])
def test_rows(name: str) -> None:
    def wrong(kind: type[Exception], words: str, rows: Any) -> None:
        refused(kind, f"{name}: {words}", **{name: rows})

    wrong(
        TypeError, r"expected a bool tensor \[K\] or \[K, B\], found torch.float32", torch.ones(K)
    )
    wrong(TypeError, r"expected a bool tensor.*found list", [True] * K)
    wrong(ValueError, r"has 4 steps, but x has 5", torch.ones(K - 1).bool())
    swapped = rf"has 3 steps on axis 0, but x has 5. Its other axis has: pass {name}.T."
    wrong(ValueError, swapped, torch.ones(B, K).bool())
    wrong(
        ValueError,
        r"expected \[K\] or \[K, B\], found shape \[5, 3, 1\]",
        torch.ones(K, B, 1).bool(),
    )
    wrong(ValueError, r"expected \[K\] or \[K, B\], found shape \[\]", torch.tensor(True))
    words = r"has 2 rows, but state\['h'\] of shape \[3, 7\] has 3 on axis 0"
    wrong(ValueError, words, torch.ones(K, 2).bool())


def test_rows_of_a_state_that_has_none() -> None:
    given = problem("schedule_scalar")
    segment = make_train_segment(given.step, given.loss, backend="eager")
    with pytest.raises(ValueError, match=r"reset: has 3 rows, but state\[1\] of shape \[\]"):
        segment(*given.data(K), reset=torch.ones(K, B).bool())


def test_mask_of_a_scalar_loss() -> None:
    words = r"mask: a scalar loss cannot be masked.*\[K\] or \[K, B\]"
    refused(ValueError, words, dict_step, mse, mask=torch.ones(K).bool())


# -- devices, loss, backend ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["params", "x", "y"])
def test_devices_that_differ(name: str) -> None:
    given = arguments()
    moved = {"w": given["params"]["w"], "u": given["params"]["u"].to("meta")}
    moved = moved if name == "params" else given[name].to("meta")
    words = {
        "params": r"params\['u'\]: is on meta, but x is on cpu.*one device",
        "x": r"params\['w'\]: is on cpu, but x is on meta.*one device",
        "y": r"y: is on meta, but x is on cpu.*one device",
    }[name]
    refused(ValueError, words, **{name: moved})


def test_a_loss_that_is_a_class() -> None:
    words = r"loss: expected a function loss\(out, y\), found the class MSELoss\. .* as MSELoss\(\."
    with pytest.raises(TypeError, match=words):
        make_train_segment(dict_step, nn.MSELoss)


def test_loss_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"loss: expected a function loss\(out, y\), found str"):
        make_train_segment(dict_step, "mse", backend="eager")
    refused(
        TypeError, "loss: expected .* to return a tensor, found float", dict_step, lambda o, y: 1.0
    )
    words = r"loss: expected .* a tensor, found float, which .* without float\(\) or \.item\(\)"
    refused(TypeError, words, dict_step, lambda out, y: (out - y).square().mean().item())
    words = r"loss: expected a scalar, or .* found shape \[.*3, 7\]"
    refused(ValueError, words, dict_step, lambda out, y: (out - y).square())


@pytest.mark.parametrize("rows", [K, K + 1])
def test_a_loss_with_rows_before_steps(rows: int) -> None:
    """With as many rows as steps, its shape is that of the mask all the same."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t @ params["w"] + h)
        return h, h

    segment = make_train_segment(step, lambda out, y: (out - y).square().mean(-1).T)
    given = {"w": torch.ones(D, H)}, torch.zeros(rows, H), torch.ones(K, rows, D)
    mask = torch.ones(K, rows, dtype=torch.bool)
    words = r"loss: loss\(out, y\) has shape .* but mask has "
    words += (
        r".* with 5, as many as another axis of out has, the shapes fit by"
        if rows == K
        else r"\[5, 6\]"
    )
    with pytest.raises(ValueError, match=words):
        segment(*given, torch.ones(K, rows, H), mask=mask)


def test_loss_and_y_that_do_not_fit() -> None:
    with pytest.raises(Exception, match=r".") as caught:
        call(dict_step, cross_entropy)
    told = "".join(getattr(caught.value, "__notes__", []))
    assert "while loss cross_entropy was traced" in told
    assert "It was given out" in told


def test_recompute_that_is_no_bool() -> None:
    with pytest.raises(TypeError, match="recompute: expected True or False, found 'no'"):
        make_train_segment(dict_step, mse, recompute="no")  # type: ignore[arg-type]


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"backend: expected one of auto, eager, .*found 'cuda'"):
        make_train_segment(dict_step, mse, backend="cuda")


@pytest.mark.parametrize(
    "wrong, kind, words",
    [
        (0, TypeError, r"in_dims: expected \(None, state, x, y\).*found 0"),
        ((None, 0, 0), TypeError, r"in_dims: expected \(None, state, x, y\)"),
        ((0, 0, 0, 0), ValueError, r"in_dims: the parameters are shared.*torch.func.vmap"),
        ((None, 0, None, 0), ValueError, r"in_dims: x must have a batch axis"),
        ((None, 0, "a", 0), TypeError, r"in_dims: expected an axis for x, .*found 'a'"),
        ((None, 0, -2, 0), ValueError, r"in_dims: expected an axis of x counted from the front"),
        ((None, (0, 0), 0, 0), TypeError, r"in_dims: expected an axis for state, .*\(0, 0\)"),
    ],
)
def test_in_dims(wrong: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make_train_segment(dict_step, mse, backend="eager", in_dims=wrong)


@pytest.mark.parametrize(("name", "i"), [("state", 1), ("x", 2), ("y", 3)])
def test_in_dims_of_an_axis_that_is_not_there(name: str, i: int) -> None:
    given = problem("elman_one_sequence")
    dims = [None, 0, 0, 0]
    dims[i] = 5
    segment = make_train_segment(given.step, given.loss, backend="eager", in_dims=tuple(dims))  # type: ignore[arg-type]
    x, y, h = (torch.zeros(shape).double() for shape in ((3, K, D), (3, K, 4), (3, H)))
    with pytest.raises(
        ValueError, match=rf"{name}: has shape .* but in_dims names axis 5 of {name}"
    ):
        segment(given.params, h, x, y)


@pytest.mark.parametrize("shape", [(1,), (1, B), (B, K)])
def test_flags_beside_a_learned_start(shape: tuple[int, ...]) -> None:
    """With ``state=None`` a start that is computed is put in by a reset, which must not expand."""
    segment = make_train_segment(
        dict_step, per_row, backend="eager", initial_state=lambda params: {"h": params["w"][:B, :H]}
    )
    given = arguments() | {"state": None}
    for name in ("reset", "mask"):
        with pytest.raises(ValueError, match=rf"{name}: has {shape[0]} steps( on axis 0)?, but x"):
            segment(**given, **{name: torch.ones(shape, dtype=torch.bool)})


def test_in_dims_of_batches_that_differ() -> None:
    given = problem("elman_one_sequence")
    segment = make_train_segment(given.step, given.loss, backend="eager", in_dims=(None, 0, 0, 0))
    x, y = torch.zeros(4, K, D).double(), torch.zeros(4, K, 4).double()
    with pytest.raises(ValueError, match=r"state: .*3.*x.*4"):
        segment(given.params, torch.zeros(3, H).double(), x, y)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((), r"reset: expected \[K\] or \[K, B\], found shape \[\]"),
        ((4, K, 1, 1), r"reset: expected \[K\] or \[K, B\], found shape \[4, 5, 1, 1\]"),
        ((1, K), r"reset: has 1 sequences on axis 0, but x has 3"),
        ((4, K), r"reset: has 4 sequences on axis 0, but x has 3"),
        ((3, K + 1), r"reset: has 6 steps on axis 1, but x has 5\.$"),
    ],
)
def test_in_dims_with_flags_of_other_shapes(shape: tuple[int, ...], words: str) -> None:
    given = problem("elman_one_sequence")
    segment = make_train_segment(given.step, given.loss, backend="eager", in_dims=(None, 0, 0, 0))
    x, y = torch.zeros(3, K, D).double(), torch.zeros(3, K, 4).double()
    with pytest.raises(ValueError, match=words):
        segment(given.params, torch.zeros(3, H).double(), x, y, reset=torch.zeros(shape).bool())


def test_in_dims_of_an_axis_that_out_does_not_have() -> None:
    def step(params: Any, x_t: Tensor, total: Tensor) -> Any:
        total = params["decay"] * total + x_t.sum()
        return total, total

    segment = make_train_segment(
        step, lambda out, y: out.square(), backend="eager", in_dims=(None, 0, 2, None)
    )
    with pytest.raises(ValueError, match=r"out: has shape \[\] at each of 5 steps of 3 sequences"):
        segment({"decay": torch.tensor(0.5)}, torch.zeros(3), torch.zeros(K, D, 3), None)


def test_a_number_at_each_step_where_time_is_on_axis_1() -> None:
    """Its axis is that of time, which x has behind the rows."""
    cell = nn.GRUCell(D, H)

    def step(params: Any, x_t: Tensor, h: Tensor) -> Any:
        h = torch.func.functional_call(cell, params, (x_t, h))
        return {"h": h, "size": h.norm()}, h

    arguments = dict(cell.named_parameters()), torch.zeros(B, H), torch.zeros(B, K, D), None
    words = "out: a part of it is a single number at each step, so that time cannot be on axis 1"
    segment = make_train_segment(step, lambda out, y: out["h"].mean(), backend="eager", time_dim=1)
    with pytest.raises(ValueError, match=words):
        segment(*arguments)
    with pytest.raises(ValueError, match=words):
        reference_segment(step, lambda out, y: out["h"].mean(), *arguments, time_dim=1)
