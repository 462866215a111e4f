"""Tensors outside that a step or a loss computes with: written to between the calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ftbptt import make_train_segment, reference_segment
from ftbptt.segment import execute

from ..cells.problems import Draw
from ..oracle import assert_close

STEPS, ROWS, UNITS = 5, 2, 3


def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(x_t + h @ params["u"])
    return h, h


@pytest.mark.parametrize(
    "most_uncut", [1 << 20, pytest.param(0, marks=pytest.mark.slow)], ids=["one program", "chunks"]
)
def test_a_loss_reads_what_they_are_now(most_uncut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler takes those of a few elements for numbers, if they are not inputs."""
    monkeypatch.setattr(execute, "_UNCUT_BYTES", most_uncut)
    beta, weight, z = torch.tensor(0.0), torch.ones(UNITS), torch.zeros(UNITS, dtype=torch.cfloat)
    negated = z.conj().imag  # a view, whose negation is still to be done
    assert negated.is_neg()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        classes = F.cross_entropy(out.flatten(0, 1), y.flatten(), weight.double())
        return classes + beta * out.square().mean() + (out * negated).mean()

    draw = Draw(0)
    given = (
        {"u": draw(UNITS, UNITS)}, draw(ROWS, UNITS), draw(STEPS, ROWS, UNITS),
        torch.randint(UNITS, (STEPS, ROWS)),
    )  # fmt: skip
    segment = make_train_segment(step, loss, backend="compile")
    for value in (0.0, 0.5, 2.0):
        beta.fill_(value)
        weight[1] = 1 + value
        z.imag.fill_(value)
        expected = reference_segment(step, loss, *given)
        assert_close(segment(*given), expected)
        assert_close(segment.evaluate(*given).loss, expected.loss)
    assert segment.trace_count == 1


@pytest.mark.parametrize("backend", ["eager", pytest.param("compile", marks=pytest.mark.slow)])
def test_the_parts_of_one_whose_conjugation_is_pending(backend: str) -> None:
    z = torch.complex(torch.rand(UNITS), torch.rand(UNITS)).cdouble()
    conjugated = z.conj()
    assert conjugated.is_conj()

    def rotated(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t * conjugated.real + h @ params["u"] * conjugated.imag)
        return h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out * conjugated.imag - y * torch.view_as_real(conjugated.conj())[:, 0]).sum()

    draw = Draw(0)
    x, y = draw(STEPS, ROWS, UNITS), draw(STEPS, ROWS, UNITS)
    given = {"u": draw(UNITS, UNITS)}, draw(ROWS, UNITS), x, y
    segment = make_train_segment(rotated, loss, backend=backend)
    for _ in range(2):
        assert_close(segment(*given), reference_segment(rotated, loss, *given))
        z.mul_(1j)
