"""Sources of windows, read to their end, and runs on them, for tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ftbptt import TrainSegment, make_train_segment
from ftbptt.contract.layout import Layout
from ftbptt.training import Chunk, Source, Stream, Truncation, train_stream
from ftbptt.training.data.chunk import TimeAxes
from ftbptt.training.data.source import as_source

from .streams import cross_entropy, stream, tagger, zeros


class Table:
    """As a table of pandas: its own indices are labels, and it takes no tuples of slices."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape = numpy.asarray(array), tuple(array.shape)
        self.iloc = self.array  # which has positions

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return numpy.array(self.array, dtype)

    def to_numpy(self) -> Any:
        return self.array

    def keys(self) -> Any:
        return range(len(self.array))

    def __getitem__(self, labels: Any) -> Any:
        raise KeyError(labels)


class Frame(Table):
    """As one of polars: it has no labels, but takes no tuples either."""

    def __init__(self, array: Any) -> None:
        super().__init__(array)
        del self.iloc

    def __getitem__(self, steps: Any) -> Frame:
        if isinstance(steps, tuple):
            raise TypeError(steps)
        return Frame(self.array[steps])


def of(data: Any, time_dim: int = 0) -> Source:
    return as_source(data, lambda x: TimeAxes.of(Layout(time_dim)))


def windows(source: Source, k1: int, k2: int | None = None, epoch: int = 0) -> list[Chunk]:
    """What an epoch reads, windows overlapping by ``k2 - k1``."""
    source.begin(epoch)
    truncation, found, at = Truncation(k1, k2 or k1), [], 0
    while (
        chunk := source.read(truncation.window(at).start, truncation.window(at).end)
    ) is not None:
        found.append(chunk)
        at += 1
        if at > 1000:
            raise AssertionError("a source without an end")
    return found


def assert_same(found: list[Chunk], expected: list[Chunk]) -> None:
    assert len(found) == len(expected) > 0
    for own, other in zip(found, expected, strict=True):
        for name, a, b in zip(own._fields, own, other, strict=True):
            assert (a is None) == (b is None), name
            for leaf, like in zip(tree_leaves(a), tree_leaves(b), strict=True):
                if like is not None:
                    assert torch.equal(leaf, like), name


def cut(chunk: Chunk, lengths: list[int], axis: int = 0) -> list[Chunk]:
    """A whole stream in chunks of these lengths, and what is left."""
    total = tree_leaves(chunk.x)[0].shape[axis]
    ends = [min(sum(lengths[: i + 1]), total) for i in range(len(lengths))]
    axes = TimeAxes.of(Layout(axis))
    return [axes.cut(chunk, a, b) for a, b in zip([0, *ends], [*ends, total], strict=True)]


def everything(steps: int, rows: int = 3) -> Chunk:
    """x and y with leaves, a reset for each row and a mask for all of them."""
    x, y = stream(steps, rows)
    generator = torch.Generator().manual_seed(steps)
    reset = torch.rand(steps, rows, generator=generator) < 0.3
    mask = torch.rand(steps, generator=generator) < 0.7
    return Chunk({"a": x, "b": (y, x[..., 0])}, y, reset, mask)


@cache
def made() -> tuple[nn.Module, TrainSegment]:
    module = tagger()
    return module, make_train_segment(module, cross_entropy, backend="eager")


def train(data: Any, **options: Any) -> Stream:
    module, segment = made()
    module.load_state_dict(tagger().state_dict())
    params = dict(module.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    return train_stream(
        segment, params, zeros(3), data, optimizer, **({"k1": 4, "progress": False} | options)
    )


def losses_of(data: Any, **options: Any) -> list[float]:
    return [update.loss.item() for update in train(data, **options)]
