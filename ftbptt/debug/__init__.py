"""Looking at gradients: how far they reach back, and whether they are right."""

from .compare import ComparedLeaf, Comparison, compare_to_reference
from .horizon import GradientHorizon, gradient_horizon

__all__ = [
    "ComparedLeaf",
    "Comparison",
    "GradientHorizon",
    "compare_to_reference",
    "gradient_horizon",
]
