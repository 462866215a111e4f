"""What autograd's graph says of results that were computed with gradients."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def leaves_behind(
    results: Iterable[Tensor], other_than_through: Iterable[Tensor] = ()
) -> dict[int, Tensor]:
    """The leaves, such as parameters, that have a gradient from the results, by their ``id``.

    ``other_than_through``: results on the way whose own history does not count.
    """
    visited = {tensor.grad_fn for tensor in other_than_through}
    stack = [tensor.grad_fn for tensor in results]
    leaves: dict[int, Tensor] = {}
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad
            leaves[id(node.variable)] = node.variable
        stack += [next_node for next_node, _ in node.next_functions]
    return leaves
