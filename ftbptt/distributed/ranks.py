"""The processes that train together: who they are, and what they tell each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from .._trees import tree_leaves

Tree = Any
Result = TypeVar("Result")


class RankFailed(RuntimeError):
    """Another rank has left the run, died, or did not answer within the group's time-out."""


class Ranks:
    """The ranks of a one-dimensional mesh, or of a process group.

    Raises TypeError for anything else, ValueError for a mesh of more dimensions.
    """

    def __init__(self, mesh: DeviceMesh | ProcessGroup) -> None:
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                raise ValueError(
                    f"mesh: expected one dimension, over which rows are shared, found {mesh.ndim}. "
                    "Give a part of it, mesh['rows']."
                )
            mesh = mesh.get_group()
        if not isinstance(mesh, ProcessGroup):
            raise TypeError(
                "mesh: expected a DeviceMesh or a ProcessGroup, found "
                f"{type(mesh).__name__}. torch.distributed.device_mesh.init_device_mesh makes one."
            )
        self.group = mesh
        self.rank, self.size = dist.get_rank(mesh), dist.get_world_size(mesh)
        self.alive = True  # as far as is known, all of them

    def begin_alike(self, params: Tree) -> None:
        """All ranks begin with the parameters of the first, written in place.

        Raises :class:`RankFailed`.
        """
        source = dist.get_global_rank(self.group, 0)
        with torch.no_grad():
            for leaf in tree_leaves(params):
                if isinstance(leaf, Tensor):
                    own = leaf.detach().contiguous()
                    try:
                        dist.broadcast(own, source, group=self.group)
                    except RuntimeError as error:
                        raise self.lost(error) from error
                    leaf.copy_(own)

    def all_do(self, do: Callable[[], Result]) -> Result:
        """What ``do`` returns, once it has succeeded on all ranks.

        Raises its error where it failed, and :class:`RankFailed` on the others.
        """
        result, error = None, None
        try:
            result = do()
        except RankFailed:  # there is nobody to tell
            raise
        except Exception as own:
            error = own
        said = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, words in enumerate(said):
            if words is not None:
                raise RankFailed(f"rank {rank}: {words}")
        return cast(Result, result)

    def gather(self, own: Any) -> list[Any]:
        """What each rank gives, on all of them. Raises :class:`RankFailed`."""
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, own, group=self.group)
        except RuntimeError as error:
            raise self.lost(error) from error
        return found

    def add_up(self, tensor: Tensor) -> dist.Work:
        """Begins to add up a tensor over the ranks, in place. Raises :class:`RankFailed`."""
        try:
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.lost(error) from error
        assert work is not None
        return work

    def wait(self, work: dist.Work) -> None:
        """Ends what :meth:`add_up` began. Raises :class:`RankFailed`."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(error) from error

    def lost(self, error: Exception) -> RankFailed:
        """There is nobody to talk to any more."""
        self.alive = False
        return RankFailed(
            f"rank {self.rank}: another rank died, or did not answer in time ({error})."
        )
