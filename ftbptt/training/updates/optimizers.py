"""What a run needs of an optimizer, and what may be one besides those of ``torch.optim``."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..._trees import Tree, in_order_of, leaf_names, tree_flatten, tree_leaves


@runtime_checkable
class FunctionalOptimizer(Protocol):
    """An optimizer as two pure functions, as is usual in JAX.

    But ``update`` returns the new parameters, not what to add to them, as optax's does.

    >>> class GradientDescent:
    ...     def init(self, params):
    ...         return None
    ...     def update(self, grads, state, params):
    ...         return {name: p - 0.1 * grads[name] for name, p in params.items()}, state
    >>> isinstance(GradientDescent(), FunctionalOptimizer)
    True
    """

    def init(self, params: Tree) -> Tree:
        """init : params -> the optimizer's state before the first update"""

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """update : grads, state, params -> parameters and state after the update

        ``grads`` has the structure of ``params``, with zeros for leaves without a gradient. What
        it returns has the structure of what it was given. It decides what is trained: buffers that
        are passed along with the parameters have gradients too, and are to be returned as they are.
        """


@runtime_checkable
class Sharded(Protocol):
    """An optimizer whose state is sharded over ranks: torch's ``ZeroRedundancyOptimizer``."""

    rank: int

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the state on rank ``to``; a collective."""

    def state_dict(self) -> dict[str, Any]:
        """The full state, on the rank that it was gathered on."""


def functional_update(
    optimizer: FunctionalOptimizer, grads: Tree, state: Tree, params: Tree
) -> tuple[Tree, Tree]:
    """What its ``update`` returns, both with dicts in the order of those before.

    Raises TypeError for anything but a pair, and for parameters or a state of another structure.
    """
    with torch.no_grad():  # else each update would keep the graph of all before it
        result = optimizer.update(grads, state, params)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(
            "optimizer: expected its update(grads, state, params) to return (params, state), found "
            f"{type(result).__name__}."
        )
    # A checkpoint has the leaves in order, and is read into what init returns.
    new_params = _like(params, result[0], "params", "parameters")
    return new_params, _like(state, result[1], "state", "a state")


def _like(before: Tree, returned: Tree, name: str, what: str) -> Tree:
    """What an update has returned, in the order of what it was given; TypeError if it differs."""
    returned = in_order_of(before, returned)
    found, expected = (tree_flatten(tree)[1] for tree in (returned, before))
    if found != expected:
        names, known = leaf_names(name, found), leaf_names(name, expected)
        missing = [f"{leaf} is missing" for leaf in known if leaf not in names]
        unknown = [f"{leaf} is new" for leaf in names if leaf not in known]
        difference = [*missing, *unknown, "its containers are of other types"][0]
        raise TypeError(
            f"optimizer: its update(grads, state, params) returned {what} of another structure "
            f"than {name}: {difference}."
        )
    return returned


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """As ``load_state_dict``, which casts what is kept to the dtype of its parameter."""
    optimizer.load_state_dict(state)
    if isinstance(optimizer, Sharded) or not has_groups(state):
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for index, kept in state["state"].items():
        if not isinstance(index, int) or not isinstance(kept, dict):
            continue  # what an optimizer keeps beside the state of its parameters
        own = optimizer.state[params[index]]
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.dtype != own[name].dtype:
                own[name] = value.to(own[name].device, copy=True)


def has_groups(state: Any) -> bool:
    """Whether an optimizer's state has torch's form; an optimizer may have one of its own."""
    return isinstance(state, dict) and {"state", "param_groups"} <= state.keys()


def check_in_params(optimizer: Optimizer, params: Tree) -> None:
    """Raises ValueError if the optimizer holds a tensor that is not one of ``params``."""
    ids = {id(leaf) for leaf in tree_leaves(params)}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in ids:
                raise ValueError(
                    f"optimizer: its tensor {i} of group {g}, of shape {list(p.shape)}, is not "
                    "one of the tensors in params, so it would never get a gradient. Build the "
                    "optimizer from those tensors: params = dict(model.named_parameters()); "
                    "torch.optim.Adam(params.values())."
                )
