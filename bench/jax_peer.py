"""The same steps in JAX: ``lax.scan`` under ``jit``, gradients by ``value_and_grad``.

Parameters keep torch's names and layout, ``[out, in]``, so that gradients compare leaf by leaf.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from .cases import Problem
from .peers import Call, Result, Skip

if importlib.util.find_spec("jax") is None:
    raise Skip("JAX is not installed")

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = 1e-5  # of torch's LayerNorm


def _lstm(p: Any, x: Any, state: Any) -> tuple[Any, Any]:
    h, c = state
    gates = x @ p["cell.weight_ih"].T + p["cell.bias_ih"]
    gates = gates + h @ p["cell.weight_hh"].T + p["cell.bias_hh"]
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


def _gru(p: Any, x: Any, state: Any) -> tuple[Any, Any]:
    after = []
    for layer, h in enumerate(state):
        name = f"cells.{layer}."
        from_x = x @ p[name + "weight_ih"].T + p[name + "bias_ih"]
        from_h = h @ p[name + "weight_hh"].T + p[name + "bias_hh"]
        (xr, xz, xn), (hr, hz, hn) = jnp.split(from_x, 3, -1), jnp.split(from_h, 3, -1)
        z = jax.nn.sigmoid(xz + hz)
        n = jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
        x = (1 - z) * n + z * h
        after.append(x)
    return x, tuple(after)


CELLS = {"lstm": _lstm, "lnlstm": _layer_norm_lstm, "gru": _gru}


def make(problem: Problem) -> Call:
    """A jitted call that waits for its result."""
    cell = CELLS[problem.case.kind]

    def value(p: Any, state: Any, x: Any, y: Any) -> Any:
        def step(state: Any, x_t: Any) -> tuple[Any, Any]:
            h, state = cell(p, x_t, state)
            return state, h @ p["readout.weight"].T + p["readout.bias"]

        _, out = lax.scan(step, state, x)
        return jnp.square(out - y).mean()

    segment = jax.value_and_grad(value)
    if problem.case.per_sequence:
        segment = jax.vmap(segment, in_axes=(None, 0, 0, 0))
    compiled = jax.jit(segment)
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in problem.params.items()}
    state = tuple(jnp.asarray(leaf.numpy()) for leaf in problem.state)
    x, y = jnp.asarray(problem.x.numpy()), jnp.asarray(problem.y.numpy())

    def call() -> Result:
        return jax.block_until_ready(compiled(params, state, x, y))

    return call
