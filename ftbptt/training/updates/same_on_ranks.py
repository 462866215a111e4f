"""What all ranks of a run must be given alike, compared before they train together."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..._trees import keystr, tree_flatten_with_path, tree_leaves
from ...distributed.ranks import Ranks
from ..data.source import Arrays, Source

Tree = Any


def check_same(
    ranks: Ranks, options: dict[str, Any], params: Tree, state: Tree, source: Source, optimizer: Any
) -> None:
    """Raises ValueError, on all ranks, for an argument that is not the same on all. A collective.

    ``source`` is that of the full data. Ranks with other shapes would send messages of other sizes,
    and ranks with other options would make other updates, or wait for each other.
    """
    own = options | _leaves("params", params) | _leaves("state", state)
    own |= {"data": _data(source), "optimizer": _optimizer(optimizer)}
    given = ranks.gather(own)
    for rank, other in enumerate(given):
        for name in given[0] | other:
            first, found = given[0].get(name), other.get(name)
            if first != found:
                raise ValueError(
                    f"{name}: rank 0 was given {first}, but rank {rank} {found}. Ranks that train "
                    "together need the same."
                )


def _leaves(name: str, tree: Tree) -> dict[str, str]:
    return {f"{name}{keystr(path)}": _leaf(leaf) for path, leaf in tree_flatten_with_path(tree)[0]}


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {list(leaf.shape)}"
    return type(leaf).__name__


def _data(source: Source) -> str:
    if isinstance(source, Arrays):
        leaves = tree_leaves((source.chunk.x, source.chunk.y))
        return f"shapes {[list(leaf.shape) for leaf in leaves if leaf is not None]}"
    return f"{type(source).__name__} of {getattr(source, 'total', None)} steps"


def _optimizer(optimizer: Any) -> str:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        return name
    return f"{name} of {sum(len(group['params']) for group in optimizer.param_groups)} tensors"
