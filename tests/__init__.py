"""One table of ``cells`` and one ``oracle``, crossed with everything. A folder for each package."""

import os

import torch

# Without a GPU, its kernels are interpreted; Triton reads this when ftbptt imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
