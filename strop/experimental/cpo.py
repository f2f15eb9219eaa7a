"""An import path that users know."""

from strop.trainer.cpo import CPOConfig, CPOTrainer

__all__ = ["CPOConfig", "CPOTrainer"]
