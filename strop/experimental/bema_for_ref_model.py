"""An import path that users know."""

from strop.callbacks.bema import BEMACallback
from strop.trainer.dpo import DPOTrainer

__all__ = ["BEMACallback", "DPOTrainer"]
