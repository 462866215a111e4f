"""A token or class out of range: torch names neither the tensor nor the number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def note_whole_numbers(error: Exception, groups: Mapping[str, Sequence[Tensor]]) -> None:
    """Adds a note with what the whole numbers of a call are, if the error is of an index."""
    if not any(text in str(error) for text in ("out of range", "out of bounds")):
        return
    ranges = [
        f"those of {name} are {int(leaf.min())} to {int(leaf.max())}"
        for name in ("x", "y", "state")
        for leaf in groups[name]
        # After such an error no GPU can be asked.
        if not (leaf.is_floating_point() or leaf.is_complex()) and leaf.is_cpu and leaf.numel()
    ]
    if ranges:
        error.add_note(
            f"ftbptt: an index is out of range, such as a token or class: {', '.join(ranges)}."
        )
