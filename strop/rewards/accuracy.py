"""Rewards for right answers to problems of mathematics, compared as mathematics by math-verify."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strop.rewards.math_process import Verdict, prepare, verdicts
from strop.rewards.texts import Words, texts_of

LogExtra = Callable[[str, list], None]


def accuracy_reward(
    completions: Sequence[Words], solution: Sequence[str], log_extra: LogExtra | None = None, **kwargs: Any
) -> list[float | None]:
    r"""1.0 for completions whose answer equals the solution, 0.0 for others, None where no solution can be read.

    The answer is LaTeX: what is in \boxed{}, or else behind words like "the final answer is". Solution and answer are
    read and compared in a process of their own, which is ended if it takes too long: an answer that can't be read or
    compared within its time is wrong. Raises ValueError if math-verify is missing.
    """
    return _judged(texts_of(completions), solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Words],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` of what follows the reasoning, which ends with the last of `reasoning_delimiters`.

    These are ["</think>"] if not said. 0.0 for completions whose reasoning doesn't end. Raises ValueError if
    math-verify is missing.
    """
    delimiters = ("</think>",) if reasoning_delimiters is None else reasoning_delimiters
    answers = [_after(text, delimiters) for text in texts_of(completions)]
    return _judged(answers, solution, log_extra)


def _after(text: str, delimiters: Sequence[str]) -> str | None:
    """What follows the last occurrence of each delimiter in turn; None if there is none of them."""
    found = False
    for delimiter in delimiters:
        _, mark, rest = text.rpartition(delimiter)
        text, found = (rest, True) if mark else (text, found)
    return text if found else None


def _judged(
    answers: Sequence[str | None], solution: Sequence[str], log_extra: LogExtra | None = None
) -> list[float | None]:
    if len(answers) != len(solution):
        raise ValueError(f"there are {len(answers)} completions but {len(solution)} solutions; each needs its own.")
    asked = [i for i, answer in enumerate(answers) if answer is not None]
    found = iter(verdicts([(str(solution[i]), str(answers[i])) for i in asked]))
    unfinished = Verdict(0.0, "[not read]", "[no end of the reasoning]")
    results = [unfinished if answer is None else next(found) for answer in answers]
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [result.gold for result in results])
        log_extra("answer_parsed", [result.answer for result in results])
    return [result.reward for result in results]


@dataclass(frozen=True)
class _CosineScaledReward:
    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float

    __name__ = "cosine_scaled_reward"

    def __call__(
        self,
        completions: Sequence[Words],
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        log_extra: LogExtra | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        right = _judged(texts_of(completions), solution, log_extra)
        return [
            None if reward is None else self.scaled(reward == 1, len(ids))
            for reward, ids in zip(right, completion_ids, strict=True)
        ]

    def check(self) -> None:
        prepare()

    def scaled(self, is_right: bool, length: int) -> float:
        short, long = (
            (self.max_value_correct, self.min_value_correct)
            if is_right
            else (self.min_value_wrong, self.max_value_wrong)
        )
        share = min(length / self.max_len, 1.0)
        return long + (short - long) * (1 + math.cos(math.pi * share)) / 2


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> _CosineScaledReward:
    """`accuracy_reward` that goes with the length, from 0 to `max_len` tokens, along half a cosine: right answers from
    `max_value_correct` down to `min_value_correct`, wrong ones from `min_value_wrong` up to `max_value_wrong`
    (arXiv:2502.03373); beyond `max_len` it stays. Raises ValueError for a `max_len` below 1.
    """
    if max_len < 1:
        raise ValueError(f"max_len={max_len} is no length in tokens; it must be at least 1.")
    return _CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


accuracy_reward.check = prepare  # type: ignore[attr-defined]
reasoning_accuracy_reward.check = prepare  # type: ignore[attr-defined]
