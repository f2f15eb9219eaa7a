"""What rewards of stored completions tell before they are trained on: spread, ties, time, pay for length."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.rewards.texts import Words


@dataclass(frozen=True)
class Trial:
    """One function's rewards of a set of completions, in numbers; None where there are too few for one."""

    num_rows: int
    num_applicable: int
    mean: float | None
    std: float | None
    """Over all rows, with n - 1."""
    lowest: float | None
    highest: float | None
    ties: float | None
    """Share of the prompts with several rewarded completions that are all rewarded alike: nothing is learnt there."""
    length_correlation: float | None
    """Pearson's correlation of reward and length."""
    milliseconds: float
    """Time for a row."""


def trial(rewards: Tensor, prompts: Sequence[Words], lengths: Sequence[int], seconds: float) -> Trial:
    """The numbers of `rewards` (N,), NaN where they don't apply; completions of equal prompts are compared."""
    applies = ~rewards.isnan()
    values = rewards[applies].double()
    groups: dict[str, list[float]] = {}
    for prompt, value in zip(prompts, rewards.tolist(), strict=True):
        if not math.isnan(value):
            groups.setdefault(json.dumps(prompt, default=str), []).append(value)
    several = [group for group in groups.values() if len(group) > 1]
    return Trial(
        num_rows=len(rewards),
        num_applicable=len(values),
        mean=values.mean().item() if len(values) else None,
        std=values.std().item() if len(values) > 1 else None,
        lowest=values.min().item() if len(values) else None,
        highest=values.max().item() if len(values) else None,
        ties=sum(min(group) == max(group) for group in several) / len(several) if several else None,
        length_correlation=correlation(values, torch.tensor(lengths, dtype=torch.float64)[applies]),
        milliseconds=1000 * seconds / max(len(rewards), 1),
    )


def correlation(x: Tensor, y: Tensor) -> float | None:
    """Pearson's correlation of two (N,); None where one of them doesn't vary."""
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return None
    return torch.corrcoef(torch.stack([x, y]))[0, 1].item()
