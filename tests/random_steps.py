"""Random steps, drawn by hypothesis: what an engineer might write, and what nobody would.

A recipe is plain data, so that a failing one can be printed, kept and made a test of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .problem import B, Draw, H, Problem, mse, per_row, per_step

Tree = Any
WEIGHTS = 3
ORDER = [3, 0, 6, 1, 5, 2, 4]  # of the H features

# Values by kind: "v" vectors [B, H], "m" matrices [B, H, H], "i" counts [B], "b" flags [B, H].
# Operations by name: what they take and give, and what they do with weights ``w`` at hand.
OPERATIONS: dict[str, tuple[str, str, Callable[..., Tensor]]] = {
    # elementwise
    "tanh": ("v", "v", lambda w, a: torch.tanh(a)),
    "sigmoid": ("v", "v", lambda w, a: torch.sigmoid(a)),
    "gelu": ("v", "v", lambda w, a: F.gelu(a)),
    "softplus": ("v", "v", lambda w, a: F.softplus(a)),
    "relu": ("v", "v", lambda w, a: torch.relu(a)),
    "bell": ("v", "v", lambda w, a: torch.exp(-a * a)),
    "root": ("v", "v", lambda w, a: (a * a + 0.1).sqrt()),
    "clamp": ("v", "v", lambda w, a: a.clamp(-0.4, 0.7)),
    "half": ("v", "v", lambda w, a: 0.5 * a),
    "negate": ("v", "v", lambda w, a: -a),
    "detach": ("v", "v", lambda w, a: a.detach()),
    "add": ("vv", "v", lambda w, a, b: a + b),
    "subtract": ("vv", "v", lambda w, a, b: a - b),
    "multiply": ("vv", "v", lambda w, a, b: a * b),
    "gate": ("vv", "v", lambda w, a, b: torch.sigmoid(a) * b),
    "lerp": ("vv", "v", lambda w, a, b: torch.lerp(a, b, 0.3)),
    "maximum": ("vv", "v", lambda w, a, b: torch.maximum(a, b)),
    "greater": ("vv", "b", lambda w, a, b: a > b),
    "where": ("bvv", "v", lambda w, c, a, b: torch.where(c, a, b)),
    "cast flag": ("b", "v", lambda w, c: c.to(torch.float64)),
    # over the features
    "softmax": ("v", "v", lambda w, a: torch.softmax(a, -1)),
    "log softmax": ("v", "v", lambda w, a: torch.log_softmax(a, -1)),
    "layer norm": ("v", "v", lambda w, a: F.layer_norm(a, (H,), w[0][0], w[0][1])),
    "centre": ("v", "v", lambda w, a: a - a.mean(-1, keepdim=True)),
    "largest": ("v", "v", lambda w, a: a - a.amax(-1, keepdim=True)),
    "normalise": ("v", "v", lambda w, a: F.normalize(a, dim=-1)),
    "cumulate": ("v", "v", lambda w, a: a.cumsum(-1) / H),
    # views, joins
    "shift": ("v", "v", lambda w, a: torch.cat([a[:, 1:], a[:, :1]], -1)),
    "flip": ("v", "v", lambda w, a: a.flip(-1)),
    "order": ("v", "v", lambda w, a: a[:, ORDER]),
    "parts": ("v", "v", lambda w, a: torch.cat(a.split([2, 4, 1], -1)[::-1], -1)),
    "halves": ("vv", "v", lambda w, a, b: torch.cat([a[:, : H // 2], b[:, H // 2 :]], -1)),
    "stack": ("vv", "v", lambda w, a, b: torch.stack([a, b], 1).mean(1)),
    "expand": ("v", "v", lambda w, a: a.unsqueeze(1).expand(-1, 3, -1).sum(1) / 3),
    "join": ("vv", "v", lambda w, a, b: torch.cat([a, b], -1) @ torch.cat([w[0], w[1]], 0)),
    # with weights
    "matmul": ("v", "v", lambda w, a: a @ w[0]),
    "transposed": ("v", "v", lambda w, a: a @ w[1].T),
    "linear": ("v", "v", lambda w, a: F.linear(a, w[2], w[0][0])),
    "product": ("v", "v", lambda w, a: a @ (w[0] @ w[1].T / H)),
    "scaled": ("v", "v", lambda w, a: a * w[2][0]),
    "einsum": ("v", "v", lambda w, a: torch.einsum("bi,ji->bj", a, w[1])),
    "convolve": (
        "v", "v", lambda w, a: F.conv1d(a.unsqueeze(1), w[0][:1, None, :3], padding=1).squeeze(1)
    ),
    "embed": ("i", "v", lambda w, n: F.embedding(n % 4, w[2])),
    # matrices, counts
    "outer": ("vv", "m", lambda w, a, b: a.unsqueeze(2) * b.unsqueeze(1)),
    "fade": ("m", "m", lambda w, m: 0.5 * m),
    "sum": ("mm", "m", lambda w, m, n: m + n),
    "gate rows": ("mv", "m", lambda w, m, a: m * torch.sigmoid(a).unsqueeze(2)),
    "read": ("mv", "v", lambda w, m, a: torch.bmm(m, a.unsqueeze(2)).squeeze(2)),
    "row": ("m", "v", lambda w, m: m[:, 1] + m.mean(1)),
    "count": ("v", "i", lambda w, a: (a > 0).sum(-1)),
    "plus": ("ii", "i", lambda w, n, k: (n + k) % 5),
}  # fmt: skip
_BY_RESULT = {
    kind: [name for name, (_, gives, _) in OPERATIONS.items() if gives == kind] for kind in "vmib"
}


@dataclass(frozen=True)
class Recipe:
    """``operations`` append values to [x_t, *state]; the next state and out pick from the values.

    ``leaves`` are the kinds of the state's leaves, ``shape`` how they are nested; ``bounded`` says
    which are squashed, as what may grow without bound is. ``rows``: whether there are resets and
    padding, of each row.
    """

    operations: tuple[tuple[str, tuple[int, ...]], ...]
    leaves: str
    shape: int
    after: tuple[int, ...]
    bounded: tuple[bool, ...]
    outs: tuple[int, ...]
    loss: str
    start: str
    tied: bool
    seed: int


LOSSES = {"scalar": mse, "per step": per_step, "per row": per_row}
_LEAVES = ["v", "v", "v", "vv", "vv", "vvv", "vi", "vm", "vvi", "vmv"]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    leaves = draw(st.sampled_from(_LEAVES))
    kinds = ["v", *leaves]  # of the values so far, x_t first
    operations = []
    for _ in range(draw(st.integers(1, 10))):
        known = [n for n, (takes, _, _) in OPERATIONS.items() if set(takes) <= set(kinds)]
        name = draw(st.sampled_from(known))
        takes, gives, _ = OPERATIONS[name]
        operations.append((name, tuple(_pick(draw, kinds, kind) for kind in takes)))
        kinds.append(gives)
    return Recipe(
        tuple(operations),
        leaves,
        draw(st.integers(0, 3)),
        tuple(_pick(draw, kinds, kind) for kind in leaves),
        tuple(draw(st.booleans()) for _ in leaves),
        tuple(_pick(draw, kinds, "v") for _ in range(draw(st.integers(1, 2)))),
        draw(st.sampled_from(sorted(LOSSES))),
        draw(st.sampled_from(["zeros", "given", "learned"])),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )


def _pick(draw: st.DrawFn, kinds: list[str], kind: str) -> int:
    """A value of that kind, mostly a late one, so that the graph is deep."""
    fitting = [i for i, own in enumerate(kinds) if own == kind]
    return draw(st.one_of(st.sampled_from(fitting[-3:]), st.sampled_from(fitting)))


def nested(leaves: list[Any], shape: int) -> Tree:
    """The leaves of a state in one of four nestings."""
    if shape == 0:
        return tuple(leaves)
    if shape == 1:
        return {f"leaf {i}": leaf for i, leaf in enumerate(leaves)}
    if shape == 2:
        return {"first": [leaves[0]], "rest": {"own": tuple(leaves[1:])}}
    return leaves[0] if len(leaves) == 1 else [leaves[0], (leaves[1:],)]


def problem_of(recipe: Recipe) -> Problem:
    """The recipe as a problem: ``rows`` flags are for the caller to draw."""
    draw = Draw(recipe.seed)
    weights = [draw(H, H, scale=0.4) for _ in range(WEIGHTS)]
    params: dict[str, Tensor] = {f"w{i}": weight for i, weight in enumerate(weights)}
    if recipe.tied:
        params["w2"] = params["w0"]
    params["start"] = draw(H)
    made = {
        "v": lambda: draw(B, H),
        "m": lambda: draw(B, H, H),
        "i": lambda: torch.arange(B),
    }
    state = nested([made[kind]() for kind in recipe.leaves], recipe.shape)
    spec = tree_flatten(state)[1]

    def step(params: dict[str, Tensor], x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        w = [params[f"w{i}"] for i in range(WEIGHTS)]
        values = [x_t, *tree_flatten(state)[0]]
        own = len(values)
        for name, places in recipe.operations:
            values.append(OPERATIONS[name][2](w, *(values[i] for i in places)))
        after = [
            torch.tanh(values[i]) if kind != "i" and (bounded or i >= own) else values[i]
            for i, kind, bounded in zip(recipe.after, recipe.leaves, recipe.bounded, strict=True)
        ]
        # A sum: what of it is never read by the loss has no gradient.
        return sum(values[i] for i in recipe.outs), tree_unflatten(after, spec)  # type: ignore[return-value]

    x, y = draw.sequence(B, H), draw.sequence(B, H)
    return Problem(step, params, state, x, y, LOSSES[recipe.loss])


def start_of(recipe: Recipe, state: Tree) -> Any:
    """``initial_state=`` of the recipe: None, a state, or a function of the parameters."""
    if recipe.start == "zeros":
        return None
    leaves, spec = tree_flatten(state)
    if recipe.start == "given":
        return tree_unflatten(
            [leaf + 1 if leaf.dtype == torch.int64 else leaf / 2 for leaf in leaves], spec
        )

    def learned(params: dict[str, Tensor]) -> Tree:
        own = [
            params["start"].expand(leaf.shape)
            if leaf.is_floating_point()
            else torch.zeros_like(leaf)
            for leaf in leaves
        ]
        return tree_unflatten(own, spec)

    return learned
