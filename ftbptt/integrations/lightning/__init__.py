"""TBPTT in Lightning: a successor to the Trainer's former ``truncated_bptt_steps``."""

from .module import TBPTTModule

__all__ = ["TBPTTModule"]
