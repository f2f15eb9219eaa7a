"""An import path that users know."""

from strop.trainer.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

__all__ = ["OnlineDPOConfig", "OnlineDPOTrainer"]
