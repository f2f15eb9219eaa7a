"""From rewards to advantages, each way a line of `ADVANTAGES`.

A row takes `rewards` (N,), of which `group_size` in succession answer the same prompt, and returns one advantage a
completion, (N,). NaN is a completion that no reward could judge: it is no part of any baseline, and its advantage is 0.
A group of equal rewards has advantages of exactly 0 wherever the baseline is the group's. Infinite rewards are refused,
since they have no mean. Give all rewards of a step: of all ranks, before it is cut into micro-batches.
"""

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-4
"""Added to standard deviations before dividing by them."""


def nanstd(values: Tensor, dim: int) -> Tensor:
    """Unbiased standard deviation of what is not NaN, along `dim`, which stays with size 1; NaN for less than two."""
    count = values.isnan().logical_not().sum(dim, keepdim=True)
    squares = (values - values.nanmean(dim, keepdim=True)) ** 2
    return torch.where(count > 1, (squares.nansum(dim, keepdim=True) / (count - 1)).sqrt(), torch.nan)


def weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    """Totals (N,) of rewards (N, F) times weights (F,): NaN is left out, and the total where all are."""
    return torch.where(rewards.isnan().all(-1), torch.nan, (rewards * weights).nansum(-1))


def in_groups(rewards: Tensor, group_size: int) -> Tensor:
    """`rewards` as (N / group_size, group_size). Refuses a group that isn't full, and infinite rewards."""
    if len(rewards) % group_size:
        raise ValueError(
            f"{len(rewards)} rewards are no whole number of groups of {group_size}, so completions would be compared "
            "to those of another prompt. Give all completions of each prompt"
        )
    if rewards.isinf().any():
        row = int(rewards.isinf().nonzero()[0, 0])
        raise ValueError(
            f"the reward of row {row} is {float(rewards[row])}, against which all others are the same. "
            "Bound the reward function, or let it return None where it can't judge"
        )
    return rewards.view(-1, group_size)


def centred(grouped: Tensor, baseline: Tensor) -> Tensor:
    """`grouped` (G, K) minus a baseline; NaN for one without siblings, exactly 0 where all of a group are equal."""
    lonely = grouped.isnan().logical_not().sum(-1, keepdim=True) < 2
    # A mean of equal numbers may differ from them by a rounding unit, which a normalisation would blow up.
    away = torch.where(all_equal(grouped), grouped * 0.0, grouped - baseline)
    return torch.where(lonely, torch.nan, away)


def all_equal(values: Tensor) -> Tensor:
    """Whether all that is not NaN along the last dimension, which stays with size 1, is the same."""
    low = torch.where(values.isnan(), torch.inf, values).amin(-1, keepdim=True)
    high = torch.where(values.isnan(), -torch.inf, values).amax(-1, keepdim=True)
    return low == high


def divided(advantages: Tensor, std: Tensor) -> Tensor:
    """Over `std`; what has none is 0."""
    return (advantages / (std + EPS)).nan_to_num(0.0)


def group(rewards: Tensor, group_size: int) -> Tensor:
    """Minus the group's mean, over its standard deviation (GRPO, arXiv:2402.03300)."""
    grouped = in_groups(rewards, group_size)
    return divided(centred(grouped, grouped.nanmean(-1, keepdim=True)), nanstd(grouped, -1)).flatten()


def none(rewards: Tensor, group_size: int) -> Tensor:
    """Minus the group's mean (Dr. GRPO, arXiv:2503.20783)."""
    grouped = in_groups(rewards, group_size)
    return centred(grouped, grouped.nanmean(-1, keepdim=True)).nan_to_num(0.0).flatten()


def batch(rewards: Tensor, group_size: int) -> Tensor:
    """Minus the group's mean, over the standard deviation of all rewards (Lite PPO, arXiv:2508.08221)."""
    grouped = in_groups(rewards, group_size)
    return divided(centred(grouped, grouped.nanmean(-1, keepdim=True)).flatten(), nanstd(rewards, 0))


