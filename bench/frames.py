"""One long sequence of frames in which rare events change the label of all frames after them.

A frame shows one of ``MODES`` events, or nothing but noise; its label is the last event's mode. So
a model that forgets at the start of each chunk can only guess until the next event, and one whose
state is carried can know.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ftbptt import TrainSegment, as_step, make_train_segment
from ftbptt.training import evaluate_stream, train_stream

MODES = 4
State = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """One LSTM layer and a readout, as such models are written: batch first, double precision."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MODES + 1, hidden, batch_first=True)
        self.readout = nn.Linear(hidden, MODES)
        with torch.no_grad():  # the forget gates start open: Jozefowicz et al., 2015
            self.lstm.get_parameter("bias_ih_l0")[hidden : 2 * hidden] = 2.0
        self.double()

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        out, state = self.lstm(x, state)
        return self.readout(out), state


def frames(count: int, between: float, seed: int) -> tuple[Tensor, Tensor]:
    """(x[1, T, 5], labels y[1, T]); events are ``between`` frames apart on average."""
    generator = torch.Generator().manual_seed(seed)
    is_event = torch.rand(count, generator=generator) < 1 / between
    is_event[0] = True
    events = torch.randint(MODES, (count,), generator=generator)
    latest = torch.where(is_event, torch.arange(count), 0).cummax(0).values
    shown = F.one_hot(events, MODES) * is_event.unsqueeze(1)
    noise = 0.1 * torch.randn(count, MODES + 1, generator=generator).double()
    x = torch.cat([shown, torch.ones(count, 1)], 1).double() + noise
    return x.unsqueeze(0), events[latest].unsqueeze(0)


def loss(scores: Tensor, y: Tensor) -> Tensor:
    """Cross entropy, the mean over all frames."""
    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


class Accuracy:
    """The share of frames whose highest score is that of their label."""

    def __init__(self) -> None:
        self.right = self.count = 0

    def update(self, scores: Tensor, y: Tensor) -> None:
        self.right += int((scores.argmax(-1) == y).sum())
        self.count += len(y)

    def compute(self) -> float:
        return self.right / self.count


@cache
def compiled(hidden: int) -> tuple[Classifier, TrainSegment]:
    """A model and its segment, compiled once for all runs."""
    model = Classifier(hidden)
    return model, make_train_segment(as_step(model, sequence=True), loss)


def learn(
    count: int, between: float, hidden: int, k: int, *, fresh: bool, rate: float = 3e-3
) -> float:
    """The accuracy on other frames after one pass over ``count``, states as in training.

    ``fresh``: the state starts anew in each chunk of ``k`` frames, in training and after it.
    """
    model, train_segment = compiled(hidden)
    torch.manual_seed(0)
    model.load_state_dict(Classifier(hidden).state_dict())
    params = dict(model.named_parameters())
    state = (torch.zeros(1, 1, hidden).double(), torch.zeros(1, 1, hidden).double())
    optimizer = torch.optim.Adam(params.values(), lr=rate, fused=True)
    data = frames(count, between, seed=1)
    run = train_stream(
        train_segment, params, state, data, optimizer, k1=k, fresh=fresh, clip_norm=1.0,
        progress=False,
    )  # fmt: skip
    for _ in run:
        pass
    return accuracy(train_segment, params, state, frames(count // 10, between, seed=2), k, fresh)


def accuracy(
    train_segment: TrainSegment,
    params: Mapping[str, Tensor],
    state: State,
    data: tuple[Tensor, Tensor],
    k: int,
    fresh: bool,
) -> float:
    """The share of the frames in ``data`` that is labelled correctly."""
    metric = Accuracy()
    chunks = list(zip(data[0].split(k, 1), data[1].split(k, 1), strict=True))
    for part in chunks if fresh else [data]:
        evaluate_stream(train_segment, params, state, part, k=k, metrics={"accuracy": metric})
    return metric.compute()
