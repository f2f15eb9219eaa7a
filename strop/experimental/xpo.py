"""An import path that users know."""

from strop.trainer.xpo import XPOConfig, XPOTrainer

__all__ = ["XPOConfig", "XPOTrainer"]
