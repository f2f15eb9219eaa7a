"""An import path that users know."""

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
