"""Which rows, or which models of an ensemble, each rank gets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from .._trees import Tree, keystr, tree_flatten_with_path, tree_map
from .ranks import Ranks


def share_of(rows: int, rank: int, size: int) -> range:
    """The rows of a rank: contiguous, and as even as possible, the first ranks having one more."""
    if rows < size:
        raise ValueError(
            f"mesh: {size} ranks share the rows of the data, but there are only {rows} "
            "rows. Give more rows or fewer ranks."
        )
    each, more = divmod(rows, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def own_models(tree: Tree, mesh: DeviceMesh | ProcessGroup, dim: int = 0) -> Tree:
    """own_models : tree of [M, ...], mesh -> tree of [m, ...], about M / ranks of the models

    This rank's share of an ensemble, copied from the stacked parameters, states or data of all M
    models. The models are independent, so each rank trains its share under ``torch.vmap``, without
    communication. ``dim`` is the axis of the models.

    Raises TypeError for a leaf that is no tensor, and ValueError for one without that axis, if
    there are fewer models than ranks, or if the leaves differ in their number.

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
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"tree{keystr(path)}: expected a tensor of all models, stacked on axis {dim}, "
                f"found {type(leaf).__name__}. Leave out what the models have in common."
            )
        if not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(
                f"tree{keystr(path)}: expected the models on axis {dim}, found shape "
                f"{list(leaf.shape)}. Leave out what they have in common, or give another dim."
            )
        first_path, first = leaves[0]
        count, first_count = leaf.shape[dim], first.shape[dim]
        if count < ranks.size:
            raise ValueError(
                f"tree{keystr(path)}: {ranks.size} ranks share the models, but there are {count} "
                f"on axis {dim}. Give more models, fewer ranks or another dim."
            )
        if count != first_count:
            raise ValueError(
                f"tree{keystr(path)}: has {count} models on axis {dim}, but "
                f"tree{keystr(first_path)} has {first_count}. All leaves need the axis of the "
                "models."
            )

    def share(leaf: Tensor) -> Tensor:
        part = share_of(leaf.shape[dim], ranks.rank, ranks.size)
        own = leaf.narrow(dim, part.start, len(part)).clone()
        # A copy of a parameter has a history, with which optimizers take it for no parameter.
        return own.detach().requires_grad_() if leaf.requires_grad and leaf.is_leaf else own

    return tree_map(share, tree)


def all_models(tree: Tree, mesh: DeviceMesh | ProcessGroup, dim: int = 0) -> Tree:
    """all_models : tree of [m, ...], mesh -> tree of [M, ...], on every rank

    Joins the shares of all ranks: the inverse of :func:`own_models`, with an example there. All
    ranks must call it. Raises :class:`RankFailed` if one does not answer.
    """
    ranks = Ranks(mesh)

    def join(leaf: Tensor) -> Tensor:
        # A copy: with a view, all of the memory that it is a part of would be sent.
        parts = ranks.gather(leaf.detach().cpu().clone())
        joined = torch.cat([part.to(leaf.device) for part in parts], dim)
        return joined.requires_grad_() if leaf.requires_grad and leaf.is_leaf else joined

    return tree_map(join, tree)
