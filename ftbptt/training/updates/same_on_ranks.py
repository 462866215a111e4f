"""What all ranks of a run must be given alike, compared before they train together."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data.distributed import DistributedSampler

from ..._trees import Tree, keystr, tree_flatten_with_path, tree_leaves
from ...distributed.ranks import Ranks
from ..data.chunk_stream import ChunkStream
from ..data.source import Arrays, Source
from .optimizers import Sharded


def check_same(
    ranks: Ranks, options: dict[str, Any], trees: dict[str, Tree], source: Source, optimizer: Any
) -> None:
    """Raises ValueError, on all ranks, for an argument that is not the same on all. A collective.

    Of ``trees`` the shapes are compared. ``source`` is that of the full data. Ranks with other
    shapes would send messages of other sizes, and ranks with other options would make other
    updates, or wait for each other.
    """
    own = dict(options)
    for name, tree in trees.items():
        own |= _leaves(name, tree)
    own |= {"data": _data(source)} | _optimizer(optimizer)
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
        frozen = isinstance(leaf, nn.Parameter) and not leaf.requires_grad
        return f"{leaf.dtype} {list(leaf.shape)}" + (", frozen" if frozen else "")
    return type(leaf).__name__


def _data(source: Source) -> str:
    """Raises ValueError for data that each rank reads a part of, by a ``DistributedSampler``."""
    if isinstance(source, Arrays):
        leaves = tree_leaves((source.chunk.x, source.chunk.y))
        leaves = [leaf for leaf in leaves if leaf is not None]
        begins = [leaf[:1].sum().item() for leaf in leaves]  # not those of a rank's own part
        return f"shapes {[list(leaf.shape) for leaf in leaves]}, which begin with sums {begins}"
    if isinstance(source, ChunkStream):
        for drawer in source.randomness.drawers():
            if isinstance(drawer, DistributedSampler):
                raise ValueError(
                    "data: its DistributedSampler gives each rank a part of the data, of which it "
                    "would train on a part again. Leave the sampler out: with mesh= the ranks read "
                    "the same batches, and share out their rows."
                )
    return f"{type(source).__name__} of {getattr(source, 'total', None)} steps"


def _optimizer(optimizer: Any) -> dict[str, str]:
    """Its class, options and state. That of a sharded one differs from rank to rank."""
    found = {"optimizer": type(optimizer).__name__}
    if not isinstance(optimizer, Optimizer):
        return found
    for i, group in enumerate(optimizer.param_groups):
        name = f"optimizer.param_groups[{i}]"
        found[name] = f"{len(group['params'])} tensors"
        for option, value in group.items():
            if option != "params":
                value = value.item() if isinstance(value, Tensor) else value
                found[f"{name}[{option!r}]"] = repr(value)
    if not isinstance(optimizer, Sharded):
        kept = [optimizer.state.get(p, {}) for g in optimizer.param_groups for p in g["params"]]
        sums = [float(leaf.abs().sum()) for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)]
        # Rounded: devices of several kinds may differ in the last digits.
        found["optimizer.state"] = f"{len(sums)} tensors with a sum of {sum(sums):.6g}"
    return found
