"""Which rows, or which models, are those of a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from .._trees import keystr, tree_flatten_with_path, tree_map
from .ranks import Ranks

Tree = Any


def share_of(rows: int, rank: int, size: int) -> range:
    """The rows of a rank, the same number for each, or one more for the first ones."""
    if rows < size:
        raise ValueError(
            f"mesh: {size} ranks share the rows of the data, but there are only {rows} "
            "rows. Give more rows or fewer ranks."
        )
    each, more = divmod(rows, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def own_models(tree: Tree, mesh: DeviceMesh | ProcessGroup, dim: int = 0) -> Tree:
    """own_models : tree of [M, ...], mesh -> tree of [own M, ...]

    The share of this rank in an ensemble: of stacked parameters, states and data, the models that
    it trains. Models have nothing to do with each other, so ``torch.vmap`` over those of each rank
    is all of an ensemble on many ranks: nothing is sent. ``dim`` is the axis of the models. The
    shares are copies.

    Raises ValueError if there are fewer models than ranks, or leaves differ in their number.

    >>> import tempfile
    >>> import torch.distributed as dist
    >>> meeting = tempfile.mktemp()
    >>> dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,))
    >>> own = own_models({"w": torch.zeros(6, 2, 3)}, mesh)
    >>> own["w"].shape, all_models(own, mesh)["w"].shape
    (torch.Size([6, 2, 3]), torch.Size([6, 2, 3]))
    >>> dist.destroy_process_group()
    """
    ranks = Ranks(mesh)
    leaves = tree_flatten_with_path(tree)[0]
    count = None
    for path, leaf in leaves:
        here = leaf.shape[dim]
        if here < ranks.size:
            raise ValueError(
                f"tree{keystr(path)}: {ranks.size} ranks share the models, but there are {here} on "
                f"axis {dim}. Give more models, fewer ranks or another dim."
            )
        if count is not None and here != count:
            raise ValueError(
                f"tree{keystr(path)}: has {here} models on axis {dim}, but "
                f"tree{keystr(leaves[0][0])} has {count}. All leaves need the axis of the models."
            )
        count = here

    def own(leaf: Tensor) -> Tensor:
        part = share_of(leaf.shape[dim], ranks.rank, ranks.size)
        return leaf.narrow(dim, part.start, len(part)).clone()

    return tree_map(own, tree)


def all_models(tree: Tree, mesh: DeviceMesh | ProcessGroup, dim: int = 0) -> Tree:
    """all_models : tree of [own M, ...], mesh -> tree of [M, ...], on every rank

    The shares of all ranks as one: what :func:`own_models` has taken apart. To be called by all.
    """
    ranks = Ranks(mesh)
    return tree_map(
        lambda leaf: torch.cat([own.to(leaf.device) for own in ranks.gather(leaf.cpu())], dim),
        tree,
    )
