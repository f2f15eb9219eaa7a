"""What a text is worth: rewards, in numbers. Names are imported when they are first used."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.rewards.accuracy import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward
    from strop.rewards.code import code_reward
    from strop.rewards.formats import json_reward, regex_reward, think_format_reward, xml_reward
    from strop.rewards.from_model import RewardModel
    from strop.rewards.judges import BaseJudge, BasePairwiseJudge, PairwiseJudge, judge_reward
    from strop.rewards.lengths import get_repetition_penalty_reward, get_soft_overlong_punishment
    from strop.rewards.resolve import resolve_reward
    from strop.rewards.scoring import RewardFunctions, Scores
    from strop.rewards.verdicts import (
        AllTrueJudge,
        BaseBinaryJudge,
        BaseRankJudge,
        RandomPairwiseJudge,
        RandomRankJudge,
        RewardJudge,
    )

_MODULES = {
    "AllTrueJudge": "strop.rewards.verdicts",
    "BaseBinaryJudge": "strop.rewards.verdicts",
    "BaseJudge": "strop.rewards.judges",
    "BasePairwiseJudge": "strop.rewards.judges",
    "BaseRankJudge": "strop.rewards.verdicts",
    "PairwiseJudge": "strop.rewards.judges",
    "RandomPairwiseJudge": "strop.rewards.verdicts",
    "RandomRankJudge": "strop.rewards.verdicts",
    "RewardFunctions": "strop.rewards.scoring",
    "RewardJudge": "strop.rewards.verdicts",
    "RewardModel": "strop.rewards.from_model",
    "Scores": "strop.rewards.scoring",
    "accuracy_reward": "strop.rewards.accuracy",
    "code_reward": "strop.rewards.code",
    "get_cosine_scaled_reward": "strop.rewards.accuracy",
    "get_repetition_penalty_reward": "strop.rewards.lengths",
    "get_soft_overlong_punishment": "strop.rewards.lengths",
    "json_reward": "strop.rewards.formats",
    "judge_reward": "strop.rewards.judges",
    "reasoning_accuracy_reward": "strop.rewards.accuracy",
    "regex_reward": "strop.rewards.formats",
    "resolve_reward": "strop.rewards.resolve",
    "think_format_reward": "strop.rewards.formats",
    "xml_reward": "strop.rewards.formats",
}

__all__ = [
    "AllTrueJudge",
    "BaseBinaryJudge",
    "BaseJudge",
    "BasePairwiseJudge",
    "BaseRankJudge",
    "PairwiseJudge",
    "RandomPairwiseJudge",
    "RandomRankJudge",
    "RewardFunctions",
    "RewardJudge",
    "RewardModel",
    "Scores",
    "accuracy_reward",
    "code_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "json_reward",
    "judge_reward",
    "reasoning_accuracy_reward",
    "regex_reward",
    "resolve_reward",
    "think_format_reward",
    "xml_reward",
]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
