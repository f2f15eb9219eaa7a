"""An import path that users know."""

from strop.trainer.bco import BCOConfig, BCOTrainer

__all__ = ["BCOConfig", "BCOTrainer"]
