"""The processes that train together, and the collectives that they use."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

# Its functions have the default group of the time of their import as a default argument, and torch
# imports it late: then the group outlives its end, see Ranks.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from .._trees import Tree, keystr, tree_flatten_with_path, tree_leaves

Result = TypeVar("Result")


_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
_LETTING_GO = 0.2  # seconds


@atexit.register
def _await_threads() -> None:
    """Gives the threads of groups time for what they still do after the last collective.

    A group's threads end with the group, but not even after ``destroy_process_group`` if something
    holds it, as a DeviceMesh does. A thread of gloo ends the process (SIGABRT, torch 2.13) if it
    lets go of a collective's tensors only when the interpreter shuts down.
    """
    if len(_groups):
        time.sleep(_LETTING_GO)


class RankFailed(RuntimeError):
    """Another rank left the run, died, or did not answer within the group's time-out.

    Also raised once the process group was destroyed:

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ranks = Ranks(dist.group.WORLD)
    >>> dist.destroy_process_group()
    >>> ranks.group
    Traceback (most recent call last):
    ftbptt.distributed.ranks.RankFailed: mesh: its process group was destroyed, so the ranks ...
    """


class Ranks:
    """The ranks of a one-dimensional mesh, or of a process group.

    Raises TypeError for anything else, ValueError for a mesh of more dimensions.
    """

    def __init__(self, mesh: DeviceMesh | ProcessGroup) -> None:
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                raise ValueError(
                    f"mesh: expected one dimension, over which rows are shared, found {mesh.ndim}. "
                    "Pass one dimension of it, such as mesh['rows']."
                )
            mesh = mesh.get_group()
        if not isinstance(mesh, ProcessGroup):
            raise TypeError(
                "mesh: expected a DeviceMesh or a ProcessGroup, found "
                f"{type(mesh).__name__}. torch.distributed.device_mesh.init_device_mesh makes one."
            )
        self._group = weakref.ref(mesh)  # not held: see _await_threads
        _groups.add(mesh)
        self.rank, self.size = dist.get_rank(mesh), dist.get_world_size(mesh)
        self.alive = True  # False once a collective has failed
        self._aside: torch.cuda.Stream | None = None

    @property
    def group(self) -> ProcessGroup:
        """Raises :class:`RankFailed` once the group was destroyed."""
        group = self._group()
        if group is None:
            raise RankFailed("mesh: its process group was destroyed, so the ranks cannot go on.")
        return group

    def broadcast_params(self, params: Tree) -> None:
        """Overwrites the parameters with those of the first rank, in place.

        Raises ValueError if the ranks cannot communicate from a parameter's device, and
        :class:`RankFailed`.
        """
        self._check_devices(params)
        source = dist.get_global_rank(self.group, 0)
        with torch.no_grad():
            for leaf in tree_leaves(params):
                if isinstance(leaf, Tensor):
                    buffer = leaf.detach().contiguous()
                    with self._collective():
                        dist.broadcast(buffer, source, group=self.group)
                    leaf.copy_(buffer)

    def _check_devices(self, params: Tree) -> None:
        backends = dist.get_backend_config(self.group)  # such as cpu:gloo,cuda:nccl
        devices = [pair.split(":")[0] for pair in backends.split(",")]
        for path, leaf in tree_flatten_with_path(params)[0]:
            if isinstance(leaf, Tensor) and leaf.device.type not in devices:
                raise ValueError(
                    f"params{keystr(path)}: is on {leaf.device}, but the ranks of mesh communicate "
                    f"from {' and '.join(devices)} ({backends}). Move the parameters there, or "
                    "give init_process_group a backend for both."
                )

    def all_do(self, do: Callable[[], Result]) -> Result:
        """The result of ``do()``, once it has succeeded on all ranks. A collective.

        Raises its error on the rank where it failed, and :class:`RankFailed` on the others.
        """
        result, error = None, None
        try:
            result = do()
        except RankFailed:  # the other ranks cannot be reached
            raise
        except Exception as exception:
            error = exception
        messages = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise RankFailed(f"rank {rank}: {message}")
        return cast(Result, result)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order. A collective. Raises :class:`RankFailed`."""
        values: list[Any] = [None] * self.size
        with self._collective():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def sum_numbers(self, numbers: list[float], device: torch.device) -> list[float]:
        """The sums over the ranks of what each knows. A collective. Raises :class:`RankFailed`.

        On a GPU it waits for the collectives before it, but not for the work that is queued.
        """
        if device.type == "cuda" and self._aside is None:
            self._aside = torch.cuda.Stream(device)
        with nullcontext() if self._aside is None else torch.cuda.stream(self._aside):
            sums = torch.tensor(numbers, dtype=torch.float64, device=device)
            self.wait(self.start_sum(sums))
            result: list[float] = sums.tolist()
        return result

    def start_sum(self, tensor: Tensor) -> dist.Work:
        """Starts to sum a tensor over the ranks, in place. Raises :class:`RankFailed`."""
        with self._collective():
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return work

    def wait(self, work: dist.Work) -> None:
        """Waits for what :meth:`start_sum` started. Raises :class:`RankFailed`."""
        with self._collective():
            work.wait()

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Within it, an error of torch becomes :class:`RankFailed`."""
        try:
            yield
        except RuntimeError as error:
            raise self.lost(error) from error

    def lost(self, error: Exception) -> RankFailed:
        """The error to raise when a collective failed; none can be used after that."""
        self.alive = False
        return RankFailed(
            f"rank {self.rank}: another rank died, or did not answer in time ({error})."
        )
