"""Many processes: ranks of ``torch.distributed`` that train together, or side by side.

``train_stream(mesh=...)`` is all that data-parallel training needs; an ensemble needs nothing but
its share of the models (:func:`own_models`).
"""

from .ranks import RankFailed
from .shares import all_models, own_models

__all__ = ["RankFailed", "all_models", "own_models"]
