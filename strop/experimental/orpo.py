"""An import path that users know."""

from strop.trainer.orpo import ORPOConfig, ORPOTrainer

__all__ = ["ORPOConfig", "ORPOTrainer"]
