"""One table of cells (`cells.py`) and one oracle (`oracle.py`), crossed with everything."""

import os

import torch

# Without a GPU, its kernels are interpreted; Triton reads this when ftbptt imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
