"""Imported by the process that forks others: what is imported and traced here, is so for them."""

import torch

from .distributed.rank_runs import train
from .training.killable import NAME
from .training.resuming import Run

torch.set_num_threads(1)  # a thread of torch's would not be there in the fork
# With a torch that is built for GPUs, a gradient of fake tensors starts threads of autograd for
# devices, also where there are none; a fork then computes no gradients.
if not torch.backends.cuda.is_built():
    Run(NAME, 0).go()
    for kind in ("tensors", "flags", "tokens"):
        train(None, kind, updates=3)
