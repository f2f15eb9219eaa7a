"""The paths put together on `transformers.Trainer`; names are imported when they are first used."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.trainer.base import BaseTrainer
    from strop.trainer.config import BaseConfig, SFTConfig
    from strop.trainer.dpo import DPOConfig, DPOTrainer
    from strop.trainer.sft import SFTTrainer

_MODULES = {
    "BaseConfig": "strop.trainer.config",
    "BaseTrainer": "strop.trainer.base",
    "DPOConfig": "strop.trainer.dpo",
    "DPOTrainer": "strop.trainer.dpo",
    "SFTConfig": "strop.trainer.config",
    "SFTTrainer": "strop.trainer.sft",
}

__all__ = ["BaseConfig", "BaseTrainer", "DPOConfig", "DPOTrainer", "SFTConfig", "SFTTrainer"]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'strop.trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
