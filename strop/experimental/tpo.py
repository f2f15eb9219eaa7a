"""An import path that users know."""

from strop.trainer.tpo import TPOConfig, TPOTrainer

__all__ = ["TPOConfig", "TPOTrainer"]
