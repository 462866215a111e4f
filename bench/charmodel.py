"""The character model, written as any PyTorch user would write it, and what is done with it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .text import Vocabulary

EMBEDDING = 64  # features of a character
State = tuple[Tensor, Tensor]


class CharLM(nn.Module):
    """Embedding, LSTM, readout: ``module(x[K, B], state) -> (logits[K, B, V], state)``."""

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, hidden, layers)
        self.readout = nn.Linear(hidden, vocabulary)
        for name, bias in self.lstm.named_parameters():
            if name.startswith("bias_ih"):
                nn.init.constant_(bias[hidden : 2 * hidden], 1.0)  # the forget gates start open

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        out, state = self.lstm(self.embed(x), state)
        return self.readout(out), state

    def zero_state(self, rows: int) -> State:
        """The state before the first character, for ``rows`` streams."""
        weight = self.readout.weight
        shape = (self.lstm.num_layers, rows, self.lstm.hidden_size)
        return weight.new_zeros(shape), weight.new_zeros(shape)


@torch.no_grad()
def sample(
    model: CharLM, vocabulary: Vocabulary, length: int, temperature: float, seed: int
) -> str:
    """``length`` characters drawn from the model, one after the other, from a zero state."""
    generator = torch.Generator().manual_seed(seed)
    device = model.readout.weight.device
    start = "\n" if "\n" in vocabulary.characters else vocabulary.characters[-1]
    code, state, codes = vocabulary.characters.index(start), model.zero_state(1), []
    for _ in range(length):
        logits, state = model(torch.tensor([[code]], device=device), state)
        scores = logits[0, 0].float().cpu() / temperature
        scores[0] = -torch.inf  # never the unknown character
        code = int(torch.multinomial(scores.softmax(0), 1, generator=generator))
        codes.append(code)
    return vocabulary.decode(codes)


def save_model(path: Path, model: CharLM, vocabulary: Vocabulary, settings: dict[str, Any]) -> None:
    """Writes the model to a temporary file beside ``path`` and renames it: never half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(
                {
                    "model": model.state_dict(),
                    "vocabulary": "".join(vocabulary.characters),
                    "settings": settings,
                },
                file,
            )
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
