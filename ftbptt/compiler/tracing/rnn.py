"""torch's recurrent layers and cells as plain tensor operations, while a step is traced.

``aten::lstm`` and the like are opaque: they cannot be vmapped, split or differentiated in parts.
Calls of them run the equations in the documentation of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``
instead, the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract.taps import tap_of


def _check_shapes(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor) -> None:
    """torch names neither; and one row would broadcast."""
    if x.shape[:-1] != h.shape[:-1]:
        raise ValueError(
            f"step: a recurrent layer or cell is given {list(x.shape)} as its input and "
            f"{list(h.shape)} as its state, which differ in the rows of the batch. Give a state of "
            "as many rows as x has; or, if time is not on axis 0 of x, pass time_dim= to "
            "make_train_segment."
        )
    for name, given, weight in (("input", x, w_ih), ("state", h, w_hh)):
        if given.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"step: a recurrent layer or cell is given {list(given.shape)} as its {name}, but "
                f"its weights are for {weight.shape[1]} features."
            )


def _pair(state: Any) -> Sequence[Tensor]:
    """The state of an LSTM; torch takes a single tensor apart along its first axis."""
    if len(state) != 2:
        n = len(state)
        raise TypeError(
            f"step: an LSTM is given {n} tensors, or one of {n} rows, as its state, which is the "
            "pair (h, c). Give state=(h, c), and return both."
        )
    return state


def _lstm_cell(
    x: Tensor, state: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Any = None,
    b_hh: Any = None, w_hr: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h, c = _pair(state)
    _check_shapes(x, h, w_ih, w_hh)
    gates = (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    i, f, g, o = (tap_of(w_ih, name, gate) for name, gate in zip("ifgo", gates, strict=True))
    c = tap_of(w_ih, "c", f.sigmoid() * c + i.sigmoid() * g.tanh())
    h = o.sigmoid() * c.tanh()
    return tap_of(w_ih, "h", h if w_hr is None else F.linear(h, w_hr)), c


def _gru_cell(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Tensor:
    _check_shapes(x, h, w_ih, w_hh)
    r_x, z_x, n_x = F.linear(x, w_ih, b_ih).chunk(3, -1)
    r_h, z_h, n_h = F.linear(h, w_hh, b_hh).chunk(3, -1)
    r = tap_of(w_ih, "r", r_x + r_h).sigmoid()
    z = tap_of(w_ih, "z", z_x + z_h).sigmoid()
    n = tap_of(w_ih, "n", n_x + r * n_h).tanh()
    return tap_of(w_ih, "h", n + z * (h - n))


def _elman_cell(nonlinearity: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(
        x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Tensor:
        _check_shapes(x, h, w_ih, w_hh)
        a = tap_of(w_ih, "a", F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh))
        return tap_of(w_ih, "h", nonlinearity(a))

    return cell


def _layers(cell: Callable[..., Any]) -> Callable[..., Any]:
    """Layers of ``cell`` over a chunk, with the signature of ``torch.lstm`` or ``torch.gru``."""

    def run(
        x: Tensor, hx: Any, weights: Any, has_biases: Any, num_layers: Any, dropout: Any = None,
        train: Any = None, bidirectional: Any = False, batch_first: Any = False,
    ) -> Any:  # fmt: skip
        if not isinstance(has_biases, bool):  # torch's signature for packed data has the weights
            raise TypeError(
                "step: a PackedSequence has no single step. Give padded data with reset= and "
                "mask= instead."
            )
        lstm = not isinstance(hx, Tensor)
        directions = 2 if bidirectional else 1
        per_direction = len(weights) // (num_layers * directions)
        steps: list[Any] = list(x.unbind(1 if batch_first else 0))
        finals: list[Any] = []
        for layer in range(num_layers):
            found: list[list[Any]] = []  # by direction
            for direction in range(directions):
                i = len(finals)
                state = tuple(leaf[i] for leaf in hx) if lstm else hx[i]
                own_weights = list(weights[i * per_direction : (i + 1) * per_direction])
                if lstm and not has_biases:  # a projection's weight follows the biases
                    own_weights[2:2] = [None, None]
                outs: list[Any] = []
                for value in reversed(steps) if direction else steps:
                    state = cell(value, state, *own_weights)
                    outs.append(state[0] if lstm else state)
                finals.append(state)
                found.append(outs[::-1] if direction else outs)
            steps = found[0]
            if bidirectional:
                steps = [torch.cat(both, -1) for both in zip(*found, strict=True)]
            if train and dropout and layer < num_layers - 1:
                steps = [F.dropout(value, dropout) for value in steps]
        out = torch.stack(steps, 1 if batch_first else 0)
        if lstm:
            return out, torch.stack([h for h, _ in finals]), torch.stack([c for _, c in finals])
        return out, torch.stack(finals)

    return run


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout whose noise depends on a shape only, so that it can leave the recurrence."""
    if not train or p == 0:
        return x
    if p == 1:
        return x * 0
    keep = torch.rand(x.shape, device=x.device) >= p
    return x * keep * (1 / (1 - p))


_elman_tanh, _elman_relu = _elman_cell(torch.tanh), _elman_cell(torch.relu)
RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _layers(_lstm_cell),
    torch.gru: _layers(_gru_cell),
    torch.rnn_tanh: _layers(_elman_tanh),
    torch.rnn_relu: _layers(_elman_relu),
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _elman_tanh,
    torch.rnn_relu_cell: _elman_relu,
    torch.dropout: _dropout,
}
