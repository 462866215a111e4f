"""The same steps in JAX: ``lax.scan`` under ``jit``, gradients by ``value_and_grad``.

Written as cells are in JAX's libraries: a cell takes one step's input and its own parameters, and
the scan's body calls the cells and the readout. So the input's projection stays in the body for
every cell, as it does in the step that this package is given. Parameters keep torch's names and
layout, ``[out, in]``, so that gradients compare leaf by leaf.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .calls import Call, Result, Skip
from .cases import Problem

if importlib.util.find_spec("jax") is None:
    raise Skip("JAX is not installed")

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = 1e-5  # of torch's LayerNorm


def _lstm(p: Any, x: Any, state: Any) -> tuple[Any, Any]:
    h, c = state
    gates = x @ p["weight_ih"].T + p["bias_ih"]
    gates = gates + h @ p["weight_hh"].T + p["bias_hh"]
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h, (h, c)


def _norm(p: Any, name: str, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    x = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def _layer_norm_lstm(p: Any, x: Any, state: Any) -> tuple[Any, Any]:
    h, c = state
    gates = _norm(p, "norm_x", x @ p["from_x.weight"].T + p["from_x.bias"])
    gates = gates + _norm(p, "norm_h", h @ p["from_h.weight"].T)
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(_norm(p, "norm_c", c))
    return h, (h, c)


def _peephole(p: Any, x: Any, state: Any) -> tuple[Any, Any]:
    h, c = state
    gates = x @ p["from_x.weight"].T + p["from_x.bias"] + h @ p["from_h.weight"].T
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    i, f = jax.nn.sigmoid(i + p["peep_i"] * c), jax.nn.sigmoid(f + p["peep_f"] * c)
    c = f * c + i * jnp.tanh(g)
    h = jax.nn.sigmoid(o + p["peep_o"] * c) * jnp.tanh(c)
    return h, (h, c)


def _gru(p: Any, x: Any, h: Any) -> tuple[Any, Any]:
    from_x = x @ p["weight_ih"].T + p["bias_ih"]
    from_h = h @ p["weight_hh"].T + p["bias_hh"]
    (xr, xz, xn), (hr, hz, hn) = jnp.split(from_x, 3, -1), jnp.split(from_h, 3, -1)
    z = jax.nn.sigmoid(xz + hz)
    n = jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
    h = (1 - z) * n + z * h
    return h, h


def _cho_gru(p: Any, x: Any, h: Any) -> tuple[Any, Any]:
    xr, xz, xn = jnp.split(x @ p["from_x.weight"].T + p["from_x.bias"], 3, -1)
    hr, hz = jnp.split(h @ p["from_h.weight"].T, 2, -1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    h = z * h + (1 - z) * jnp.tanh(xn + (r * h) @ p["from_reset.weight"].T)
    return h, h


def _min_gru(p: Any, x: Any, h: Any) -> tuple[Any, Any]:
    z = jax.nn.sigmoid(x @ p["gate.weight"].T + p["gate.bias"])
    h = (1 - z) * h + z * (x @ p["candidate.weight"].T + p["candidate.bias"])
    return h, h


CELLS = {
    "lstm": _lstm,
    "lnlstm": _layer_norm_lstm,
    "peephole": _peephole,
    "gru": _gru,
    "chogru": _cho_gru,
    "mingru": _min_gru,
}


def _cell_parameters(p: Any, depth: int) -> Any:
    """The parameters of one cell, by the names they have in it."""
    prefix = f"cells.{depth}."
    return {name.removeprefix(prefix): leaf for name, leaf in p.items() if name.startswith(prefix)}


def make(problem: Problem, *, waits: bool) -> Call:
    """A jitted call, which waits for its result or not. It runs where the problem lies."""
    case, is_on_gpu = problem.case, problem.x.is_cuda
    if is_on_gpu and jax.default_backend() != "gpu":
        raise Skip(f"JAX has no GPU here, and runs on the {jax.default_backend()}")
    device = jax.devices("gpu" if is_on_gpu else "cpu")[0]
    cell = CELLS[case.kind]

    def value(p: Any, state: Any, x: Any, y: Any) -> Any:
        cells = [_cell_parameters(p, depth) for depth in range(case.layers)]

        def step(state: Any, x_t: Any) -> tuple[Any, Any]:
            after = []
            for parameters, layer_state in zip(cells, state, strict=True):
                x_t, layer_state = cell(parameters, x_t, layer_state)
                after.append(layer_state)
            return tuple(after), x_t @ p["readout.weight"].T + p["readout.bias"]

        _, out = lax.scan(step, state, x)
        return jnp.square(out - y).mean()

    segment = jax.value_and_grad(value)
    if case.apart:
        segment = jax.vmap(segment, in_axes=case.in_dims)
    if is_on_gpu:  # in torch's precision there
        tf32 = torch.backends.cuda.matmul.allow_tf32
        segment = jax.default_matmul_precision("tensorfloat32" if tf32 else "highest")(segment)
    compiled = jax.jit(segment)

    def to_jax(tensor: Tensor) -> Any:
        array = jax.device_put(tensor.detach().float().cpu().numpy(), device)
        return array.astype(jnp.bfloat16) if tensor.dtype == torch.bfloat16 else array

    arguments = tuple(
        pytree.tree_map(to_jax, tree)
        for tree in (problem.params, problem.state, problem.x, problem.y)
    )

    def call() -> Result:
        result = compiled(*arguments)
        return jax.block_until_ready(result) if waits else result

    return call
