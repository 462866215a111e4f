"""Tapped tensors: their values, and the gradients that the eager loop's autograd gives them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

import ftbptt
from ftbptt import TappedOutput, make_train_segment, tap

from ..cells.problems import Draw

K, B, D, H = 7, 3, 5, 4


def mse(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def lstm_equations(
    p: dict[str, Tensor], x: Tensor, state: tuple[Tensor, Tensor], seen: dict[str, list[Tensor]],
    name: str = "", of: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A step of an LSTM by hand; what is in it goes to ``seen``."""
    h, c = state
    gates = F.linear(x, p[f"{name}weight_ih{of}"], p[f"{name}bias_ih{of}"])
    gates = gates + F.linear(h, p[f"{name}weight_hh{of}"], p[f"{name}bias_hh{of}"])
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    for key, value in zip("ifgoch", (i, f, g, o, c, h), strict=True):
        own = f"{name}{of.removeprefix('_')}{'.' if of else ''}{key}"
        seen.setdefault(own, []).append(value)
    return h, c


def check_taps(found: Any, seen: dict[str, list[Tensor]], loss: Tensor) -> None:
    """Every tap has the value, and the gradient, of that tensor in the loop."""
    assert isinstance(found, TappedOutput)
    assert set(found.taps) == set(seen)
    flat = [tensor for own in seen.values() for tensor in own]
    grads = iter(torch.autograd.grad(loss, flat, retain_graph=True))
    for name, own in seen.items():
        value, grad = found.taps[name]
        torch.testing.assert_close(value, torch.stack(own), rtol=0, atol=1e-10)
        expected = torch.stack([next(grads) for _ in own])
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-10, msg=name)
        assert not value.requires_grad


