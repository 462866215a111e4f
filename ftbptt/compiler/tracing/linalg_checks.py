"""Factorizations that fail in a step: their results are NaN.

``torch.linalg.cholesky`` of a matrix that is not positive definite raises an error, which is known
only when the matrix is. In a loop that runs in one kernel nothing can be raised, and the results of
the factorization are finite and wrong. So they become NaN, which shows in the loss.
"""

from __future__ import annotations

import math

from torch import fx

from ..graphs import aten, new_node, owner_of, value_of


def is_check(node: fx.Node) -> bool:
    """Whether it checks a factorization. (torch 2.11 would remove it, since nothing reads it.)"""
    return node.target is aten._linalg_check_errors.default


def failures_as_nan(module: fx.GraphModule) -> None:
    """Replaces each check of a factorization by NaN where it would have raised."""
    graph = module.graph
    for check in list(filter(is_check, graph.nodes)):
        info = owner_of(check.args[0])
        factorization = info.args[0]
        with graph.inserting_before(info.next):  # the last part: others are read after it
            has_failed = new_node(graph, aten.ne.Scalar, info, 0)
            for part in list(factorization.users):
                value = value_of(part)
                if not (value.is_floating_point() or value.is_complex()):
                    continue
                failed = has_failed
                for _ in range(value.dim() - value_of(info).dim()):
                    failed = new_node(graph, aten.unsqueeze.default, failed, -1)
                result = new_node(graph, aten.masked_fill.Scalar, part, failed, math.nan)
                part.replace_all_uses_with(result, lambda user, own=result: user is not own)
        graph.erase_node(check)
    module.recompile()
