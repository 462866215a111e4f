"""Training on streams far longer than memory, around ``train_segment``.

The data flow::

    data --source--> chunks --cursor--> windows --train_segment--> gradients --learner--> parameters
                                ^              |
                                +--- state ----+
"""

from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .chunk import Chunk
from .contiguous import ContiguousStreams
from .early_stop import EarlyStop
from .evaluate import Evaluation, evaluate_stream
from .events import Events, SequenceEnd
from .optimizers import FunctionalOptimizer
from .packing import PackedSequences
from .random_truncation import RandomTruncation, random_truncation
from .report import Report, plot_history, write_scalars
from .source import Source
from .stream import Stream
from .train_stream import train_stream
from .update import Update
from .windows import Truncation, Window

__all__ = [
    "CheckpointError",
    "Chunk",
    "ContiguousStreams",
    "EarlyStop",
    "Evaluation",
    "Events",
    "FunctionalOptimizer",
    "PackedSequences",
    "RandomTruncation",
    "Report",
    "SequenceEnd",
    "Source",
    "Stream",
    "Truncation",
    "Update",
    "Window",
    "evaluate_stream",
    "load_checkpoint",
    "plot_history",
    "random_truncation",
    "save_checkpoint",
    "train_stream",
    "write_scalars",
]
