"""What torch knows of the call that runs: its transforms, its tensors, its device and its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter
from torch.autograd import forward_ad


def inside_functorch() -> bool:
    """Whether a ``torch.func`` transform (vmap, grad, ...) is active around this call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_derivative() -> bool:
    """Whether ``torch.func.grad``, ``vjp`` or ``jvp`` is among the active transforms."""
    functorch = torch._C._functorch
    kinds = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(level.key() in kinds for level in functorch.get_interpreter_stack() or ())


def inside_dual_level() -> bool:
    """Whether ``torch.autograd.forward_ad`` differentiates, as ``torch.func.linearize`` has it."""
    return forward_ad._current_level >= 0


class VmapLevel:
    """The innermost active ``torch.func`` transform, which is a vmap.

    torch's public way to it, an autograd.Function with a rule for vmap, goes through the arguments
    and results as trees several times: it took three tenths of the call of a small segment (2.11 to
    2.15: ``torch._functorch.pyfunctorch``, ``torch._C._functorch``).
    """

    def __init__(self, interpreter: VmapInterpreter) -> None:
        self._interpreter, self._level = interpreter, interpreter.level()

    @classmethod
    def innermost(cls) -> VmapLevel | None:
        """None outside of all transforms; raises RuntimeError if it is another than vmap."""
        if not inside_functorch():
            return None
        interpreter = retrieve_current_functorch_interpreter()
        if not isinstance(interpreter, VmapInterpreter):
            kind = interpreter.key().name.lower()
            raise RuntimeError(f"a segment runs under torch.func.vmap, but not under {kind}.")
        return cls(interpreter)

    @property
    def size(self) -> int:
        return self._interpreter.batch_size()

    @property
    def randomness(self) -> str:
        return self._interpreter.randomness()

    def unwrapped(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """The tensor, with the axis of this level as one of its own, and which that is."""
        inner, dim = torch._C._functorch._unwrap_batched(tensor, self._level)
        return inner, dim

    def wrapped(self, tensor: Tensor, dim: int) -> Tensor:
        wrapped: Tensor = torch._C._functorch._add_batch_dim(tensor, dim, self._level)
        return wrapped

    def outside(self) -> AbstractContextManager[Any]:
        """Within it, the transform is not active."""
        return self._interpreter.lower()


def may_have_tangent(tensor: Tensor) -> bool:
    """Whether ``torch.func.jvp`` is active, and the tensor belongs to a transform."""
    functorch = torch._C._functorch
    stack, jvp = functorch.get_interpreter_stack() or (), functorch.TransformType.Jvp
    is_tracked = any(level.key() == jvp for level in stack)
    return is_tracked and bool(functorch.is_gradtrackingtensor(tensor))


def clear_cublas_workspaces() -> None:
    """Forgets the memory that cuBLAS works in, which it gets anew when it is next called.

    What it gets in a capture lies in the graph's pool, and must not outlive that; torch's own
    graphs in torch._inductor.cudagraph_trees do the same.
    """
    torch._C._cuda_clearCublasWorkspaces()


def end_recording(device: torch.device, pool: Any) -> None:
    """After a capture that failed: allocations no longer go to its pool."""
    torch._C._cuda_endAllocateToPool(device.index, pool)


def is_view_of(tensor: Tensor, memory: Tensor) -> bool:
    """Whether a tensor is a view of another, and no copy, as far as autograd knows."""
    return tensor._base is memory


def memory_of(tensor: Tensor) -> int:
    """What tensors in the same memory share, also while tracing, where none has an address."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor) or functorch.is_batchedtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)  # itself it has no memory
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place, as autograd counts it."""
    return 0 if tensor.is_inference() else int(tensor._version)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """The same of many, quicker."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # one of inference mode has none
        return [version_of(tensor) for tensor in tensors]


def is_fake(value: Tensor) -> bool:
    """Whether a tensor has no values of its own: it was made while something was traced."""
    from torch._subclasses.fake_tensor import is_fake

    return is_fake(value) or torch._is_functional_tensor(value)


def is_from_outside(tensor: Tensor) -> bool:
    """Whether a tensor that a function gets while it is traced was made before that."""
    return not (is_fake(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, in one kernel for those of one dtype.

    What ``torch.optim`` uses for its ``foreach`` variants; torch has no public name for it. Given
    several dtypes at once, it copies one tensor after the other.
    """
    by_dtype: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        own = by_dtype.setdefault((target.dtype, source.dtype), ([], []))
        own[0].append(target)
        own[1].append(source)
    for own_targets, own_sources in by_dtype.values():
        torch._foreach_copy_(own_targets, own_sources)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the group's collectives wait for a rank.

    A group tells it to nobody else than its backends, and another one for the same ranks should
    have the same (2.11 to 2.13: ``ProcessGroup._get_backend(device).options._timeout``).
    """
    device = torch.device("cpu" if "gloo" in dist.get_backend_config(group) else "cuda")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
