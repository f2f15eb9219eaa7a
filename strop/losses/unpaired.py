"""Losses on single completions with a thumb up or down, each one a line of `UNPAIRED_LOSSES`.

A loss takes `log_ratio` (B,), log pi/ref of whole completions, `desirable` (B,) bool, and `baseline` (), the log ratio
that counts as neutral, in nats; it returns one loss a row, (B,), before weights of classes. `beta` is in 1/nat.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def _signed(value: Tensor, desirable: Tensor) -> Tensor:
    return torch.where(desirable, value, -value)


def kto(log_ratio: Tensor, desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """Kahneman-Tversky optimisation (arXiv:2402.01306), around `kto_baseline`."""
    return (-beta * _signed(log_ratio - baseline.detach(), desirable)).sigmoid()


def apo_zero_unpaired(log_ratio: Tensor, desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """APO-zero by completion (arXiv:2408.06266 eq. 7): anchored at 0, so it needs no baseline and reads none."""
    return (-beta * _signed(log_ratio, desirable)).sigmoid()


def bco(log_ratio: Tensor, desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """Binary classifier optimisation (arXiv:2404.04656), around the running mean of all log ratios."""
    return -logsigmoid(beta * _signed(log_ratio - baseline.detach(), desirable))


UNPAIRED_LOSSES: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (kto, apo_zero_unpaired, bco)}


def kto_baseline(total: Tensor, count: int) -> Tensor:
    """KTO's estimate of KL(pi || ref) in nats, (), at least 0, without gradient (arXiv:2402.01306).

    `total` is the sum of log pi/ref over `count` completions, each scored under another row's prompt.
    """
    return (total.detach() / max(count, 1)).clamp(min=0)


def running_mean(mean: float, count: int, new_sum: float, new_count: int) -> float:
    """The mean over `count` old values and `new_count` new ones; `mean` itself when there are none."""
    return mean + (new_sum - mean * new_count) / max(count + new_count, 1)


def weighted(losses: Tensor, desirable: Tensor, desirable_weight: float, undesirable_weight: float) -> Tensor:
    """`losses` times the weight of each row's class, (B,)."""
    return losses * torch.where(desirable, losses.new_tensor(desirable_weight), losses.new_tensor(undesirable_weight))


def density_ratio(probability: Tensor, low: float = 0.5, high: float = 10.0) -> Tensor:
    """p / (1 - p) within [low, high], (B,): the weight of an undesirable row (arXiv:2404.04656).

    `probability` (B,) is that of the row's prompt being one of a desirable row.
    """
    return (probability / (1 - probability + 1e-8)).clamp(low, high)
