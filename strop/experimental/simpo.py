"""An import path that users know."""

from strop.trainer.cpo import SimPOConfig, SimPOTrainer

__all__ = ["SimPOConfig", "SimPOTrainer"]
