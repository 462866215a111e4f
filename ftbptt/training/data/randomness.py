"""The random numbers that data draws its order and its values from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._interrupt import uninterrupted
from ..._random_state import random_state, seed_random_state, set_random_state


class DataRandomness:
    """The random numbers of iterable data: global ones, and those of generators in the data.

    The generators are the ``generator`` of a ``DataLoader`` and of its samplers. Of the global ones
    an epoch begins with the process's, so that a ``DataLoader`` has the order of a plain loop.
    After the first chunk the data draws from a state of its own (:meth:`branch`), so that what
    training draws between two chunks does not matter when they are read again. A list draws
    nothing, and leaves the process's numbers alone.

    On ranks that divide the rows of the same chunks, a state that is equal on all ranks takes the
    place of the process's (:meth:`separate`), since chunks must come in one order.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._is_separate = False  # on ranks
        self._own_state: dict[str, Any] | None = None  # None: the data draws from the process's
        self._process_state: dict[str, Any] | None = None  # while the data draws from its own
        self._after_branch: dict[str, Any] | None = None  # what the data has branched off from

    def snapshot(self) -> dict[str, Any]:
        """What the data is about to draw from."""
        return {
            "random": {name: state for name, state in random_state().items() if name != "cuda"},
            "generators": self.generator_states(),
        }

    def separate(self, snapshot: dict[str, Any]) -> None:
        """From here on the data draws from a snapshot, apart from what the process draws."""
        self._is_separate, self._own_state = True, snapshot["random"]
        self.set_generator_states(snapshot["generators"])

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """While it is active, the process's random numbers are those of the data."""
        try:
            if self._own_state is not None:
                with uninterrupted():
                    self._process_state = random_state()
                    set_random_state(self._own_state)
            yield
        finally:
            if self._process_state is not None:  # also if the data has branched off by now
                with uninterrupted():
                    self._own_state = random_state()
                    set_random_state(self._process_state)
                    self._process_state = None

    def branch(self) -> None:
        """While :meth:`drawing`: from here on, the data draws from a state of its own.

        Its seed is drawn from what the data drew from so far.
        """
        if type(self._data) is list:
            return
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        self._after_branch = random_state()
        if not self._is_separate:
            self._process_state = self._after_branch
        seed_random_state(seed)

    def branch_again(self) -> None:
        """The process's numbers go to where the data branched off from them; its own stay."""
        if self._after_branch is not None and not self._is_separate:
            self._process_state = self._after_branch

    def rejoin(self) -> None:
        """From here on, the data draws again from what it has branched off from."""
        if not self._is_separate:
            self._own_state = None
        elif self._after_branch is not None:
            self._own_state = self._after_branch
        self._after_branch = None

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
