"""Pooling, padding and sampling of images for all steps at once: time joins the batch.

Each channel of each image is on its own there, so the first axis may as well be longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..graphs import aten
from .convolution import in_front


def image_operations() -> Iterator[Any]:
    """The operations that :func:`images_over_time` is for, and their gradients."""
    for name in (
        "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
        "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d",
        "adaptive_max_pool3d", "replication_pad1d", "replication_pad2d",
        "replication_pad3d", "grid_sampler_2d", "grid_sampler_3d",
    ):  # fmt: skip
        yield getattr(aten, name).default
        yield getattr(aten, f"{name}_backward").default


def images_over_time(
    operation: Callable[..., Any], steps: Any, dims: Any, *args: Any
) -> tuple[Any, Any]:
    """vmap's rule for such an operation."""
    moved = [in_front(steps, dim, arg) for dim, arg in zip(dims, args, strict=True)]
    shape = steps, next(arg.shape[1] for arg in moved if isinstance(arg, Tensor))
    joined = [arg.flatten(0, 1) if isinstance(arg, Tensor) else arg for arg in moved]
    values = operation(*joined)
    if isinstance(values, Tensor):
        return values.unflatten(0, shape), 0
    # A gradient that nothing needs, as by an image of the data that is sampled, is None.
    dims = tuple(None if value is None else 0 for value in values)
    return tuple(v if v is None else v.unflatten(0, shape) for v in values), dims
