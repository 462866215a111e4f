"""Imported by the process that forks others: what is imported and traced here, is so for them."""

import warnings

import torch

from .distributed.rank_runs import train
from .training.killable import NAME
from .training.resuming import Run

torch.set_num_threads(1)  # a thread of torch's would not be there in the fork
# With a torch that is built for GPUs, a gradient of fake tensors starts threads of autograd for
# devices, also where there are none; a fork then computes no gradients.
if not torch.backends.cuda.is_built():
    with warnings.catch_warnings():  # also collected by pytest, for which warnings are errors
        warnings.filterwarnings("ignore", "data: the chunks come in a random order")
        Run(NAME, 0).go()
    for kind in ("tensors", "flags", "tokens"):
        train(None, kind, updates=3)
