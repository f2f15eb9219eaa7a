"""An import path that users know."""

from strop.trainer.prm import PRMConfig, PRMTrainer

__all__ = ["PRMConfig", "PRMTrainer"]
