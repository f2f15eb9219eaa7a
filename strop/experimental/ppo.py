"""An import path that users know."""

from strop.trainer.ppo import PPOConfig, PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer"]
