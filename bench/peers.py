"""The peers: what is timed beside this package, and this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .calls import Call, Result, Skip, by_autograd
from .cases import Case, Part, Problem, loss
from .cells import Stack


@dataclass(frozen=True)
class Peer:
    """A name, what to call it in a table, and ``make(problem) -> call``."""

    name: str
    label: str
    make: Callable[[Problem], Call]
    threads: int | None = None  # how many torch may use; None leaves it to torch


def engine(
    problem: Problem,
    backend: str = "auto",
    recompute: bool = False,
    reset: Tensor | None = None,
) -> Call:
    """This package; with its default backend unless one is named."""
    import ftbptt

    try:
        train_segment = ftbptt.make_train_segment(
            problem.model, loss, backend=backend, recompute=recompute
        )
    except ValueError as error:  # a backend that this version does not have
        raise Skip(str(error)) from error
    segment: Callable[..., Any] = train_segment
    if problem.case.apart:
        segment = torch.func.vmap(train_segment, in_dims=problem.case.in_dims)
    params, options = problem.params, {} if reset is None else {"reset": reset}

    def call() -> Result:
        result = segment(params, problem.state, problem.x, problem.y, **options)
        return result.loss, result.grads

    return call


def engine_recompute(problem: Problem) -> Call:
    """This package with ``recompute=True``: less memory, more work."""
    if not problem.case.recompute:
        raise Skip("timed where memory matters")
    return engine(problem, recompute=True)


def unroll(model: nn.Module, x: Tensor, y: Tensor, state: Any, params: Any = None) -> Tensor:
    """The loss of the segment by the plain loop over its steps."""
    outs = []
    for x_t in x:
        if params is None:
            out, state = model(x_t, state)
        else:
            out, state = functional_call(model, params, (x_t, state))
        outs.append(out)
    return loss(torch.stack(outs), y)


def one_by_one(calls: list[Call]) -> Call:
    """The calls of the parts in a loop, their results stacked."""

    def call() -> Result:
        values, grads = zip(*(part() for part in calls), strict=True)
        return torch.stack(values), {n: torch.stack([g[n] for g in grads]) for n in grads[0]}

    return call


def eager(problem: Problem) -> Call:
    """The loop written by hand: modules, autograd."""

    def of(part: Part) -> Call:
        leaves = dict(part.model.named_parameters())
        return by_autograd(lambda: unroll(part.model, part.x, part.y, part.state), leaves)

    calls = [of(part) for part in problem.parts()]
    return one_by_one(calls) if problem.case.apart else calls[0]


def torch_func(problem: Problem) -> Call:
    """``torch.func.grad`` over the functional loop, under ``vmap`` where the rows are apart."""

    def value(params: Any, state: Any, x: Tensor, y: Tensor) -> Tensor:
        return unroll(problem.model, x, y, state, params)

    segment = torch.func.grad_and_value(value)
    if problem.case.apart:
        segment = torch.func.vmap(segment, in_dims=problem.case.in_dims)
    params = {name: p.detach() for name, p in problem.params.items()}

    def call() -> Result:
        grads, result = segment(params, problem.state, problem.x, problem.y)
        return result, grads

    return call


def unrolled_compile(problem: Problem) -> Call:
    """``torch.compile`` of the unrolled loop, autograd outside."""
    if not problem.case.unrolled:
        raise Skip("compiles too long, or under vmap not at all")
    model = problem.model
    compiled = torch.compile(lambda x, y, state: unroll(model, x, y, state), fullgraph=True)
    return by_autograd(lambda: compiled(problem.x, problem.y, problem.state), problem.params)


_LAYERS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU}


def library_layer(case: Case, model: Stack, like: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """torch's layer with the weights of the model's cells, on the device and of the dtype of
    ``like``; and the parameters of the model with those of the layer in place of the cells'.
    """
    layer = _LAYERS[case.kind](case.inputs, case.hidden, case.layers).to(like)
    layer_parameters = dict(layer.named_parameters())
    leaves: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        leaves[name] = p
        if name.startswith("cells."):
            _, depth, of_cell = name.split(".")
            leaves[name] = layer_parameters[f"{of_cell}_l{depth}"]
            leaves[name].data.copy_(p.data)
    return layer, leaves


def library(problem: Problem) -> Call:
    """``nn.LSTM`` or ``nn.GRU`` over the full chunk, then the readout; models one by one."""
    case = problem.case
    if case.kind not in _LAYERS or case.per_sequence:
        raise Skip("torch has no such layer" if case.kind not in _LAYERS else "has no vmap")

    def of(part: Part) -> Call:
        layer, leaves = library_layer(case, part.model, part.x)
        state: Any = torch.stack(part.state) if case.kind == "gru" else None
        if case.kind == "lstm":
            state = tuple(torch.stack(leaf) for leaf in zip(*part.state, strict=True))

        def value_of() -> Tensor:
            return loss(part.model.readout(layer(part.x, state)[0]), part.y)

        return by_autograd(value_of, leaves)

    calls = [of(part) for part in problem.parts()]
    return one_by_one(calls) if case.apart else calls[0]


def jax_scan(problem: Problem, *, waits: bool = True) -> Call:
    """JAX's ``lax.scan`` under ``jit``; in its own file, since JAX may be absent."""
    from . import jax_peer

    return jax_peer.make(problem, waits=waits)


PEERS = (
    Peer("engine", "ftbptt", engine),
    Peer("engine-recompute", "ftbptt, recompute", engine_recompute),
    Peer("eager", "eager autograd loop", eager),
    Peer("torch-func", "torch.func eager", torch_func),
    Peer("unrolled", "torch.compile, unrolled", unrolled_compile),
    Peer("library", "nn.LSTM / nn.GRU", library),
    Peer("jax", "JAX scan, jit", jax_scan),
)


def find(name: str) -> Peer:
    """The peer of a name: one of PEERS, or ``engine-NAME`` for this package on a certain backend;
    either may end in ``@N`` for N threads. ValueError for any other name.
    """
    base, at, threads = name.partition("@")
    peer = next((peer for peer in PEERS if peer.name == base), None)
    if peer is None and base.startswith("engine-"):
        backend = base.removeprefix("engine-")
        peer = Peer(base, f"ftbptt, {backend}", partial(engine, backend=backend))
    if peer is None:
        known = ", ".join(peer.name for peer in PEERS)
        raise ValueError(f"no {name!r}; there are {known}, and engine-BACKEND")
    if not at:
        return peer
    if base == "jax" or not threads.isdecimal() or int(threads) < 1:
        raise ValueError(f"{name!r}: a number of threads, 1 or more, for a peer that runs in torch")
    count = "1 thread" if int(threads) == 1 else f"{int(threads)} threads"
    return replace(peer, name=name, label=f"{peer.label}, {count}", threads=int(threads))
