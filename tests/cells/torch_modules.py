"""Torch's own recurrent modules, and a sequence model built on one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ftbptt import as_step

from .problems import (
    OUT,
    TABLE,
    B,
    D,
    Draw,
    H,
    Problem,
    cross_entropy_per_row,
    mse,
    named,
    per_row,
    per_step,
)

P = 4  # proj_size


def _torch_cell(kind: type[nn.Module], loss: Any, *, batched: bool = True, **options: Any) -> Any:
    def make(draw: Draw) -> Problem:
        cell = draw.module(lambda: kind(D, H, **options))
        rows = (B,) if batched else ()
        state = (draw(*rows, H), draw(*rows, H)) if kind is nn.LSTMCell else draw(*rows, H)
        x, y = draw.sequence(*rows, D), draw.sequence(*rows, H)
        return Problem(cell, named(cell), state, x, y, loss, rows=B if batched else None)

    return make


def _torch_layer(
    kind: type[nn.Module], layers: int, loss: Any, *, batched: bool = True, **options: Any
) -> Any:
    def make(draw: Draw) -> Problem:
        layer = draw.module(lambda: kind(D, H, layers, **options))
        rows = (B,) if batched else ()
        width = options.get("proj_size", 0) or H
        state: Any = draw(layers, *rows, width)
        if kind is nn.LSTM:
            state = state, draw(layers, *rows, H)
        time_dim = 1 if batched and options.get("batch_first") else 0
        x = draw.sequence(*rows, D, time_dim=time_dim)
        y = draw.sequence(*rows, width, time_dim=time_dim)
        rows_of_reset = B if batched else None
        return Problem(layer, named(layer), state, x, y, loss, rows_of_reset, time_dim)

    return make


TABLE.update(
    rnn_cell_tanh=_torch_cell(nn.RNNCell, mse),
    rnn_cell_relu=_torch_cell(nn.RNNCell, per_row, nonlinearity="relu"),
    gru_cell=_torch_cell(nn.GRUCell, per_row),
    gru_cell_no_bias=_torch_cell(nn.GRUCell, mse, bias=False),
    lstm_cell=_torch_cell(nn.LSTMCell, per_row),
    lstm_cell_unbatched=_torch_cell(nn.LSTMCell, per_step, batched=False),
    rnn_tanh=_torch_layer(nn.RNN, 2, per_row),
    rnn_relu=_torch_layer(nn.RNN, 1, mse, nonlinearity="relu"),
    gru_3_layers=_torch_layer(nn.GRU, 3, per_row),
    gru_unbatched=_torch_layer(nn.GRU, 2, mse, batched=False),
    gru_batch_first=_torch_layer(nn.GRU, 1, per_row, batch_first=True),
    lstm=_torch_layer(nn.LSTM, 1, per_row),
    lstm_no_bias=_torch_layer(nn.LSTM, 2, per_step, bias=False),
    lstm_projected=_torch_layer(nn.LSTM, 2, mse, proj_size=P),
    lstm_batch_first=_torch_layer(nn.LSTM, 2, mse, batch_first=True),
    lstm_unbatched=_torch_layer(nn.LSTM, 1, per_step, batched=False, batch_first=True),
)


class SequenceModel(nn.Module):
    """A model of a whole chunk: Linear, a 2-layer nn.LSTM, LayerNorm, Linear."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(D, H)
        self.rnn = nn.LSTM(H, H, 2, batch_first=batch_first)
        self.norm = nn.LayerNorm(H)
        self.readout = nn.Linear(H, OUT)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        hidden, state = self.rnn(self.embed(x).tanh(), state)
        return self.readout(self.norm(hidden)), state


def _sequence_model(batch_first: bool) -> Any:
    def make(draw: Draw) -> Problem:
        model = draw.module(lambda: SequenceModel(batch_first))
        time_dim = int(batch_first)
        x = draw.sequence(B, D, time_dim=time_dim)
        state = draw(2, B, H), draw(2, B, H)
        step = as_step(model, sequence=True)
        if batch_first:
            y = draw.sequence(B, OUT, time_dim=1)
            return Problem(step, named(model), state, x, y, per_row, time_dim=1)
        classes = draw.tokens(OUT, B)
        return Problem(step, named(model), state, x, classes, cross_entropy_per_row)

    return make


TABLE.update(
    sequence_model=_sequence_model(False), sequence_model_batch_first=_sequence_model(True)
)