def stacked_cells(backend: str, taps: Any) -> None:
    """Four LSTM cells, one above the other, untouched."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList(nn.LSTMCell(D if i == 0 else H, H) for i in range(4))

        def forward(self, x_t: Tensor, state: Any) -> Any:
            after = []
            for cell, own in zip(self.cells, state, strict=True):
                x_t, c = cell(x_t, own)
                after.append((x_t, c))
            return x_t, after

    draw = Draw(0)
    module = draw.module(Stack)
    params = dict(module.named_parameters())
    x, y = draw(K, B, D), draw(K, B, H)
    state = [(draw(B, H), draw(B, H)) for _ in range(4)]
    found = make_train_segment(module, mse, backend=backend, taps=taps)(params, state, x, y)
    seen: dict[str, list[Tensor]] = {}
    outs, own = [], list(state)
    for t in range(K):
        value = x[t]
        for i in range(4):
            value, _c = own[i] = lstm_equations(params, value, own[i], seen, f"cells.{i}.")
        outs.append(value)
    if taps is not True:
        seen = {name: seen[name] for name in taps}
    loss = mse(torch.stack(outs), y)
    check_taps(found, seen, loss)
    assert found.loss.item() == pytest.approx(loss.item(), abs=1e-12)
    plain = make_train_segment(module, mse, backend="eager")(params, state, x, y)
    for name, grad in plain.grads.items():
        torch.testing.assert_close(found.grads[name], grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "taps", [True, ["cells.3.h", "cells.0.c", "cells.2.f"]], ids=["all", "some"]
)
def test_a_stack_of_cells(taps: Any) -> None:
    stacked_cells("eager", taps)


@pytest.mark.slow
def test_a_stack_of_cells_compiled() -> None:
    stacked_cells("fused", ["cells.3.h", "cells.0.c", "cells.2.f"])


@pytest.mark.parametrize("batch_first", [False, True])
def test_layers(batch_first: bool) -> None:
    draw = Draw(1)
    layer = draw.module(lambda: nn.LSTM(D, H, 2, batch_first=batch_first))
    params = dict(layer.named_parameters())
    x, y = draw(K, B, D), draw(K, B, H)
    h, c = draw(2, B, H), draw(2, B, H)
    seen: dict[str, list[Tensor]] = {}
    states, outs = [(h[i], c[i]) for i in range(2)], []
    for t in range(K):
        value = x[t]
        for i in range(2):
            value, _ = states[i] = lstm_equations(params, value, states[i], seen, of=f"_l{i}")
        outs.append(value)
    loss = mse(torch.stack(outs), y)
    first = (lambda leaf: leaf.transpose(0, 1)) if batch_first else (lambda leaf: leaf)
    found: Any = make_train_segment(layer, mse, backend="eager", taps=True)(
        params, (h, c), first(x), first(y)
    )
    taps = {name: ftbptt.Tap(*map(first, own)) for name, own in found.taps.items()}
    check_taps(found._replace(taps=taps), seen, loss)


def test_gru_and_plain_cells() -> None:
    draw = Draw(2)
    for cell, names in ((nn.GRUCell, "rznh"), (nn.RNNCell, "ah")):
        module = draw.module(lambda cell=cell: cell(D, H))
        params = dict(module.named_parameters())
        x, y, h = draw(K, B, D), draw(K, B, H), draw(B, H)
        found: Any = make_train_segment(module, mse, backend="eager", taps=True)(params, h, x, y)
        assert list(found.taps) == list(names)
        own, seen = h, {"h": []}
        for t in range(K):
            own = functional_call(module, params, (x[t], own))
            seen["h"].append(own)
        loss = mse(torch.stack(seen["h"]), y)
        check_taps(found._replace(taps={"h": found.taps["h"]}), seen, loss)


def marked(params: Any, x_t: Tensor, h: Tensor) -> Any:
    a = tap("a", x_t @ params["w"] + h @ params["u"])
    h = tap("h", torch.tanh(a))
    return tap("out", h @ params["v"]), h


def problem(draw: Draw, *batch: int) -> Any:
    params = {"w": draw(D, H), "u": draw(H, H), "v": draw(H, D)}
    return params, draw(*batch, H), draw(K, *batch, D), draw(K, *batch, D)


def by_hand(params: Any, h: Tensor, x: Tensor, y: Tensor) -> tuple[dict[str, list[Tensor]], Tensor]:
    seen: dict[str, list[Tensor]] = {"a": [], "h": [], "out": []}
    params = {name: p.clone().requires_grad_() for name, p in params.items()}
    for t in range(len(x)):
        a = x[t] @ params["w"] + h @ params["u"]
        h = torch.tanh(a)
        for name, value in zip(seen, (a, h, h @ params["v"]), strict=True):
            seen[name].append(value)
    return seen, mse(torch.stack(seen["out"]), y)


def test_an_encoder_in_front() -> None:
    """The gradient by x, by a tap at the start of the step: as if all were one graph."""
    torch.manual_seed(0)
    encoder, cell = nn.Linear(3, D).double(), nn.GRUCell(D, H).double()
    raw, y = torch.randn(K, B, 3).double(), torch.randn(K, B, H).double()

    def step(params: Any, x_t: Tensor, h: Tensor) -> Any:
        h = functional_call(cell, params, (tap("x", x_t), h))
        return h, h

    segment = make_train_segment(step, mse, backend="eager", taps=["x"])
    encoded, h = encoder(raw), torch.zeros(B, H).double()
    result = segment(dict(cell.named_parameters()), h, encoded, y)
    encoded.backward(result.taps["x"].grad)
    found = [p.grad.clone() for p in encoder.parameters() if p.grad is not None]
    encoder.zero_grad()
    outs = []
    for x_t in encoder(raw):
        h = cell(x_t, h)
        outs.append(h)
    mse(torch.stack(outs), y).backward()
    torch.testing.assert_close(found, [p.grad for p in encoder.parameters()])


def test_marks_of_the_step() -> None:
    arguments = problem(Draw(3), B)
    found: Any = make_train_segment(marked, mse, backend="eager", taps=True)(*arguments)
    check_taps(found, *by_hand(*arguments))
    plain = make_train_segment(marked, mse, backend="eager")(*arguments)
    assert plain.loss == found.loss
    assert len(plain) == 4


def test_compiled_parts_are_traced_as_they_are_written() -> None:
    compiled = torch.compile(marked, backend=lambda *_: pytest.fail("compiled"))
    arguments = problem(Draw(3), B)
    found = make_train_segment(compiled, mse, backend="eager", taps=True)(*arguments)
    check_taps(found, *by_hand(*arguments))


def test_a_mark_costs_nothing_unless_asked_for() -> None:
    """The plan of a step with marks is that of the same step without."""

    def unmarked(params: Any, x_t: Tensor, h: Tensor) -> Any:
        h = torch.tanh(x_t @ params["w"] + h @ params["u"])
        return h @ params["v"], h

    arguments = problem(Draw(3), B)
    plans = [
        str(make_train_segment(step, mse).explain(*arguments)).splitlines()[1:]
        for step in (marked, unmarked)
    ]
    assert plans[0] == plans[1]


def test_a_tap_that_comes_and_goes() -> None:
    is_tapped = False

    def step(params: Any, x_t: Any, h: Any) -> Any:
        h = ftbptt.tap("h", torch.tanh(x_t @ params["w"] + h @ params["u"]))
        return (ftbptt.tap("out", 2 * h) if is_tapped else 2 * h), h

    draw = Draw(8)
    params = {"w": draw(D, H), "u": draw(H, H)}
    arguments = params, draw(B, H), draw(K, B, D), draw(K, B, H)
    segment = make_train_segment(step, mse, backend="eager", taps=True)
    for is_tapped in (False, True, False):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="ftbptt. step is compiled again")
            found: Any = segment(*arguments)
        assert list(found.taps) == ["h", "out"][: 1 + is_tapped]
        expected = 2 * found.taps["h"].value
        torch.testing.assert_close(found.out, expected)
        if is_tapped:
            torch.testing.assert_close(found.taps["out"].value, expected)


def test_chunks_of_a_long_segment(in_chunks: None) -> None:
    draw = Draw(4)
    params, h, _, _ = problem(draw, B)
    x, y = draw(53, B, D), draw(53, B, D)
    found: Any = make_train_segment(marked, mse, backend="eager", taps=["a"])(params, h, x, y)
    seen, loss = by_hand(params, h, x, y)
    check_taps(found, {"a": seen["a"]}, loss)


@pytest.mark.parametrize("backend", ["eager", "fused"])
def test_vmap(backend: str) -> None:
    draw = Draw(5)
    calls = [problem(draw) for _ in range(3)]
    params = calls[0][0]
    h, x, y = (torch.stack([call[i] for call in calls]) for i in (1, 2, 3))
    segment = make_train_segment(marked, mse, backend=backend, taps=True)
    found: Any = vmap(segment, in_dims=(None, 0, 0, 0))(params, h, x, y)
    for i in range(3):
        taps = {n: ftbptt.Tap(value[i], grad[i]) for n, (value, grad) in found.taps.items()}
        check_taps(found._replace(taps=taps), *by_hand(params, h[i], x[i], y[i]))
    values: Any = vmap(segment.evaluate, in_dims=(None, 0, 0, 0))(params, h, x, y)
    for name, (value, grad) in values.taps.items():
        assert grad == ()
        torch.testing.assert_close(value, found.taps[name].value)


def test_in_dims() -> None:
    """The gradients are those of the mean loss."""
    draw = Draw(6)
    calls = [problem(draw) for _ in range(3)]
    params = calls[0][0]
    h, x, y = (torch.stack([call[i] for call in calls]) for i in (1, 2, 3))
    segment = make_train_segment(marked, mse, backend="eager", taps=True, in_dims=(None, 0, 0, 0))
    found: Any = segment(params, h, x, y)
    for i in range(3):
        taps = {n: ftbptt.Tap(value[i], 3 * grad[i]) for n, (value, grad) in found.taps.items()}
        check_taps(found._replace(taps=taps), *by_hand(params, h[i], x[i], y[i]))


def test_reset_and_evaluate() -> None:
    """No gradient crosses a restart; without gradients there are the values alone."""
    params, h, x, y = problem(Draw(7), B)
    segment = make_train_segment(marked, lambda out, y: out[-1].sum(), backend="eager", taps=True)
    reset = torch.arange(K) == 4
    found: Any = segment(params, h, x, y, reset=reset)
    assert not found.taps["h"].grad[:4].any()
    assert found.taps["h"].grad[4:].any()
    values: Any = segment.evaluate(params, h, x, y, reset=reset)
    assert values.grads is None
    assert values.taps["h"].grad is None
    torch.testing.assert_close(values.taps["h"].value, found.taps["h"].value)


def test_a_cell_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.RNNCell(H, H)

        def forward(self, x_t: Tensor, h: Tensor) -> Any:
            h = self.cell(x_t, self.cell(x_t, h))
            return h, h

    draw = Draw(8)
    module = draw.module(Twice)
    arguments = dict(module.named_parameters()), draw(B, H), draw(K, B, H), draw(K, B, H)
    found: Any = make_train_segment(module, mse, backend="eager", taps=True)(*arguments)
    assert list(found.taps) == ["cell.a", "cell.h", "cell.a.1", "cell.h.1"]
    torch.testing.assert_close(found.taps["cell.h.1"].value, found.out)


@pytest.mark.parametrize(
    ("taps", "kind", "words"),
    [
        ("h", TypeError, "taps: expected True or a list of names, found 'h'"),
        ([1], TypeError, "taps: expected True or a list of names"),
        (5, TypeError, "taps: expected True or a list of names, found 5"),
        ([], ValueError, "taps: expected at least one name, found none"),
        (["z"], ValueError, "taps: the step has no tap 'z'; it has 'a', 'h', 'out'"),
    ],
)
def test_bad_names(taps: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make_train_segment(marked, mse, backend="eager", taps=taps)(*problem(Draw(0), B))


def test_bad_taps() -> None:
    with pytest.raises(
        TypeError, match=r"tap: expected tap\(name, tensor\), found a Tensor as name"
    ):
        tap(torch.zeros(1), "a")  # type: ignore[arg-type]

    def same(params: Any, x_t: Tensor, h: Tensor) -> Any:
        return tap("a", h), tap("a", h)

    def whole(params: Any, x_t: Tensor, h: Tensor) -> Any:
        return tap("n", h.argmax(-1)), h

    def pair(params: Any, x_t: Tensor, h: Tensor) -> Any:
        tap("state", (h, h))  # type: ignore[arg-type]
        return h, h

    for step, kind, words in (
        (pair, TypeError, "tap: 'state' is a tuple of 2, and no tensor. Tap each tensor of it"),
        (same, ValueError, "tap: the name 'a' is used twice in one step"),
        (whole, TypeError, "tap: 'n' is torch.int64, which has no gradient"),
    ):
        with pytest.raises(kind, match=words):
            make_train_segment(step, mse, backend="eager", taps=True)(*problem(Draw(0), B))
