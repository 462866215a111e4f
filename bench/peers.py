"""Who is timed. A peer turns a problem into a call that returns (loss, gradients by name)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .cases import Problem, loss

Result = tuple[Any, dict[str, Any]]
Call = Callable[[], Result]


class Skip(Exception):
    """This peer does not take part in this case; the message says why."""


@dataclass(frozen=True)
class Peer:
    """A name, what to call it in a table, and ``make(problem) -> call``."""

    name: str
    label: str
    make: Callable[[Problem], Call]


def engine(problem: Problem, recompute: bool = False) -> Call:
    """This package, its backend left to itself."""
    import ftbptt

    train_segment = ftbptt.make_train_segment(problem.model, loss, recompute=recompute)
    segment: Callable[..., Any] = train_segment
    if problem.case.per_sequence:
        segment = torch.func.vmap(train_segment, in_dims=(None, 0, 0, 0))
    params = problem.params

    def call() -> Result:
        result = segment(params, problem.state, problem.x, problem.y)
        return result.loss, result.grads

    return call


def engine_recompute(problem: Problem) -> Call:
    """This package with ``recompute=True``: less memory, more work."""
    if not problem.case.recompute:
        raise Skip("timed where memory matters")
    return engine(problem, recompute=True)


def unroll(problem: Problem, x: Tensor, y: Tensor, state: Any, params: Any = None) -> Tensor:
    """The loss of the segment by the plain loop over its steps."""
    outs = []
    for x_t in x:
        if params is None:
            out, state = problem.model(x_t, state)
        else:
            out, state = functional_call(problem.model, params, (x_t, state))
        outs.append(out)
    return loss(torch.stack(outs), y)


def eager(problem: Problem) -> Call:
    """The loop as it is written by hand: modules, autograd."""
    params = problem.params
    leaves = list(params.values())

    def segment(x: Tensor, y: Tensor, state: Any) -> Result:
        value = unroll(problem, x, y, state)
        return value.detach(), dict(zip(params, torch.autograd.grad(value, leaves), strict=True))

    def call() -> Result:
        return segment(problem.x, problem.y, problem.state)

    def one_by_one() -> Result:
        rows = zip(problem.x, problem.y, *problem.state, strict=True)
        values, grads = zip(*(segment(x, y, state) for x, y, *state in rows), strict=True)
        return torch.stack(values), {n: torch.stack([g[n] for g in grads]) for n in params}

    return one_by_one if problem.case.per_sequence else call


def torch_func(problem: Problem) -> Call:
    """``torch.func.grad`` over the functional loop, under ``vmap`` where the rows are apart."""

    def value(params: Any, state: Any, x: Tensor, y: Tensor) -> Tensor:
        return unroll(problem, x, y, state, params)

    segment = torch.func.grad_and_value(value)
    if problem.case.per_sequence:
        segment = torch.func.vmap(segment, in_dims=(None, 0, 0, 0))
    params = {name: p.detach() for name, p in problem.params.items()}

    def call() -> Result:
        grads, result = segment(params, problem.state, problem.x, problem.y)
        return result, grads

    return call


def unrolled_compile(problem: Problem) -> Call:
    """``torch.compile`` of the unrolled loop, autograd outside."""
    if not problem.case.unrolled:
        raise Skip("compiles too long, or under vmap not at all")
    compiled = torch.compile(lambda x, y, state: unroll(problem, x, y, state), fullgraph=True)
    params = problem.params
    leaves = list(params.values())

    def call() -> Result:
        value = compiled(problem.x, problem.y, problem.state)
        return value.detach(), dict(zip(params, torch.autograd.grad(value, leaves), strict=True))

    return call


def library(problem: Problem) -> Call:
    """``nn.LSTM`` or ``nn.GRU`` over the whole chunk, then the readout."""
    case = problem.case
    layers: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU}
    if case.kind not in layers or case.per_sequence:
        raise Skip("torch has no such layer" if case.kind not in layers else "has no vmap")
    layer = layers[case.kind](case.inputs, case.hidden, case.layers)
    own = dict(layer.named_parameters())
    params = problem.params
    leaves = {}
    for name, p in params.items():
        if name.startswith("readout"):
            leaves[name] = p
            continue
        depth = name.split(".")[1] if case.kind == "gru" else "0"
        leaf = own[f"{name.rsplit('.', 1)[1]}_l{depth}"]
        leaf.data.copy_(p.data)
        leaves[name] = leaf
    readout = problem.model.get_submodule("readout")
    state: Any = tuple(leaf[None] for leaf in problem.state)
    if case.kind == "gru":
        state = torch.stack(problem.state)

    def call() -> Result:
        value = loss(readout(layer(problem.x, state)[0]), problem.y)
        grads = torch.autograd.grad(value, list(leaves.values()))
        return value.detach(), dict(zip(leaves, grads, strict=True))

    return call


def jax_scan(problem: Problem) -> Call:
    """JAX's ``lax.scan`` under ``jit``; in its own file, since JAX may be absent."""
    from . import jax_peer

    return jax_peer.make(problem)


PEERS = (
    Peer("engine", "ftbptt", engine),
    Peer("engine-recompute", "ftbptt, recompute", engine_recompute),
    Peer("eager", "eager autograd loop", eager),
    Peer("torch-func", "torch.func eager", torch_func),
    Peer("unrolled", "torch.compile, unrolled", unrolled_compile),
    Peer("library", "nn.LSTM / nn.GRU", library),
    Peer("jax", "JAX scan, jit", jax_scan),
)
