"""PyTorch-Ignite's TBPTT trainer, compiled. The same names under another import."""

from .trainer import Tbptt_Events, create_supervised_tbptt_trainer

__all__ = ["Tbptt_Events", "create_supervised_tbptt_trainer"]
