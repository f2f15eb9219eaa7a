"""What a round of rollouts tells in numbers: lengths, rewards, how much signal there is."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from strop.losses.advantages import all_equal, nanstd
from strop.rollout.types import Rollout

Metrics = dict[str, tuple[float, float]]
"""Name -> (sum, weight)."""


def reward_matrix(rollouts: Sequence[Rollout], names: Sequence[str]) -> Tensor:
    """(N, F): the rewards of each rollout; NaN where a reward doesn't apply."""
    rows = [[_number(rollout.rewards.get(name)) for name in names] for rollout in rollouts]
    return torch.tensor(rows, dtype=torch.float32).view(len(rollouts), len(names))


def _number(value: float | None) -> float:
    return torch.nan if value is None else float(value)


def length_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Of the tokens that the model wrote; terminated completions are those that weren't cut off."""
    lengths = [rollout.length for rollout in rollouts]
    ended = [rollout.length for rollout in rollouts if rollout.finish_reason != "length"]
    metrics: Metrics = {}
    for kind, some in (("length", lengths), ("terminated_length", ended)):
        if some:
            metrics[f"completions/mean_{kind}"] = (sum(some), len(some))
            metrics[f"completions/min_{kind}"] = (min(some), 1)
            metrics[f"completions/max_{kind}"] = (max(some), 1)
    if lengths:
        metrics["completions/clipped_ratio"] = (len(lengths) - len(ended), len(lengths))
    return metrics


def reward_metrics(rewards: Tensor, names: Sequence[str], totals: Tensor, group_size: int) -> Metrics:
    """Of rewards (N, F) and their weighted sums (N,): means and standard deviations over what could be judged, and the
    share of groups of equal rewards."""
    metrics: Metrics = {}
    columns = {f"rewards/{name}/mean": column for name, column in zip(names, rewards.unbind(-1), strict=True)}
    for name, column in (columns | {"reward": totals}).items():
        spread = name.replace("/mean", "/std") if "/" in name else "reward_std"
        judged = column[~column.isnan()]
        if len(judged):
            metrics[name] = (judged.sum().item(), len(judged))
        if len(judged) > 1:
            metrics[spread] = (nanstd(column, 0).item(), 1)
    if len(totals):
        equal = all_equal(totals.view(-1, group_size)) | totals.view(-1, group_size).isnan().all(-1, keepdim=True)
        metrics["frac_reward_zero_std"] = (equal.sum().item(), len(equal))
    return metrics


def episode_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """What the episodes measured themselves, added up."""
    return added(rollout.metrics for rollout in rollouts)


def added(several) -> Metrics:
    """Metrics added up by name."""
    total: Metrics = {}
    for metrics in several:
        for name, (value, weight) in metrics.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = (before[0] + value, before[1] + weight)
    return total


def logged(metrics: Mapping[str, Sequence[float]]) -> Metrics:
    """What reward functions gave to `log_metric`."""
    return {name: (sum(values), len(values)) for name, values in metrics.items()}
