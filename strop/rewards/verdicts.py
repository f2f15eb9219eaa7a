"""What judges of any kind say of two completions, and judges that are no chat models.

pairs of completions  --pairwise, rank or binary judge-->  the probability that the first is better, None: no verdict
"""

import math
import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from strop.rewards.judges import BaseJudge, BasePairwiseJudge, Pair, by_index
from strop.rewards.scoring import Reward, RewardFunctions
from strop.rewards.texts import Words, conversation_text


class BaseRankJudge(BaseJudge):
    """Tells an order of any number of completions. Subclasses write `judge`."""

    @abstractmethod
    def judge(
        self, prompts: Sequence[Words], completions: Sequence[Sequence[Words]], shuffle_order: bool = True
    ) -> list[list[int]]:
        """(N,): for each prompt the indices of its completions, the best one's first."""


class BaseBinaryJudge(BaseJudge):
    """Tells whether a completion passes. Subclasses write `judge`. It is a reward function, too: 1, 0 or None."""

    @abstractmethod
    def judge(
        self,
        prompts: Sequence[Words],
        completions: Sequence[Words],
        gold_completions: Sequence[Words] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        """(N,): 1 for a completion that passes, 0 for one that doesn't, -1 for no verdict."""

    def __call__(self, prompts: Sequence[Words], completions: Sequence[Words], **columns: Any) -> list[float | None]:
        """(N,): what `judge` says, None for no verdict."""
        return [None if found not in (0, 1) else float(found) for found in self.judge(prompts, completions)]


class AllTrueJudge(BaseBinaryJudge):
    """A completion passes if all of `judges` let it pass (arXiv:2409.20370); there is no verdict without all theirs."""

    def __init__(self, judges: Sequence[BaseBinaryJudge]):
        others = [type(judge).__name__ for judge in judges if not isinstance(judge, BaseBinaryJudge)]
        if not judges or others:
            raise ValueError(
                f"AllTrueJudge needs judges that say whether a completion passes (BaseBinaryJudge), but got "
                f"{', '.join(others) or 'none'}."
            )
        self.judges = list(judges)

    def judge(self, prompts, completions, gold_completions=None, shuffle_order=True):
        every = [judge.judge(prompts, completions, gold_completions, shuffle_order) for judge in self.judges]
        return [-1 if not set(several) <= {0, 1} else int(all(several)) for several in zip(*every, strict=True)]


class RandomPairwiseJudge(BasePairwiseJudge):
    """Either completion, each as likely: what a real judge must beat. The verdict follows from seed and texts."""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def compare(self, prompts: Sequence[Words], pairs: Sequence[Pair], flipped: Sequence[bool]) -> list[float | None]:
        return [
            float(dice(self.seed, prompt, *pair).random() < 0.5) for prompt, pair in zip(prompts, pairs, strict=True)
        ]


class RandomRankJudge(BaseRankJudge):
    """Any order, each as likely. The verdict follows from seed and texts."""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def judge(self, prompts, completions, shuffle_order=True):
        return [
            dice(self.seed, prompt, *several).sample(range(len(several)), len(several))
            for prompt, several in zip(prompts, completions, strict=True)
        ]


class RewardJudge(BasePairwiseJudge):
    """Reward functions or reward models as a judge: the chance that the first is better is sigmoid(r1 - r2) of the
    weighted sums (Bradley-Terry). There is no verdict where one of the two has no reward.

    `functions` and `weights` are those of `RewardFunctions`.
    """

    def __init__(self, functions: Reward | Sequence[Reward], weights: Sequence[float] | None = None, **options: Any):
        self.rewards = RewardFunctions(functions, weights, **options)

    def compare(self, prompts: Sequence[Words], pairs: Sequence[Pair], flipped: Sequence[bool]) -> list[float | None]:
        both = [completion for pair in pairs for completion in pair]
        scores = self.rewards.score([prompt for prompt in prompts for _ in range(2)], both)
        totals = scores.total(self.rewards.weights).tolist()
        return [preference(a, b) for a, b in zip(totals[::2], totals[1::2], strict=True)]


def preference(first: float, second: float) -> float | None:
    """sigmoid(first - second) of two rewards, None if one is NaN."""
    difference = first - second
    if math.isnan(difference):
        return None
    small = math.exp(-abs(difference))
    return (1.0 if difference >= 0 else small) / (1 + small)


def verdicts(
    judge: Any,
    prompts: Sequence[Words],
    pairs: Sequence[Pair],
    seed: int = 0,
    shuffle_order: bool = True,
) -> list[float | None]:
    """(N,): the probability that the first of each pair is better, 0.5 for a tie, None for no verdict.

    `judge` compares two completions, ranks them, or tells of each whether it passes; one that has only a method `judge`
    is taken for the first kind. `shuffle_order` shows half of the pairs the other way round: which ones follows from
    the seed and the texts. Raises ValueError for another kind of judge, a verdict too few, and a probability that isn't
    one.
    """
    if not pairs:
        return []
    if isinstance(judge, BaseBinaryJudge):
        both = [completion for pair in pairs for completion in pair]
        passed = judge.judge([prompt for prompt in prompts for _ in range(2)], both)
        found = [_of_passing(a, b) for a, b in zip(passed[::2], passed[1::2], strict=True)]
    elif isinstance(judge, BaseRankJudge):
        ranks = judge.judge(prompts, [list(pair) for pair in pairs], shuffle_order)
        found = [1.0 if list(rank) == [0, 1] else 0.0 if list(rank) == [1, 0] else None for rank in ranks]
    else:
        compare = judge.compare if isinstance(judge, BasePairwiseJudge) else _foreign(judge)
        flipped = [
            shuffle_order and dice("order", seed, prompt, *pair).random() < 0.5
            for prompt, pair in zip(prompts, pairs, strict=True)
        ]
        found = compare(prompts, pairs, flipped)
    return checked(judge, found, len(pairs))


def checked(judge: Any, found: Sequence[float | None], size: int) -> list[float | None]:
    """`found`, if it is a probability or None for each of `size` pairs."""
    name = type(judge).__name__
    if len(found) != size:
        raise ValueError(f"{name} returned {len(found)} verdicts for {size} pairs; it must return one each.")
    wrong = [one for one in found if one is not None and not 0 <= one <= 1]
    if wrong:
        raise ValueError(
            f"{name} returned {wrong[0]!r}; the probability that the first completion is better is in [0, 1], None "
            "means that there is no verdict."
        )
    return list(found)


def dice(*parts: Any) -> random.Random:
    """Random numbers that follow from `parts`, whatever else is asked, in whichever process."""
    shown = [part if isinstance(part, str | int) else conversation_text(part) for part in parts]
    return random.Random("\n".join(map(repr, shown)))


def _of_passing(first: int, second: int) -> float | None:
    return None if not {first, second} <= {0, 1} else (1 + first - second) / 2


def _foreign(judge: Any):
    if not callable(getattr(judge, "judge", None)):
        raise ValueError(
            f"judge={judge!r} has no method `judge`; pass a PairwiseJudge(model, base_url), or a subclass of "
            "BasePairwiseJudge with a method `compare`."
        )
    return lambda prompts, pairs, flipped: by_index(judge.judge, prompts, pairs, flipped)
