"""Segments with a context, and segments that give the states between their steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ftbptt import make_train_segment, reference_segment

from ..cells import CELLS, problem, slow_but
from ..cells.problems import B
from ..kernels.test_fused import QUICK
from ..oracle import assert_close
from ..sequences import sequences, stacked


def check_context(name: str, backend: str) -> None:
    """Also the shortest segment that has a loss at all."""
    given = problem(name)
    options = {"time_dim": given.time_dim or None, "context": 3}
    segment = make_train_segment(given.step, given.loss, backend=backend, **options)
    for steps in (7, 4, 5):
        arguments = given.data(steps)
        expected = reference_segment(given.step, given.loss, *arguments, **options)
        assert_close(segment(*arguments), expected)
    assert segment.trace_count == 1


@pytest.mark.parametrize("name", slow_but([*QUICK, "gru_batch_first"], CELLS))
def test_context(name: str) -> None:
    check_context(name, "eager")


@pytest.mark.parametrize("name", slow_but(["lstm_readout"], ["lstm_readout", "gru_batch_first"]))
def test_context_compiled(name: str) -> None:
    check_context(name, "fused")


def test_a_context_changes_the_gradient_but_not_the_rest() -> None:
    given = problem("lstm_readout")
    arguments = given.data(7)
    whole = reference_segment(given.step, given.loss, *arguments)
    behind = reference_segment(given.step, given.loss, *arguments, context=2)
    assert_close((behind.state, behind.out), (whole.state, whole.out))
    assert not torch.equal(behind.loss, whole.loss)
    leaves = zip(tree_leaves(behind.grads), tree_leaves(whole.grads), strict=True)
    assert any(not torch.allclose(a, b) for a, b in leaves)


def test_context_with_mask_reset_and_vmap() -> None:
    given = problem("lstm_cell")
    generator = torch.Generator().manual_seed(0)
    reset, mask = (torch.rand(7, B, generator=generator) < p for p in (0.3, 0.6))
    segment = make_train_segment(given.step, given.loss, backend="eager", context=2)
    rows: Any = {"reset": reset, "mask": mask}
    expected = reference_segment(given.step, given.loss, *given.data(7), context=2, **rows)
    assert_close(segment(*given.data(7), **rows), expected)
    calls = sequences("lstm_cell", 5)
    state, x, y = (stacked([call[i] for call in calls]) for i in (1, 2, 3))
    found = torch.func.vmap(segment, in_dims=(None, 0, 0, 0))(given.params, state, x, y)
    for i, call in enumerate(calls):
        own = reference_segment(given.step, given.loss, given.params, *call[1:], context=2)
        assert_close(found.loss[i], own.loss)
        assert_close([leaf[i] for leaf in tree_leaves(found.grads)], tree_leaves(own.grads))


@pytest.mark.parametrize("name", slow_but([*QUICK, "gru_batch_first"], CELLS))
def test_states_between_the_steps(name: str) -> None:
    """The state before step 4 is that behind a segment of 4 steps."""
    given = problem(name)
    options: Any = {"time_dim": given.time_dim or None}
    segment = make_train_segment(given.step, given.loss, backend="eager", **options)
    segment = segment.variant(states=True)
    arguments = given.data(7)
    found = segment(*arguments)
    expected = reference_segment(given.step, given.loss, *arguments, **options)
    out, states = found.out
    assert_close(found._replace(out=out), expected)
    layout = segment.layout(arguments[2])
    between = reference_segment(given.step, given.loss, *given.data(4), **options).state
    for leaf, wanted in zip(tree_leaves(states), tree_leaves(between), strict=True):
        assert_close(layout.at_step(leaf, 4), wanted)


@pytest.mark.parametrize(
    ("context", "kind", "words"),
    [
        (-1, ValueError, "context: expected at least 0, found -1"),
        (2.0, TypeError, "context: expected a whole number, found 2.0"),
        (True, TypeError, "context: expected a whole number, found True"),
    ],
)
def test_bad_context(context: Any, kind: type[Exception], words: str) -> None:
    given = problem("elman")
    with pytest.raises(kind, match=words):
        make_train_segment(given.step, given.loss, context=context)


def test_a_segment_of_context_alone() -> None:
    given = problem("elman")
    segment = make_train_segment(given.step, given.loss, backend="eager", context=5)
    with pytest.raises(ValueError, match="x: has 5 steps, all of them context without a loss"):
        segment(*given.data(5))
