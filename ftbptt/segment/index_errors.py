"""A token or class out of range: torch names neither the tensor nor the number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._trees import leaf_names, tree_flatten, tree_unflatten
from .call import Call


def note_whole_numbers(error: Exception, call: Call, tensors: Sequence[Tensor]) -> None:
    """Adds a note with what the whole numbers of a call are, if the error is of an index."""
    if not any(text in str(error) for text in ("out of range", "out of bounds")):
        return
    groups, (_, state, x, y) = call.groups(tensors), call.specs
    if call.probes:  # x is (x, probes)
        x = tree_flatten(tree_unflatten([0] * x.num_leaves, x)[0])[1]
    ranges = [
        # torch has no minimum of unsigned numbers of 16 bits and more
        f"those of {path} are {int(leaf.long().min())} to {int(leaf.long().max())}"
        for name, spec in (("x", x), ("y", y), ("state", state))
        if spec is not None
        for path, leaf in zip(leaf_names(name, spec), groups[name], strict=False)
        # After such an error no GPU can be asked.
        if _is_whole(leaf) and leaf.is_cpu and leaf.numel()
    ]
    if ranges:
        error.add_note(
            f"ftbptt: an index is out of range, such as a token or class: {', '.join(ranges)}."
        )


def _is_whole(leaf: Tensor) -> bool:
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool)
