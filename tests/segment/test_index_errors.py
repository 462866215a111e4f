"""A token or a class out of range: torch's error names neither the tensor nor the number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, tap


class Reader(nn.Module):
    """Six tokens in, two classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(6, 3), nn.GRUCell(3, 2)

    def forward(self, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(self.embedding(token), h)
        return h, h


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize(
    ("highest", "ranges"),
    [((9, 1), "those of x are 0 to 9, those of y are 0 to 1."),
     ((5, 2), "those of x are 0 to 5, those of y are 0 to 2.")],
)  # fmt: skip
def test_what_is_out_of_range(highest: tuple[int, int], ranges: str, backend: str) -> None:
    reader = Reader()
    segment = make_train_segment(reader, cross_entropy, backend=backend)
    x, y = (torch.arange(12).view(4, 3).clamp(max=number) for number in highest)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)") as caught:
        segment(dict(reader.named_parameters()), torch.zeros(3, 2), x, y)
    assert caught.value.__notes__ == [
        f"ftbptt: an index is out of range, such as a token or class: {ranges}"
    ]


def test_of_unsigned_numbers() -> None:
    """As in a file of tokens, of which torch has no minimum."""

    def step(params: Any, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(params["table"][token.long()] + h)
        return h, h

    segment = make_train_segment(step, lambda out, y: out.mean(), backend="eager")
    tokens = torch.arange(12).view(4, 3).to(torch.uint16)
    with pytest.raises(IndexError) as caught:
        segment({"table": torch.ones(6, 2)}, torch.zeros(3, 2), tokens, None)
    assert caught.value.__notes__[0].endswith("those of x are 0 to 11.")


def test_which_leaf_is_out_of_range() -> None:
    """Flags are not named, nor other numbers; what a segment with taps adds is not counted."""

    class OfDicts(Reader):
        def forward(self, x: Any, state: Any) -> Any:
            token = tap("token", self.embedding(x["rule"])) * x["scale"] * ~x["skip"].unsqueeze(-1)
            h = self.cell(token, state[0])
            return h, (h, state[1] + 1)

    reader, x = OfDicts(), torch.arange(12).view(4, 3)
    data = {"rule": x, "skip": x < 2, "scale": torch.ones(4, 3, 1)}
    state, params = (torch.zeros(3, 2), torch.ones(3).long()), dict(reader.named_parameters())
    for options in ({}, {"taps": ["token"]}):
        segment = make_train_segment(reader, cross_entropy, backend="eager", **options)
        with pytest.raises(IndexError, match=r"out of range") as caught:
            segment(params, state, data, x)
        ranges = "x['rule'] are 0 to 11, those of y are 0 to 11, those of state[1] are 1 to 1."
        assert caught.value.__notes__[-1].endswith(f"such as a token or class: those of {ranges}")


def test_other_errors_have_no_such_note(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    segment = make_train_segment(reader, cross_entropy, backend="eager")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(segment._executables, "_run", fail)
    x = torch.zeros(4, 3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        segment(dict(reader.named_parameters()), torch.zeros(3, 2), x, x)
    assert not hasattr(caught.value, "__notes__")
