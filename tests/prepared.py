"""Imported by the process that forks others: what is imported and traced here, is so for them."""

import torch

from .distributed.rank_runs import train
from .training.killable import NAME
from .training.resuming import Run

torch.set_num_threads(1)  # a thread of torch's would not be there in the fork
Run(NAME, 0).go()
for kind in ("tensors", "flags", "tokens"):
    train(None, kind, updates=3)
