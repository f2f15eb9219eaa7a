"""Rewards that look at token ids only: how long a completion is, and how often it repeats itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _SoftOverlongPunishment:
    max_completion_len: int
    soft_punish_cache: int

    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self.punishment(len(ids)) for ids in completion_ids]

    def punishment(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        return (free - length) / self.soft_punish_cache if length <= self.max_completion_len else -1.0


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> _SoftOverlongPunishment:
    """A reward that is 0 up to `max_completion_len - soft_punish_cache` tokens, falls evenly to -1 at
    `max_completion_len`, and stays there (DAPO, arXiv:2503.14476 eq. 13).

    Raises ValueError for negative lengths.
    """
    if min(max_completion_len, soft_punish_cache) < 0:
        raise ValueError(
            f"max_completion_len={max_completion_len} and soft_punish_cache={soft_punish_cache} are lengths in tokens; "
            "neither may be negative."
        )
    return _SoftOverlongPunishment(max_completion_len, soft_punish_cache)


@dataclass(frozen=True)
class _RepetitionPenalty:
    ngram_size: int
    max_penalty: float

    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self.penalty(ids) for ids in completion_ids]

    def penalty(self, ids: Sequence[int]) -> float:
        total = len(ids) - self.ngram_size + 1
        if total < 1:
            return 0.0
        distinct = len({tuple(ids[i : i + self.ngram_size]) for i in range(total)})
        return (1 - distinct / total) * self.max_penalty


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> _RepetitionPenalty:
    """A reward that is `max_penalty` times the share of a completion's n-grams of tokens that were there before
    (arXiv:2502.03373); 0 for completions shorter than an n-gram.

    Raises ValueError for a positive `max_penalty` and for n-grams of no token.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty} would reward repetition; it must be 0 or below.")
    if ngram_size < 1:
        raise ValueError(f"ngram_size={ngram_size} is no number of tokens; it must be at least 1.")
    return _RepetitionPenalty(ngram_size, max_penalty)
