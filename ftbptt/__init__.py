from ._output import SegmentOutput
from ._reference import reference_segment
from ._segment import TrainSegment, make_train_segment
from ._step import Step, as_step

__all__ = [
    "SegmentOutput",
    "Step",
    "TrainSegment",
    "as_step",
    "make_train_segment",
    "reference_segment",
]
