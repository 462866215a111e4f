"""ftbptt: truncated backpropagation through time, compiled, for any recurrent cell.

Write one time step and a loss; get one function that trains on K steps::

    train_segment = ftbptt.make_train_segment(step, loss)
    grads, state, loss, out = train_segment(params, state, x, y)

How the data flows::

    step, loss --trace--> graph --adjoint--> two loops --distribute--> blocks --run--> result

Words. *segment*: K steps differentiated together. *state*: what is passed between segments;
*carry*: the same inside a loop. *out*: a step's output, *y* its target. *reset*: a bool per step
and row, applied before the step: the state restarts there. *mask*: which steps are valid. *map
block*: work that needs no carry of its own, all K steps in one call. *scan block*: a true
recurrence, K dependent steps. *linear scan*: a scan that is elementwise affine in its carry.
*shift*: a carry that is a value one step late.

Packages, each importing only from those before it: ``contract`` (what a segment means),
``compiler`` (a step and a loss to blocks), ``kernels`` (a scan block to C++ or Triton),
``backends`` (how blocks run), ``segment`` (what a call passes through), ``distributed``,
``training`` (streams), ``debug``, ``integrations``. All may use the modules beside them, such as
``_trees``, ``_reach`` (what a function reads) and ``_compat`` (what is private in torch).
"""

from .contract.as_step import as_step
from .contract.output import SegmentOutput, TappedOutput
from .contract.reference import reference_segment
from .contract.step import Step
from .contract.taps import Tap, tap
from .debug import (
    Comparison,
    GradientHorizon,
    SpeedComparison,
    compare_speed,
    compare_to_reference,
    gradient_horizon,
)
from .segment.explain import Explanation
from .segment.make_segment import make_train_segment
from .segment.train_segment import TrainSegment
from .training import RandomTruncation, random_truncation

__all__ = [
    "Comparison",
    "Explanation",
    "GradientHorizon",
    "RandomTruncation",
    "SegmentOutput",
    "SpeedComparison",
    "Step",
    "Tap",
    "TappedOutput",
    "TrainSegment",
    "as_step",
    "compare_speed",
    "compare_to_reference",
    "gradient_horizon",
    "make_train_segment",
    "random_truncation",
    "reference_segment",
    "tap",
]
