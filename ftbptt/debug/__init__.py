"""Tools to inspect gradients: how far back they reach, and whether they are correct."""

from .compare import ComparedLeaf, Comparison, compare_to_reference
from .horizon import GradientHorizon, gradient_horizon

__all__ = [
    "ComparedLeaf",
    "Comparison",
    "GradientHorizon",
    "compare_to_reference",
    "gradient_horizon",
]
