"""Training on many processes, the ranks of ``torch.distributed``.

For data-parallel training, pass ``train_stream(mesh=...)``. For an ensemble, each rank trains its
share of the models (:func:`own_models`), without communication.
"""

from .cores import use_own_cores
from .ranks import RankFailed
from .shares import all_models, own_models

__all__ = ["RankFailed", "all_models", "own_models", "use_own_cores"]
