"""A module and its segment, for the tests of streams."""

from __future__ import annotations

from typing import Any

import pytest

from ftbptt import TrainSegment, make_train_segment

from .stream_runs import Params, Segments
from .streams import Tagger, mean_cross_entropy, tagger


@pytest.fixture(scope="module")
def segment() -> Segments:
    """``segment(loss) -> (train_segment, its module's parameters as at the start)``, made once."""
    made: dict[Any, tuple[Tagger, TrainSegment]] = {}

    def make(loss: Any = mean_cross_entropy, backend: str = "eager") -> tuple[TrainSegment, Params]:
        if (loss, backend) not in made:
            module = tagger()
            made[loss, backend] = module, make_train_segment(module, loss, backend=backend)
        module, train_segment = made[loss, backend]
        module.load_state_dict(tagger().state_dict())
        return train_segment, dict(module.named_parameters())

    return make
