"""Groups that teach something in the place of groups that don't, before a block is trained."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strop.losses.advantages import nanstd
from strop.rollout.measure import Metrics
from strop.rollout.types import Rollout


def has_signal(rewards: Tensor, group: int) -> Tensor:
    """(N / group,): whether rewards (N,) differ within each group; NaN differs from nothing."""
    grouped = rewards.view(-1, group)
    return grouped.nan_to_num(-torch.inf).amax(-1) > grouped.nan_to_num(torch.inf).amin(-1)


def spreads(rewards: Tensor, group: int) -> list[float]:
    """The standard deviation of rewards (N,) in each group, 0 where there is none."""
    return nanstd(rewards.view(-1, group), -1).nan_to_num(0.0).flatten().tolist()


def with_signal(
    rollouts: list[Rollout],
    group: int,
    rounds: int,
    rewards_of: Callable[[Sequence[Rollout]], Tensor],
    play: Callable[[int], list[Rollout]],
) -> tuple[list[Rollout], Metrics]:
    """As many rollouts, groups of equal rewards replaced by those of new prompts as far as `rounds` allow (DAPO,
    arXiv:2503.14476, section 3.2), and what that took.

    `play` gives the rollouts of so many new prompts, `rewards_of` the rewards whose differences count.
    """
    wanted, asked, played = len(rollouts), 0, 0
    num_groups = wanted // group
    live, dead = _split(rollouts, group, rewards_of)
    while len(live) < wanted and played < rounds:
        missing = (wanted - len(live)) // group
        played, asked = played + 1, asked + missing
        more, duds = _split(play(missing), group, rewards_of)
        live, dead = live + more, dead + duds
    metrics = {
        "dynamic_sampling/rounds": (played, 1.0),
        "dynamic_sampling/extra_prompts": (asked, 1.0),
        "dynamic_sampling/frac_with_signal": (len(live) // group, num_groups + asked),
    }
    return (live + dead)[:wanted], metrics


def _split(
    rollouts: list[Rollout], group: int, rewards_of: Callable[[Sequence[Rollout]], Tensor]
) -> tuple[list[Rollout], list[Rollout]]:
    """The rollouts of groups with a signal, and those of others."""
    live: list[Rollout] = []
    dead: list[Rollout] = []
    for i, signal in enumerate(has_signal(rewards_of(rollouts), group).tolist()):
        (live if signal else dead).extend(rollouts[i * group : (i + 1) * group])
    return live, dead
