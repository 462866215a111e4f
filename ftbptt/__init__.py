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

Packages, each importing only from those before it: ``compiler`` (a step and a loss to blocks),
``kernels`` (a scan block to C++ or Triton), ``backends`` (how blocks run), ``distributed``,
``training`` (streams), ``debug``, ``integrations``. Of the modules beside them, some are what a
call of a segment passes through: ``_make_segment``, ``_segment``, ``_lay_out``, ``_execute``,
``_programs``, in this order. Others are what the compiler, too, is written in: ``_step`` and
``_loss`` (what the caller gave), ``_layout`` (axes), ``_trees``, ``_taps``, ``_reach`` (what a
function reads), ``_compat`` (what is private in torch).
"""

from ._explain import Explanation
from ._make_segment import make_train_segment
from ._output import SegmentOutput, TappedOutput
from ._reference import reference_segment
from ._segment import TrainSegment
from ._step import Step, as_step
from ._taps import Tap, tap
from .debug import Comparison, GradientHorizon, compare_to_reference, gradient_horizon
from .training import RandomTruncation, random_truncation

__all__ = [
    "Comparison",
    "Explanation",
    "GradientHorizon",
    "RandomTruncation",
    "SegmentOutput",
    "Step",
    "Tap",
    "TappedOutput",
    "TrainSegment",
    "as_step",
    "compare_to_reference",
    "gradient_horizon",
    "make_train_segment",
    "random_truncation",
    "reference_segment",
    "tap",
]
