"""Training on streams far longer than memory, around ``train_segment``.

The data flow::

    data --source--> chunks --cursor--> windows --train_segment--> gradients --learner--> parameters
                                ^              |
                                +--- state ----+
"""

from .checkpoints.file import CheckpointError, load_checkpoint, save_checkpoint
from .data.chunk import Chunk
from .data.contiguous import ContiguousStreams
from .data.packing import PackedSequences
from .data.source import Source
from .data.windows import Truncation, Window
from .evaluate import Evaluation, evaluate_stream
from .random_truncation import RandomTruncation, random_truncation
from .reports.early_stop import EarlyStop
from .reports.events import Events, SequenceEnd
from .reports.report import Report, plot_history, write_scalars
from .stream import Stream
from .train_stream import train_stream
from .updates.chained_optimizer import ChainedOptimizer
from .updates.optimizers import FunctionalOptimizer
from .updates.update import Update

__all__ = [
    "ChainedOptimizer",
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
