"""The random numbers that data draws its order and its values from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._random_state import random_state, set_random_state


class DataRandomness:
    """The random numbers of iterable data: those of the process, and generators in the data.

    The generators are the ``generator`` of a ``DataLoader`` and of its samplers. On ranks that
    divide the rows of the same chunks, the data draws from a state that is separate from that of
    the process and equal on all ranks (:meth:`separate`), since chunks must come in one order.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._separate_state: dict[str, Any] | None = None

    def snapshot(self) -> dict[str, Any]:
        """What the data is about to draw from."""
        return {
            "random": {name: state for name, state in random_state().items() if name != "cuda"},
            "generators": self.generator_states(),
        }

    def separate(self, snapshot: dict[str, Any]) -> None:
        """From here on the data draws from a snapshot, apart from what the process draws."""
        self._separate_state = snapshot["random"]
        self.set_generator_states(snapshot["generators"])

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """While it is active, the process's random numbers are those of the data."""
        if self._separate_state is None:
            yield
            return
        process_state = random_state()
        set_random_state(self._separate_state)
        try:
            yield
        finally:
            self._separate_state = random_state()
            set_random_state(process_state)

    def set_epoch(self, epoch: int) -> None:
        """Calls ``set_epoch`` where there is one, such as that of a ``DistributedSampler``."""
        for drawer in self.drawers():
            if hasattr(drawer, "set_epoch"):
                drawer.set_epoch(epoch)

    def generator_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def set_generator_states(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)

    def drawers(self) -> list[Any]:
        """The objects that may draw an order: a ``DataLoader`` and its samplers, each once."""
        batch_sampler = getattr(self._data, "batch_sampler", None)
        drawers = [
            self._data,
            getattr(self._data, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        ]
        return list({id(drawer): drawer for drawer in drawers}.values())

    def _generators(self) -> list[torch.Generator]:
        generators = [getattr(drawer, "generator", None) for drawer in self.drawers()]
        return [generator for generator in generators if isinstance(generator, torch.Generator)]
