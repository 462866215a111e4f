"""Gradients -> an update: ``learner``, and what comes before it.

``rank_sync`` (the mean over the ranks) and ``nonfinite`` (losses that are not finite).
"""
