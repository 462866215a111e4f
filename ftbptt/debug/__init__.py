"""What a segment does: how far its gradients reach, whether they are correct, how fast it is."""

from .compare import ComparedLeaf, Comparison, compare_to_reference
from .horizon import GradientHorizon, gradient_horizon
from .speed import SpeedComparison, compare_speed

__all__ = [
    "ComparedLeaf",
    "Comparison",
    "GradientHorizon",
    "SpeedComparison",
    "compare_speed",
    "compare_to_reference",
    "gradient_horizon",
]