def leave_one_out(rewards: Tensor, group_size: int, normalize_advantages: bool = False) -> Tensor:
    """Minus the mean of its siblings, 0 for a completion without any; then `normalized` if asked for.

    RLOO (arXiv:2402.14740). A KL penalty is subtracted from the rewards before.
    """
    grouped = in_groups(rewards, group_size)
    siblings = grouped.isnan().logical_not().sum(-1, keepdim=True) - 1
    baseline = (grouped.nansum(-1, keepdim=True) - grouped) / siblings.clamp(min=1)
    advantages = centred(grouped, baseline).flatten()
    return normalized(advantages) if normalize_advantages else advantages.nan_to_num(0.0)


def opo(rewards: Tensor, group_size: int, lengths: Tensor) -> Tensor:
    """Minus the group's mean weighted by `lengths` (N,), the baseline of least variance (arXiv:2505.23585)."""
    grouped = in_groups(rewards, group_size)
    weights = torch.where(grouped.isnan(), 0.0, lengths.view_as(grouped).to(grouped.dtype))
    baseline = (grouped * weights).nansum(-1, keepdim=True) / weights.sum(-1, keepdim=True).clamp(min=1)
    return centred(grouped, baseline).nan_to_num(0.0).flatten()


def reinforce_plus_plus(rewards: Tensor, group_size: int) -> Tensor:
    """Minus the mean of all, over the standard deviation of all (REINFORCE++, arXiv:2501.03262)."""
    return normalized(in_groups(rewards, group_size).flatten())


def reinforce_plus_plus_baseline(rewards: Tensor, group_size: int) -> Tensor:
    """Minus the group's mean, then with mean 0 and variance 1 over all (arXiv:2501.03262)."""
    grouped = in_groups(rewards, group_size)
    return normalized(centred(grouped, grouped.nanmean(-1, keepdim=True)).flatten())


def a2po(rewards: Tensor, group_size: int, reference_rewards: Tensor, beta1: float = 0.5) -> Tensor:
    """Minus the prompt's `optimal_value` (A*-PO, arXiv:2505.20686), from rewards of the reference's own completions.

    `reference_rewards` is (N / group_size, M); a prompt without any that could be judged has advantages of 0.
    """
    grouped = in_groups(rewards, group_size)
    return (grouped - optimal_value(reference_rewards, beta1)[:, None]).nan_to_num(0.0).flatten()


def optimal_value(rewards: Tensor, beta1: float) -> Tensor:
    """beta1 log mean exp(r / beta1) over the last dimension: the value of the best policy at that distance.

    arXiv:2505.20686; between the mean (beta1 large) and the maximum (beta1 small). NaN is left out.
    """
    best = torch.where(rewards.isnan(), -torch.inf, rewards).amax(-1, keepdim=True)
    mean = ((rewards - best) / beta1).expm1().nanmean(-1)
    return beta1 * mean.log1p() + best.squeeze(-1)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (group, batch, none, leave_one_out, opo, reinforce_plus_plus, reinforce_plus_plus_baseline, a2po)
}


def normalized(advantages: Tensor) -> Tensor:
    """With mean 0 and standard deviation 1 over all that are not NaN, which become 0; (N,)."""
    return divided(centred(advantages, advantages.nanmean()), nanstd(advantages, 0))


def normalize_then_sum(rewards: Tensor, group_size: int, weights: Tensor) -> Tensor:
    """`summed_alone`, then `normalized` over all: GDPO (arXiv:2601.05242)."""
    return normalized(summed_alone(rewards, group_size, weights))


def summed_alone(rewards: Tensor, group_size: int, weights: Tensor) -> Tensor:
    """`group` of every reward function alone, summed with weights (F,); NaN where none of them could judge.

    `rewards` is (N, F). So a function with small rewards counts as much as one with large ones.
    """
    alone = torch.stack([group(column, group_size) for column in rewards.unbind(-1)], -1)
    return torch.where(rewards.isnan().all(-1), torch.nan, (alone * weights).sum(-1))
