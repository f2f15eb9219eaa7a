"""The paths put together on `transformers.Trainer`; names are imported when they are first used."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.trainer.base import BaseTrainer
    from strop.trainer.bco import BCOConfig, BCOTrainer
    from strop.trainer.config import BaseConfig, SFTConfig
    from strop.trainer.cpo import CPOConfig, CPOTrainer, SimPOConfig, SimPOTrainer
    from strop.trainer.dpo import DPOConfig, DPOTrainer
    from strop.trainer.grpo import GRPOConfig, GRPOTrainer
    from strop.trainer.kto import KTOConfig, KTOTrainer
    from strop.trainer.nash_md import NashMDConfig, NashMDTrainer
    from strop.trainer.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
    from strop.trainer.orpo import ORPOConfig, ORPOTrainer
    from strop.trainer.ppo import PPOConfig, PPOTrainer
    from strop.trainer.prm import PRMConfig, PRMTrainer
    from strop.trainer.reward import RewardConfig, RewardTrainer
    from strop.trainer.rloo import RLOOConfig, RLOOTrainer
    from strop.trainer.sft import SFTTrainer
    from strop.trainer.tpo import TPOConfig, TPOTrainer
    from strop.trainer.xpo import XPOConfig, XPOTrainer

_MODULES = {
    "BaseConfig": "strop.trainer.config",
    "BaseTrainer": "strop.trainer.base",
    "BCOConfig": "strop.trainer.bco",
    "BCOTrainer": "strop.trainer.bco",
    "CPOConfig": "strop.trainer.cpo",
    "CPOTrainer": "strop.trainer.cpo",
    "DPOConfig": "strop.trainer.dpo",
    "DPOTrainer": "strop.trainer.dpo",
    "GRPOConfig": "strop.trainer.grpo",
    "GRPOTrainer": "strop.trainer.grpo",
    "KTOConfig": "strop.trainer.kto",
    "KTOTrainer": "strop.trainer.kto",
    "NashMDConfig": "strop.trainer.nash_md",
    "NashMDTrainer": "strop.trainer.nash_md",
    "ORPOConfig": "strop.trainer.orpo",
    "ORPOTrainer": "strop.trainer.orpo",
    "OnlineDPOConfig": "strop.trainer.online_dpo",
    "OnlineDPOTrainer": "strop.trainer.online_dpo",
    "PPOConfig": "strop.trainer.ppo",
    "PPOTrainer": "strop.trainer.ppo",
    "PRMConfig": "strop.trainer.prm",
    "PRMTrainer": "strop.trainer.prm",
    "RLOOConfig": "strop.trainer.rloo",
    "RLOOTrainer": "strop.trainer.rloo",
    "RewardConfig": "strop.trainer.reward",
    "RewardTrainer": "strop.trainer.reward",
    "SFTConfig": "strop.trainer.config",
    "SFTTrainer": "strop.trainer.sft",
    "SimPOConfig": "strop.trainer.cpo",
    "SimPOTrainer": "strop.trainer.cpo",
    "TPOConfig": "strop.trainer.tpo",
    "TPOTrainer": "strop.trainer.tpo",
    "XPOConfig": "strop.trainer.xpo",
    "XPOTrainer": "strop.trainer.xpo",
}

__all__ = [
    "BCOConfig",
    "BCOTrainer",
    "BaseConfig",
    "BaseTrainer",
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "NashMDConfig",
    "NashMDTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "PRMConfig",
    "PRMTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "SimPOConfig",
    "SimPOTrainer",
    "TPOConfig",
    "TPOTrainer",
    "XPOConfig",
    "XPOTrainer",
]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'strop.trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
