"""Modules that take chunks: those whose layers mix steps are refused, at the first call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftbptt import as_step, make_train_segment
from ftbptt.training import train_stream

from ..cells.problems import mse

B, D, H = 3, 4, 5
WORDS = re.escape(
    "step: Chunks gives other numbers for 6 steps at once than for one after the other, so a layer "
    "of it mixes steps (a convolution or attention over time, a norm over the chunk). A segment "
    "calls it with one step at a time. Take that layer out of it, and apply it to the data before "
    "or to the outputs in the loss."
)


class Chunks(nn.Module):
    """``before`` sees the whole chunk [K, B, D]."""

    def __init__(self, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.dropout = before, nn.Dropout(0.5)
        self.lstm = nn.LSTM(D, H, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor, state: Any) -> Any:
        out, state = self.lstm(self.before(x), state)
        return self.dropout(out), state


def given(module: nn.Module, steps: int = 6) -> tuple[Any, ...]:
    torch.manual_seed(0)
    state = torch.zeros(2, B, H), torch.zeros(2, B, H)
    params = dict(module.named_parameters())
    return params, state, torch.randn(steps, B, D), torch.zeros(steps, B, H)


def make(module: nn.Module, **options: Any) -> Any:
    return make_train_segment(as_step(module, sequence=True), mse, backend="eager", **options)


MIXING = [
    lambda x: F.avg_pool1d(x.permute(1, 2, 0), 3, 1, 1).permute(2, 0, 1),
    lambda x: x - x.mean(0),
    lambda x: (x - x.mean(0)) / x.var(0, correction=0).sqrt(),  # of a single step NaN
    lambda x: torch.cat([torch.zeros_like(x[:1]), x[:-1]]),  # causal
]


@pytest.mark.parametrize("mix", MIXING)
def test_layers_that_mix_steps(mix: Any) -> None:
    module = Chunks(mix)
    arguments = given(module)
    for call in (make(module), make(module).evaluate, make(module, window=3)):
        with pytest.raises(ValueError, match=WORDS):
            call(*arguments)
    segment = make(module)
    segment(*given(module, steps=1))  # of a single step it cannot be seen
    with pytest.raises(ValueError, match=WORDS):
        segment(*arguments)


@pytest.mark.parametrize("mix", MIXING)
def test_in_silence(mix: Any) -> None:
    """Where all steps are the same, a layer that mixes them may change nothing."""
    params, state, x, y = given(Chunks(mix))
    with pytest.raises(ValueError, match=WORDS):
        make(Chunks(mix))(params, state, torch.zeros_like(x), y)


def test_in_complex_outputs_alone() -> None:
    class Spectra(Chunks):
        def forward(self, x: Tensor, state: Any) -> Any:
            out, state = super().forward(x, state)
            spectra = torch.fft.rfft(out)
            return spectra - spectra.mean(0), state

    segment = make_train_segment(
        as_step(Spectra(lambda x: x), sequence=True),
        lambda out, y: out.abs().mean(),
        backend="eager",
    )
    with pytest.raises(ValueError, match="step: Spectra gives other numbers for 6 steps at once"):
        segment(*given(Spectra(lambda x: x)))


def test_in_tokens_that_are_all_the_same() -> None:
    """They cannot be varied; the first that differ show it."""

    class Words(Chunks):
        def forward(self, x: Tensor, state: Any) -> Any:
            return super().forward(F.one_hot(x, D).to(self.lstm.weight_hh_l0.dtype), state)

    module = Words(MIXING[3])
    params, state, _, y = given(module)
    segment = make(module)
    with torch.no_grad():
        module.lstm.weight_ih_l0[:, 0] = 0  # as of padding
    for _ in range(2):
        segment(params, state, torch.zeros(6, B, dtype=torch.long), y)
    with pytest.raises(ValueError, match="gives other numbers for 6 steps at once"):
        segment(params, state, torch.arange(6 * B).view(6, B) % D, y)


def test_a_layer_with_time_on_another_axis() -> None:
    """Each step is taken for a sequence of its rows; only steps at once show that."""
    module = Chunks(lambda x: x)
    params, _, x, y = given(module)
    state = torch.zeros(2, 1, H), torch.zeros(2, 1, H)
    rows_first = make_train_segment(
        as_step(module, sequence=True, batch_first=True), mse, backend="eager"
    )
    words = (
        r"fails for them at once \(RuntimeError: .*another axis take the rows of a step for steps"
    )
    with pytest.raises(
        ValueError, match=f"step: Chunks takes 6 steps one after the other, .*{words}"
    ):
        rows_first(params, state, x.transpose(0, 1), y.transpose(0, 1))


def test_windows_that_overlap() -> None:
    module = Chunks(MIXING[1])
    params, state, *data = given(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = train_stream(make(module), params, state, tuple(data), optimizer, k1=3, k2=6)
    with pytest.raises(ValueError, match="step: Chunks gives other numbers for 3 steps at once"):
        next(run)


@pytest.mark.parametrize("before", [lambda x: x, lambda x: x + torch.randn_like(x)])
def test_others_are_left_as_they_are(before: Any) -> None:
    """In train mode, with its dropout; noise in the module itself cannot be told from a mixing."""
    module = Chunks(before)
    module.unsaved, module.seen = object(), []  # type: ignore[assignment]
    params, *rest = given(module)
    torch.manual_seed(1)
    expected = make_train_segment(
        lambda p, x_t, h: module_on_one_step(module, p, x_t, h), mse, backend="eager"
    )(params, *rest)
    torch.manual_seed(1)
    found = make(module)(params, *rest)
    assert torch.equal(found.loss, expected.loss), "the check draws no random numbers"
    assert all(m.training for m in module.modules())


def module_on_one_step(module: nn.Module, params: Any, x_t: Tensor, state: Any) -> Any:
    out, state = torch.func.functional_call(module, params, (x_t.unsqueeze(0), state))
    return out.squeeze(0), state


class BatchFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(D, H, batch_first=True)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.gru(x, state)
        return out


def test_what_autocast_rounds() -> None:
    """This layer returns float32, but computes in bfloat16, so its rounding shows at once."""
    module = BatchFirst()
    params, (state, _), x, y = given(module, 12)
    segment = make_train_segment(
        as_step(module, sequence=True, batch_first=True), mse, backend="eager"
    )
    x, y, state = x.transpose(0, 1).contiguous(), y.transpose(0, 1), state[:1]
    exact = segment(params, state, x, y)
    again = make_train_segment(
        as_step(module, sequence=True, batch_first=True), mse, backend="eager"
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = again(params, state, x, y)
    torch.testing.assert_close(found.out, exact.out, rtol=0, atol=0.05)
    assert not torch.equal(found.out, exact.out)
