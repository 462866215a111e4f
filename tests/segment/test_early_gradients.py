"""Gradients that are handed over in parts are those of the segment, each once and in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ftbptt import make_train_segment
from ftbptt.backends import EAGER
from ftbptt.contract.output import EarlyGradients
from ftbptt.segment import execute

from ..cells import CELLS, REPRESENTATIVE, problem, slow_but
from ..cells.problems import Draw, Problem
from ..oracle import assert_close, reference

STEPS = 37


def check_parts(given: Problem, backend: str) -> Any:
    """The last leaves first, in three parts; what was handed over is what is returned."""
    segment = make_train_segment(
        given.step, given.loss, backend=backend, time_dim=given.time_dim or None
    )
    count = len(tree_leaves(given.params))
    order = list(reversed(range(count)))
    parts = [own for own in (order[:1], order[1:3], order[3:]) if own]
    handed: list[list[Tensor]] = []
    losses: list[Tensor] = []

    def ready(loss: Tensor, grads: list[Tensor]) -> None:
        losses.append(loss)
        handed.append([grad.clone() for grad in grads])

    early = EarlyGradients(parts, ready)
    for _ in range(2):  # the second call is recalled
        handed.clear()
        found = segment.with_early_gradients(early, *given.data(STEPS))
        assert_close(found, reference(given, STEPS))
        assert len(handed) == len(parts)
        leaves = tree_leaves(found.grads)
        for part, own in zip(parts, handed, strict=True):
            for i, grad in zip(part, own, strict=True):
                assert torch.equal(grad, leaves[i])
    assert all(torch.equal(loss, found.loss) for loss in losses)
    return segment


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CELLS))
def test_eager(name: str, in_chunks: None) -> None:
    check_parts(problem(name), "eager")


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CELLS))
def test_of_a_small_cell(name: str) -> None:
    check_parts(problem(name), "eager")


@pytest.mark.parametrize("name", slow_but(["embedding_tied"], CELLS))
def test_fused(name: str, in_chunks: None) -> None:
    check_parts(problem(name), "fused")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm_readout", "embedding_tied", "layer_norm_lstm"])
def test_compiled(name: str, in_chunks: None) -> None:
    segment = check_parts(problem(name), "compile")
    assert segment.trace_count == 1
    built = segment.compile_count
    check_again = segment.with_early_gradients(
        EarlyGradients([[0]], lambda loss, grads: None), *problem(name).data(5)
    )
    assert_close(check_again, reference(problem(name), 5))
    assert segment.compile_count <= built + 2  # other parts, for any K


def test_an_error_in_what_is_called_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``auto`` it was taken for one of the backend, which another one made up for."""
    monkeypatch.setattr(
        "ftbptt.segment.executables.choose", lambda name: replace(EAGER, name="fused")
    )
    given = problem("gru_cell")
    segment = make_train_segment(given.step, given.loss)

    def ready(loss: Tensor, grads: list[Tensor]) -> None:
        raise ConnectionError("a peer is gone")

    with pytest.raises(ConnectionError, match="a peer is gone"):
        segment.with_early_gradients(EarlyGradients([[0], [1]], ready), *given.data(3))


def test_a_backend_that_fails_between_two_parts(
    in_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was handed over is not handed over again: the ranks would send it twice."""
    failing = replace(EAGER, name="fused")
    monkeypatch.setattr("ftbptt.segment.executables.choose", lambda name: failing)
    given, handed = problem("lstm_readout"), []
    segment = make_train_segment(given.step, given.loss)
    run = execute.Executable.run_chunk

    def fail(self: Any, name: Any, *args: Any) -> Any:
        if handed and self.backend is failing:
            raise RuntimeError("no room")
        return run(self, name, *args)

    monkeypatch.setattr(execute.Executable, "run_chunk", fail)
    early = EarlyGradients([[3], [2], [0, 1]], lambda loss, grads: handed.append(len(grads)))
    with pytest.warns(RuntimeWarning, match="the fused backend failed for .*no room"):
        found = segment.with_early_gradients(early, *given.data(STEPS))
    assert handed == [1]
    assert_close(found, reference(given, STEPS))


def test_the_first_is_there_before_the_others(in_chunks: None, monkeypatch: Any) -> None:
    """When a part is handed over, those after it have not been computed."""
    given = problem("lstm_readout")
    segment = make_train_segment(given.step, given.loss, backend="eager")
    done: list[Any] = []
    run = execute.Executable.run_chunk

    def noting(self: Any, name: Any, *args: Any) -> Any:
        done.append(name)
        return run(self, name, *args)

    monkeypatch.setattr(execute.Executable, "run_chunk", noting)
    early = EarlyGradients([[3], [2], [0, 1]], lambda loss, grads: done.append("handed over"))
    segment.with_early_gradients(early, *given.data(STEPS))
    ends = done[done.index("recurrences") :]
    assert [n if isinstance(n, str) else n[0] for n in ends] == [
        "recurrences", "part", "handed over", "part", "handed over", "part", "handed over", "part",
    ]  # fmt: skip


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


def test_a_gradient_that_is_clipped_after_the_recurrence(in_chunks: None) -> None:
    """No windows are added up before it, for which it would be refused."""
    draw = Draw(0)

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z: Tensor = _Clip.apply(x_t @ params["w"])  # type: ignore[no-untyped-call]
        h = torch.tanh(z + h @ params["u"])
        return h, h

    params = {"w": draw(5, 5), "u": draw(5, 5)}
    sequences = draw.sequence(3, 5), draw.sequence(3, 5)
    given = Problem(step, params, draw(3, 5), *sequences, lambda out, y: (out - y).square().sum())
    check_parts(given, "eager")
