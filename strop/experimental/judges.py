"""An import path that users know."""

from strop.compat import missing_export
from strop.rewards.judges import BaseJudge, BasePairwiseJudge, PairwiseJudge
from strop.rewards.verdicts import (
    AllTrueJudge,
    BaseBinaryJudge,
    BaseRankJudge,
    RandomPairwiseJudge,
    RandomRankJudge,
    RewardJudge,
)

__all__ = [
    "AllTrueJudge",
    "BaseBinaryJudge",
    "BaseJudge",
    "BasePairwiseJudge",
    "BaseRankJudge",
    "PairwiseJudge",
    "RandomPairwiseJudge",
    "RandomRankJudge",
    "RewardJudge",
]


def __getattr__(name: str):
    raise missing_export(name, __all__)
