"""The peers timed on a GPU: ``make(problem, reset) -> call``, whose results stay on the device.

``reset`` is ``[K, B]``. If it is all False, as in most cases, peers run without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .calls import Call, Result, Skip, by_autograd
from .cases import Problem, loss
from .peers import eager, engine, jax_scan, library, library_layer, torch_func

Make = Callable[[Problem, Tensor], Call]


def ours(problem: Problem, reset: Tensor, backend: str) -> Call:
    """This package."""
    return engine(problem, backend, reset=reset if reset.any() else None)


def loop(problem: Problem, reset: Tensor) -> Call:
    """The loop written by hand, with restarts."""
    if not reset.any():
        return eager(problem)
    model, leaves = problem.model, dict(problem.model.named_parameters())

    def value_of() -> Tensor:
        state, outs = problem.state, []
        for x_t, restart in zip(problem.x, reset, strict=True):
            state = _restarted(state, restart)
            out, state = model(x_t, state)
            outs.append(out)
        return loss(torch.stack(outs), problem.y)

    return by_autograd(value_of, leaves)


def _restarted(state: Any, restart: Tensor) -> Any:
    def leaf(tensor: Tensor) -> Tensor:
        return torch.where(restart[:, None], 0, tensor)

    return tuple(tuple(leaf(tensor) for tensor in layer) for layer in state)


class Piece(NamedTuple):
    """The steps from ``start`` to before ``end`` of a row, without a restart in between."""

    row: int
    start: int
    end: int


def split(problem: Problem, reset: Tensor) -> Call:
    """cuDNN with resets: cuts each row where it restarts, and pads the pieces to the longest."""
    pieces: list[Piece] = []
    for row, flags in enumerate(reset.t().tolist()):
        cuts = [0, *(t for t, flag in enumerate(flags) if flag and t), len(flags)]
        pieces += [Piece(row, start, end) for start, end in pairwise(cuts)]
    longest = max(piece.end - piece.start for piece in pieces)
    rows = reset.shape[1]
    # The index of each piece's steps in [K * B] data; padding reads the first element.
    index = torch.zeros(longest, len(pieces), dtype=torch.int64)
    valid = torch.zeros(longest, len(pieces), dtype=torch.bool)
    for i, (row, start, end) in enumerate(pieces):
        index[: end - start, i] = torch.arange(start, end) * rows + row
        valid[: end - start, i] = True
    index, valid = index.to(reset.device), valid.to(reset.device)
    layer, leaves = library_layer(problem.case, problem.model, problem.x)
    starts_row = torch.tensor([start == 0 and not reset[0, row] for row, start, _ in pieces])
    piece_rows = torch.tensor([piece.row for piece in pieces]).to(reset.device)
    starts = [
        torch.where(starts_row.to(reset.device)[:, None], leaf[piece_rows], 0)[None]
        for leaf in problem.state[0]
    ]

    def value_of() -> Tensor:
        x = problem.x.flatten(0, 1)[index]
        out = problem.model.readout(layer(x, tuple(starts))[0])
        y = problem.y.flatten(0, 1)[index]
        squares: Tensor = (out - y).square() * valid[..., None]
        return squares.sum() / problem.y.numel()

    return by_autograd(value_of, leaves)


def _lstm_step(params: dict[str, Tensor], x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
    """An LSTM by its equations: vmap runs torch's own cell on a GPU row by row."""
    ((h, c),) = state
    gates = F.linear(x_t, params["cells.0.weight_ih"], params["cells.0.bias_ih"])
    gates = gates + F.linear(h, params["cells.0.weight_hh"], params["cells.0.bias_hh"])
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return F.linear(h, params["readout.weight"], params["readout.bias"]), ((h, c),)


def vmapped_loop(problem: Problem, reset: Tensor) -> Call:
    """``vmap`` of an eager functional loop, a gradient for each sequence; their mean."""
    params = {name: p.detach() for name, p in problem.params.items()}

    def value(params: Any, state: Any, x: Tensor, y: Tensor) -> Tensor:
        outs = []
        for x_t in x:
            out, state = _lstm_step(params, x_t, state)
            outs.append(out)
        return loss(torch.stack(outs), y)

    each = torch.func.vmap(torch.func.grad_and_value(value), in_dims=(None, 0, 1, 1))

    def call() -> Result:
        grads, values = each(params, problem.state, problem.x, problem.y)
        return values.mean(), {name: grad.mean(0) for name, grad in grads.items()}

    return call


def compiled_scan(problem: Problem, reset: Tensor) -> Call:
    """``torch.compile`` of torch's scan operator, with its own autograd."""
    try:
        from torch._higher_order_ops.scan import scan
    except ImportError as error:
        raise Skip("this torch has no scan") from error
    from torch.utils import _pytree as pytree

    model, leaves = problem.model, dict(problem.model.named_parameters())
    # In torch 2.11 the gradient ends at each step if that of the first state is not wanted.
    start = pytree.tree_map(lambda leaf: leaf.detach().requires_grad_(), problem.state)

    def segment(x: Tensor, y: Tensor, state: Any) -> Tensor:
        def step(carried: Any, x_t: Tensor) -> Any:
            out, after = model(x_t, carried)
            return pytree.tree_map(torch.clone, after), out

        return loss(scan(step, state, x)[1], y)

    compiled = torch.compile(segment, fullgraph=True)

    return by_autograd(lambda: compiled(problem.x, problem.y, start), leaves)


def wait_for_jax(result: Any) -> None:
    result[0].block_until_ready()  # the loss; its gradients are of the same program


def _without_resets(make: Callable[[Problem], Call]) -> Make:
    def of(problem: Problem, reset: Tensor) -> Call:
        if reset.any():
            raise Skip("has no resets")
        return make(problem)

    return of


PEERS: dict[str, Make] = {
    "fused": partial(ours, backend="fused"),
    "cudagraph": partial(ours, backend="cudagraph"),
    "eager": loop,
    "library": _without_resets(library),
    "split": split,
    "scan": compiled_scan,
    "vmap": vmapped_loop,
    "torch-func": _without_resets(torch_func),
    "jax": _without_resets(partial(jax_scan, waits=False)),
}
