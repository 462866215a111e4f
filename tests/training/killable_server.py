"""Imported by the process that forks one for each run: what is traced here, is for all of them."""

import torch

from .killable import NAME
from .resuming import Run

torch.set_num_threads(1)  # a thread of torch's would not be there in the fork
Run(NAME, 0).go()
