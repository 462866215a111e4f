"""What readouts end with, batched over the steps, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ftbptt import make_train_segment, reference_segment

from ..cells.problems import B, Draw, H, Problem
from ..oracle import assert_close, check

# What a readout often ends with: batched over the steps, so torch must have a rule for vmap.
READOUTS = {
    "softmax": lambda o: F.softmax(o, -1),
    "log_softmax": lambda o: F.log_softmax(o, -1),
    "attention": lambda o: F.scaled_dot_product_attention(o, o + 1, o - 1),
    "layer norm": lambda o: F.layer_norm(o, o.shape[-1:]),
    "gelu": F.gelu,
    "lerp by unit": lambda o: torch.lerp(o, o.sin(), o[0, 0]),
    "addcmul by unit": lambda o: torch.addcmul(o[0, 0], o, o[0, 0], value=0.5),
    "addcdiv by unit": lambda o: torch.addcdiv(o, o[0, 0], 2 + o.sin(), value=0.5),
    "average pooling": lambda o: F.avg_pool1d(o, 3, 1, 1),
    "max pooling": lambda o: F.max_pool1d(o, 3, 1, 1),
    "resizing": lambda o: F.interpolate(F.interpolate(o, 5), H, mode="linear"),
    "padding": lambda o: F.pad(o, (1, 2), mode="replicate"),
    "sampling": lambda o: F.grid_sample(
        o.unsqueeze(2), _grid(o).view(1, 1, 5, 2).expand(B, -1, -1, -1), align_corners=False
    ).squeeze(2),
    "spectrum": lambda o: torch.fft.rfft(o).abs(),
    "bilinear": lambda o: F.bilinear(o, o.sin(), o[0, 0].outer(o[0, 0]).expand(2, H, H)),
    "solve a vector": lambda o: torch.linalg.solve(_definite(o), o.squeeze(1)).unsqueeze(1),
    "solve by one": lambda o: torch.linalg.solve(_definite(o)[0], o.mT).mT,
    "triangular": lambda o: torch.linalg.solve_triangular(_definite(o), o.mT, upper=True).mT,
}  # fmt: skip


# By the same rules as some of those.
MORE_READOUTS = {
    "sampling up to the corners": lambda o: F.grid_sample(
        o.unsqueeze(2), _grid(o).view(1, 1, 5, 2).expand(B, -1, -1, -1), align_corners=True
    ).squeeze(2),
    # Of which only the places have a gradient, not the image.
    "sampling a constant": lambda o: F.grid_sample(
        torch.arange(6).view(1, 1, 2, 3).to(o).expand(B, -1, -1, -1),
        o[..., :4].tanh().view(B, 2, 1, 2),
        align_corners=False,
    ).squeeze(1),
    "adaptive pooling": lambda o: F.adaptive_max_pool1d(o, 3) + F.adaptive_avg_pool1d(o, 3),
    "solve by row": lambda o: torch.linalg.solve(_definite(o), o.mT).mT,
    "solve one": lambda o: torch.linalg.solve(_definite(o), o[0].T).mT,
    "Cholesky": lambda o: torch.linalg.cholesky(_definite(o))[:, :1],
}


def _grid(o: Tensor) -> Tensor:
    return torch.linspace(-0.9, 0.9, 10, dtype=o.dtype)


def _definite(o: Tensor) -> Tensor:
    return torch.eye(H).to(o) + o * o.mT


# Over the steps, of which a loss sees all.
OVER_TIME = {
    "spectrum": lambda out: torch.fft.rfft(out, dim=0).abs(),
    "short spectra": lambda out: torch.stft(
        out[..., 0].T, 4, return_complex=True, window=torch.ones(4).to(out)
    ).abs(),
    "coarser": lambda out: F.avg_pool1d(out.permute(1, 2, 0), 2),
    "finer": lambda out: F.interpolate(out.permute(1, 2, 0), scale_factor=2, mode="linear"),
}


def with_readouts(readouts: dict[str, Any]) -> Problem:
    def step(params: Any, x_t: Tensor, h: Tensor) -> Any:
        h = torch.tanh(x_t @ params["w"] + h)
        return {name: of(h.view(B, 1, H)) for name, of in readouts.items()}, h

    def loss(out: Any, y: Tensor) -> Tensor:
        errors = sum((o - y.mean()).square().mean() for o in out.values())
        last = list(out.values())[-1].flatten(2)
        return errors + sum(of(last).square().mean() for of in OVER_TIME.values())

    draw = Draw(1)
    params, state = {"w": draw(H, H)}, draw(B, H)
    return Problem(step, params, state, draw.sequence(B, H), draw.sequence(B, H), loss)


def test_readouts() -> None:
    made = with_readouts(MORE_READOUTS)
    check(make_train_segment(made.step, made.loss, backend="eager"), made, 4)


@pytest.mark.slow
def test_readouts_run_compiled_for_every_length() -> None:
    made = with_readouts(READOUTS)
    segment = make_train_segment(made.step, made.loss, backend="fused")
    check(segment, made, 4)
    compiled = segment.compile_count
    check(segment, made, 9)
    assert segment.compile_count == compiled


@pytest.mark.parametrize("backend", ["eager", pytest.param("fused", marks=pytest.mark.slow)])
def test_outputs_that_are_conjugates(backend: str) -> None:
    """In the loop they are computed when they are stacked, so that a loss may view them as real."""

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Any, Tensor]:
        h = h * params["w"] + x
        return (x.conj(), h.conj()), h

    def loss(out: Any, y: Tensor) -> Tensor:
        return sum(torch.view_as_real(leaf).sub(y).square().mean() for leaf in out)

    draw = Draw(0)
    given = {"w": draw.complex(H)}, draw.complex(B, H), draw.complex(4, B, H), draw(4, 1, 1, 2)
    segment = make_train_segment(step, loss, backend=backend)
    assert_close(segment(*given), reference_segment(step, loss, *given))
