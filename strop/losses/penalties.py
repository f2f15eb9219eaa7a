"""What keeps a policy near a reference, and what keeps it from becoming certain."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .policy import MAX_LOG_RATIO, capped_exp


def k1(log_ratio: Tensor) -> Tensor:
    """log pi/ref: unbiased, may be negative. For rewards: in a loss its expected gradient is 0."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Half the square of log pi/ref: biased, but on-policy its gradient is that of KL(pi || ref)."""
    return 0.5 * log_ratio**2


def k3(log_ratio: Tensor) -> Tensor:
    """ref/pi - 1 - log ref/pi: unbiased, never negative, constant beyond ref/pi of e^20.

    On-policy its gradient is that of KL(ref || pi), unless the ratio corrects it.
    """
    return capped_exp(log_ratio) - log_ratio.clamp(max=MAX_LOG_RATIO) - 1


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (k1, k2, k3)}
"""Estimates of KL(pi || ref) in nats from one sampled token, given log ref/pi (joschu.net/blog/kl-approx)."""


def kl_penalty(
    logps: Tensor, ref_logps: Tensor, mask: Tensor, estimator: str = "k3", log_ratio: Tensor | None = None
) -> Tensor:
    """An estimate of KL(pi || ref) at every trained token in nats, (B, T).

    With `log_ratio`, log pi/pi_old of `PolicyLoss.log_ratio`, it is multiplied by the ratio, through which the gradient
    goes too: unbiased where pi_old sampled (DeepSeek-V3.2, arXiv:2512.02556).
    """
    estimate = KL_ESTIMATORS[estimator](torch.where(mask.bool(), ref_logps.detach() - logps, 0.0))
    return estimate if log_ratio is None else estimate * capped_exp(log_ratio)


@dataclass(frozen=True, slots=True)
class EntropyController:
    """The weight of an entropy bonus that holds a policy's entropy up to a target (Skywork-OR1, arXiv:2505.22312).

    Plain numbers, so that it goes into a checkpoint as it is.
    """

    coef: float
    target: float = 0.2
    """nats a token."""
    delta: float = 0.005
    """How much `coef` moves in a step."""
    coef_min: float = 0.0
    coef_max: float = 1.0
    entropy: float = math.inf
    """Of the step before, in nats a token."""

    @property
    def weight(self) -> float:
        """What to multiply the mean entropy of the step's tokens by; 0 while the entropy is above the target."""
        return self.coef if self.entropy <= self.target else 0.0

    def after(self, entropy: float) -> "EntropyController":
        """The controller of the next step, when the tokens of this one had this mean entropy."""
        moved = self.coef + (self.delta if entropy <= self.target else -self.delta)
        return replace(self, coef=min(max(moved, self.coef_min), self.coef_max), entropy=entropy)


@dataclass(frozen=True, slots=True)
class KLController:
    """The weight of a KL penalty that steers the KL divergence of whole completions to a target (arXiv:1909.08593,
    section 2.2).

    Plain numbers, so that it goes into a checkpoint as it is.
    """

    coef: float
    target: float | None = None
    """nats a completion; None: `coef` stays."""
    horizon: float = 10000.0
    """Completions after which a divergence of 1.2 times the target or more has moved `coef` by a factor of about
    e^0.2."""

    def after(self, kl: float, completions: int) -> "KLController":
        """The controller of the next block, when so many completions had this mean divergence, in nats."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * completions / self.horizon))
