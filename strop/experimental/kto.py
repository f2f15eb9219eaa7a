"""An import path that users know."""

from strop.trainer.kto import KTOConfig, KTOTrainer

__all__ = ["KTOConfig", "KTOTrainer"]
