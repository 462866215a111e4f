"""Updates of several processes together: one gradient, the mean over the valid steps of all.

Each process (rank) trains on rows of its own. Before an update the ranks add up their gradients,
each times its valid steps, in a few flat buckets, and the numbers that all must agree on: whether
anybody still has data, whether losses are to be read now, whether somebody has to stop.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from .._compat import tree_leaves
from .checkpoint import save_checkpoint
from .measured import Measured
from .optimizing import Learner

Tree = Any
_BUCKET_BYTES = 25 << 20
_STOPS, _FAILED = 1, 2  # what a rank can say of itself


class Joined(NamedTuple):
    """What the ranks made together. ``measured`` is None if no rank had a window.

    ``due``: losses are to be read. ``stopping`` and ``failed`` are the ranks that said so.
    """

    measured: Measured | None
    grads: list[Tensor]
    due: bool
    stopping: list[int]
    failed: list[int]


class RankFailed(RuntimeError):
    """Another rank has left the run."""


class Together:
    """The ranks of a one-dimensional mesh, or of a process group."""

    def __init__(self, mesh: DeviceMesh | ProcessGroup, dtype: torch.dtype | None = None) -> None:
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
        self.group, self.dtype = mesh, dtype
        self.rank, self.size = dist.get_rank(mesh), dist.get_world_size(mesh)
        # Where a group can add up the few numbers that ranks tell each other.
        on_host = "gloo" in dist.get_backend_config(mesh)
        self.device = torch.device("cpu" if on_host else f"cuda:{torch.cuda.current_device()}")
        self.bytes_reduced = 0  # what this rank has put into reductions of gradients
        self.broken = False  # there is nobody to talk to

    def share(self, params: Tree) -> None:
        """All ranks begin with the parameters of the first."""
        source = dist.get_global_rank(self.group, 0)
        with torch.no_grad():
            for leaf in tree_leaves(params):
                if isinstance(leaf, Tensor):
                    own = leaf.detach().contiguous()
                    dist.broadcast(own, source, group=self.group)
                    leaf.copy_(own)

    def update(
        self, learner: Learner, measured: Measured | None, index: int, due: bool, stops: bool
    ) -> tuple[Measured | None, bool, bool]:
        """The windows of all ranks from this one's: (what was measured, due, whether to stop).

        The learner has their gradient then. ``measured`` is None without a window. Raises
        :class:`RankFailed` if another rank has left the run.
        """
        grads = None
        if measured is not None and learner.gathered is not None:
            grads = learner.gathered[0]
        joined = self.join(learner.trained, grads, measured, due=due, stops=stops)
        if joined.failed:
            said = self.messages(None)
            raise RankFailed(f"rank {joined.failed[0]} has left the run: {said[joined.failed[0]]}")
        if joined.stopping and not stops:
            warnings.warn(
                f"ftbptt: rank {joined.stopping[0]} stops the run before update {index}.",
                RuntimeWarning,
                stacklevel=2,
            )
        learner.gathered = None
        if joined.measured is not None:
            learner.gathered = joined.grads, joined.measured.weight
        return joined.measured, joined.due, bool(joined.stopping)

    def close(self, learner: Learner) -> None:
        """The run has ended, on all ranks; an error on one of them is still heard of."""
        if not self.broken:
            self.update(learner, None, 0, False, False)
            self.broken = True

    def tell(self, error: BaseException, learner: Learner) -> None:
        """This rank leaves the run while the others wait for it: they learn why."""
        if self.broken or isinstance(error, RankFailed):
            return
        self.broken = True
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, GeneratorExit):
            words = "its loop over the run was left"
        try:
            self.join(learner.trained, None, None, failed=True)
            self.messages(words)
        except RuntimeError as failed:
            error.add_note(f"ftbptt: the other ranks could not be told: {failed}")

    def join(
        self,
        like: list[Tensor],
        grads: list[Tensor] | None,
        measured: Measured | None,
        *,
        due: bool = False,
        stops: bool = False,
        failed: bool = False,
    ) -> Joined:
        """Every rank's part of an update; to be called by all of them.

        ``like`` are the parameters that have a gradient; ``grads`` and ``measured`` are None where
        this rank has no window. ``due`` is asked of the first rank alone.
        """
        weight, loss = 0.0, 0.0
        if measured is not None:
            if measured.loss.dim():
                raise ValueError(
                    "mesh: ranks share the mean of one loss, but the segment returns one of shape "
                    f"{list(measured.loss.shape)}. An ensemble needs no mesh: each rank trains its"
                    " own."
                )
            weight, loss = float(measured.weight), float(measured.loss)
        has_window = measured is not None
        tokens = 0 if measured is None else measured.tokens
        own = [0] * self.size
        own[self.rank] = _FAILED if failed else _STOPS * stops
        told = torch.tensor(
            [weight, weight * loss if weight else 0.0, tokens, has_window,
             due and self.rank == 0, *own],
            dtype=torch.float64, device=self.device,
        )  # fmt: skip
        flat = [self._flat(own, weight) for own in _buckets(like, grads)]
        self._add_up([told, *flat])
        self.bytes_reduced += sum(bucket.nbytes for bucket in flat)
        total, weighted, all_tokens, windows, due_for_all, *said = told.tolist()
        joined = None
        if windows:
            mean = torch.tensor(weighted / max(total, 1.0), dtype=like[0].dtype.to_real())
            steps = 0 if measured is None else measured.steps
            joined = Measured(mean, int(total), steps, int(all_tokens))
        return Joined(
            joined,
            self._mean(like, flat, max(total, 1.0)),
            bool(due_for_all),
            [rank for rank, word in enumerate(said) if word == _STOPS],
            [rank for rank, word in enumerate(said) if word == _FAILED],
        )

    def messages(self, own: str | None) -> list[str | None]:
        """What each rank has to say."""
        said: list[str | None] = [None] * self.size
        dist.all_gather_object(said, own, group=self.group)
        return said

    def agreed(self, own: set[int]) -> set[int]:
        """The numbers that all ranks have."""
        found: list[set[int]] = [set()] * self.size
        dist.all_gather_object(found, own, group=self.group)
        return set.intersection(*found)

    def file(self, path: Path) -> Path:
        """Where this rank keeps its checkpoint."""
        return path.with_name(f"{path.name}.rank{self.rank}of{self.size}")

    def common(self, contents: list[Any], path: Path) -> Any:
        """The newest of a rank's checkpoints that was made at an update of which all have one.

        None if no rank has any. Raises ValueError if they have none in common, and where there are
        those of another number of ranks.
        """
        stem = path.name.rpartition(".rank")[0]
        own = self.file(path.with_name(stem)).name.replace(f"rank{self.rank}of", "rank0of")
        others = [
            found.name
            for found in path.parent.glob(f"{stem}.rank0of*")
            if found.name != own and not found.name.startswith(f"{own}.")
        ]
        by_index = {content["index"]: content for content in reversed(contents)}
        agreed = self.agreed(set(by_index))
        if agreed:
            found = by_index[max(agreed)]
            if contents[0]["index"] != found["index"]:
                # What this rank did alone is not to be kept as the one before the next.
                save_checkpoint(path, found)
            return found
        if any(self.messages("has one" if contents else None)) or others:
            raise ValueError(
                f"checkpoint: {path.with_name(stem)} has none that all {self.size} ranks could go "
                "on from. Resume on as many ranks as the run was started on; to start anew, delete "
                "what is there."
            )
        return None

    def _add_up(self, tensors: list[Tensor]) -> None:
        try:
            waiting = [dist.all_reduce(t, group=self.group, async_op=True) for t in tensors]
            for work in waiting:
                work.wait()
        except RuntimeError as error:
            self.broken = True
            raise RankFailed(
                f"rank {self.rank}: another rank died, or did not answer in time ({error})."
            ) from error

    def _flat(self, bucket: list[Tensor], weight: float) -> Tensor:
        flat = torch.cat([leaf.reshape(-1) for leaf in bucket])
        if flat.is_complex():
            flat = torch.view_as_real(flat)
        flat = flat * weight if weight else torch.zeros_like(flat)  # 0 times NaN would be NaN
        return flat if self.dtype is None else flat.to(self.dtype)

    def _mean(self, like: list[Tensor], flat: list[Tensor], total: float) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for places, bucket in zip(_places(like), flat, strict=True):
            first = like[places[0]]
            own = bucket.to(first.dtype.to_real()) / total
            own = torch.view_as_complex(own) if first.is_complex() else own
            parts = own.split([like[i].numel() for i in places])
            for i, part in zip(places, parts, strict=True):
                found[i] = part.reshape(like[i].shape)
        return [found[i] for i in range(len(like))]


def _places(like: list[Tensor]) -> list[list[int]]:
    """The leaves of each bucket: of one dtype, one device and a limited size, the last first.

    The reverse loop is done with the last layer first.
    """
    buckets: list[list[int]] = []
    open_ones: dict[Any, tuple[list[int], int]] = {}
    for i in reversed(range(len(like))):
        key = (like[i].dtype, like[i].device)
        own, size = open_ones.get(key, ([], 0))
        if not own or size + like[i].nbytes > _BUCKET_BYTES:
            own, size = [], 0
            buckets.append(own)
        own.append(i)
        open_ones[key] = own, size + like[i].nbytes
    return buckets


def _buckets(like: list[Tensor], grads: list[Tensor] | None) -> list[list[Tensor]]:
    leaves = like if grads is None else grads
    return [[leaves[i].detach() for i in places] for places in _places(like)]
