"""torch's cells and layers with a state, weights or data that they were not made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import as_step, make_train_segment

from ..cells.problems import B, D, H, mse
from .spoiled_calls import K, arguments, refused


def test_parameters_of_another_module() -> None:
    cell, other = nn.LSTMCell(D, H), nn.LSTMCell(D + 1, H)
    segment = make_train_segment(cell, mse, backend="eager")
    with pytest.raises(
        ValueError, match=rf"params\['weight_ih'\]: has shape \[28, 6\], .* LSTMCell is \[28, {D}\]"
    ):
        segment(dict(other.named_parameters()), None, torch.randn(K, B, D), torch.randn(K, B, H))


@pytest.mark.parametrize("count", [1, 3])
def test_the_state_of_an_lstm_is_a_pair(count: int) -> None:
    cell, h = nn.LSTMCell(D, H), torch.zeros(B, H)
    segment = make_train_segment(cell, mse, backend="eager")
    state = h if count == 1 else (h,) * count
    with pytest.raises(
        TypeError, match=r"is given 3 tensors, or one of 3 rows, as its state, which"
    ):
        segment(dict(cell.named_parameters()), state, torch.randn(K, B, D), torch.randn(K, B, H))


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize(("name", "width"), [("input", D), ("state", H)])
def test_widths_that_a_cell_was_not_made_for(kind: Any, name: str, width: int) -> None:
    cell = kind(D, H)
    h = torch.zeros(B, H + (name == "state"))
    x = torch.zeros(K, B, D + (name == "input"))
    given = rf"\[{B}, {width + 1}\] as its {name}, but its weights are for {width} features"
    changes = {"params": dict(cell.named_parameters()), "x": x}
    state = (h, h) if kind is nn.LSTMCell else h
    words = f"step: a recurrent layer or cell is given {given}"
    refused(ValueError, words, cell, mse, **changes, state=state)


def test_data_with_the_batch_first() -> None:
    cell, given = nn.GRUCell(D, H), arguments()
    changes = {name: given[name].transpose(0, 1) for name in "xy"}
    changes |= {"params": dict(cell.named_parameters()), "state": torch.zeros(B, H)}
    words = r"if time is not on axis 0 of x, pass time_dim= to make_train_segment"
    refused(ValueError, words, cell, mse, **changes)


def test_layers_in_a_module_that_returns_no_state() -> None:
    class OutOnly(nn.Module):
        def forward(self, x: Tensor, state: Any) -> Tensor:
            return x

    refused(TypeError, r"step: expected OutOnly to return \(out, state\), found a Tensor\. Return",
            as_step(OutOnly(), sequence=True), mse, params={}, state=torch.zeros(B, H))  # fmt: skip


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda x: {"out": x, "state": x}, r"to return \(out, state\), found a dict\. Return the"),
        (lambda x: (x, x, x), r"to return \(out, state\), found a tuple of 3\. Return the"),
        (lambda x: None, r"to return \(out, state\), found a NoneType\. Return the output"),
        (lambda x: ({"a": x, "b": 3}, x[0]), r"expected tensors in out, found int at out\['b'\]"),
    ],
)
def test_chunks_of_a_module_that_returns_no_pair(result: Any, words: str) -> None:
    class Returning(nn.Module):
        def forward(self, x: Tensor, state: Any) -> Any:
            return result(x)

    step = as_step(Returning(), sequence=True)
    refused(TypeError, f"step: .*{words}", step, mse, params={}, state=torch.zeros(B, D))
    assert step.call_chunk is not None
    with pytest.raises(TypeError, match=words):
        step.call_chunk(Returning(), torch.zeros(K, B, D), torch.zeros(B, D))


def test_the_state_of_layers_is_a_pair() -> None:
    layers = nn.LSTM(D, H)
    words = (
        rf"state: expected the pair \(h, c\) of an LSTM, found a tensor \[1, {B}, {H}\]. Give st"
    )
    refused(TypeError, words, layers, mse, params=dict(layers.named_parameters()),
            state=torch.zeros(1, B, H))  # fmt: skip


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.RNNCell, nn.GRU, nn.RNN])
def test_the_state_of_others_is_no_pair(kind: Any) -> None:
    cell, h = kind(D, H), torch.zeros(1, B, H)
    words = rf"state: expected the tensor h of {kind.__name__}, found tuple\. An LSTM has a pair"
    refused(TypeError, words, cell, mse, params=dict(cell.named_parameters()), state=(h, h))
