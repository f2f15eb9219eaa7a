"""strop post-trains transformer language models.

Names are imported when they are first used, so `import strop` loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

EXPORTS = {
    "strop.trainer.sft": ("SFTTrainer",),
    "strop.trainer.config": ("SFTConfig",),
    "strop.trainer.dpo": ("DPOConfig", "DPOTrainer"),
    "strop.trainer.reward": ("RewardConfig", "RewardTrainer"),
    "strop.trainer.prm": ("PRMConfig", "PRMTrainer"),
    "strop.trainer.kto": ("KTOConfig", "KTOTrainer"),
    "strop.trainer.bco": ("BCOConfig", "BCOTrainer"),
    "strop.trainer.cpo": ("CPOConfig", "CPOTrainer", "SimPOConfig", "SimPOTrainer"),
    "strop.trainer.orpo": ("ORPOConfig", "ORPOTrainer"),
    "strop.trainer.tpo": ("TPOConfig", "TPOTrainer"),
    "strop.trainer.grpo": ("GRPOConfig", "GRPOTrainer"),
    "strop.trainer.ppo": ("PPOConfig", "PPOTrainer"),
    "strop.trainer.rloo": ("RLOOConfig", "RLOOTrainer"),
    "strop.trainer.online_dpo": ("OnlineDPOConfig", "OnlineDPOTrainer"),
    "strop.trainer.nash_md": ("NashMDConfig", "NashMDTrainer"),
    "strop.trainer.xpo": ("XPOConfig", "XPOTrainer"),
    "strop.models.model_config": ("ModelConfig", "get_kbit_device_map", "get_peft_config", "get_quantization_config"),
    "strop.data.pack": ("pack_dataset",),
    "strop.data.chat": ("apply_chat_template", "maybe_apply_chat_template"),
    "strop.models.tokenizers": ("clone_chat_template",),
    "strop.data.formats": ("is_conversational", "is_conversational_from_value", "maybe_convert_to_chatml"),
    "strop.data.prompts": (
        "extract_prompt",
        "maybe_extract_prompt",
        "maybe_unpair_preference_dataset",
        "unpair_preference_dataset",
    ),
    "strop.data.mixture": ("DatasetMixtureConfig", "get_dataset"),
    "strop.cli.arguments": ("ScriptArguments",),
    "strop.cli.parser": ("TrlParser",),
    "strop.evals.evaluate": ("evaluate",),
    "strop.evals.results": ("EvalResults",),
    "strop.evals.statistics": ("pass_at_k",),
    "strop.callbacks.progress": ("RichProgressCallback",),
    "strop.callbacks.bema": ("BEMACallback",),
    "strop.callbacks.completions": ("LogCompletionsCallback",),
    "strop.callbacks.sync_ref": ("SyncRefModelCallback",),
    "strop.callbacks.win_rate": ("WinRateCallback",),
    "strop.rewards.judges": ("BaseJudge", "BasePairwiseJudge", "PairwiseJudge"),
    "strop.rewards.verdicts": (
        *("AllTrueJudge", "BaseBinaryJudge", "BaseRankJudge"),
        *("RandomPairwiseJudge", "RandomRankJudge", "RewardJudge"),
    ),
}
"""Module -> the public names it holds."""

_MODULES = {name: module for module, names in EXPORTS.items() for name in names}

__all__ = [
    "AllTrueJudge",
    "BCOConfig",
    "BCOTrainer",
    "BEMACallback",
    "BaseBinaryJudge",
    "BaseJudge",
    "BasePairwiseJudge",
    "BaseRankJudge",
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "DatasetMixtureConfig",
    "EvalResults",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LogCompletionsCallback",
    "ModelConfig",
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
    "PairwiseJudge",
    "RLOOConfig",
    "RLOOTrainer",
    "RandomPairwiseJudge",
    "RandomRankJudge",
    "RewardConfig",
    "RewardJudge",
    "RewardTrainer",
    "RichProgressCallback",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "SimPOConfig",
    "SimPOTrainer",
    "SyncRefModelCallback",
    "TPOConfig",
    "TPOTrainer",
    "TrlParser",
    "WinRateCallback",
    "XPOConfig",
    "XPOTrainer",
    "__version__",
    "apply_chat_template",
    "clone_chat_template",
    "evaluate",
    "extract_prompt",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "pass_at_k",
    "unpair_preference_dataset",
]

if TYPE_CHECKING:
    from strop.callbacks.bema import BEMACallback
    from strop.callbacks.completions import LogCompletionsCallback
    from strop.callbacks.progress import RichProgressCallback
    from strop.callbacks.sync_ref import SyncRefModelCallback
    from strop.callbacks.win_rate import WinRateCallback
    from strop.cli.arguments import ScriptArguments
    from strop.cli.parser import TrlParser
    from strop.data.chat import apply_chat_template, maybe_apply_chat_template
    from strop.data.formats import is_conversational, is_conversational_from_value, maybe_convert_to_chatml
    from strop.data.mixture import DatasetMixtureConfig, get_dataset
    from strop.data.pack import pack_dataset
    from strop.data.prompts import (
        extract_prompt,
        maybe_extract_prompt,
        maybe_unpair_preference_dataset,
        unpair_preference_dataset,
    )
    from strop.evals.evaluate import evaluate
    from strop.evals.results import EvalResults
    from strop.evals.statistics import pass_at_k
    from strop.models.model_config import ModelConfig, get_kbit_device_map, get_peft_config, get_quantization_config
    from strop.models.tokenizers import clone_chat_template
    from strop.rewards.judges import BaseJudge, BasePairwiseJudge, PairwiseJudge
    from strop.rewards.verdicts import (
        AllTrueJudge,
        BaseBinaryJudge,
        BaseRankJudge,
        RandomPairwiseJudge,
        RandomRankJudge,
        RewardJudge,
    )
    from strop.trainer.bco import BCOConfig, BCOTrainer
    from strop.trainer.config import SFTConfig
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


def __getattr__(name: str):
    if name not in _MODULES:
        from strop.compat import missing_export

        raise missing_export(name, _MODULES)
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
