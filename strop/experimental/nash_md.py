"""An import path that users know."""

from strop.trainer.nash_md import NashMDConfig, NashMDTrainer

__all__ = ["NashMDConfig", "NashMDTrainer"]
