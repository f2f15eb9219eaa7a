"""Policy-gradient losses, each one a line of `POLICY_LOSSES`: a ratio, a surrogate and a reduction.

    ratio      how far the policy has moved since it sampled
    surrogate  what a token contributes
    reduction  how tokens become one number (`reduce`)

A loss takes `Sampled`, (B, T) tensors, and returns its share of the step's loss, (). Logarithms are natural.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .reduce import StepCounts, constant_length, masked_mean, masked_sum, sequence_mean, sequence_sum, token_mean

MAX_LOG_RATIO = 20.0
"""Log ratios, in nats, are held below this where they are exponentiated; beyond it the gradient is 0."""


def capped_exp(log_ratio: Tensor) -> Tensor:
    """exp, of at most `MAX_LOG_RATIO`."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


@dataclass(frozen=True, slots=True)
class Sampled:
    """Completions that a policy has sampled, (B, T) each; what belongs to whole rows may be (B, 1).

    Example: one completion of the tokens A A, a tool's answer E, and B

        logps       [ a   a   .   b ]    what stands under a 0 of `mask`, NaN included, counts for nothing
        mask        [ 1   1   0   1 ]
        advantages  [ 0.7 ]
    """

    logps: Tensor
    """log pi of the policy in training; nothing else carries a gradient."""
    old_logps: Tensor
    """log pi of the policy that the ratio is taken to; `logps.detach()` where it hasn't moved since it sampled."""
    advantages: Tensor
    mask: Tensor
    """1 on the tokens that are trained."""
    keep: Tensor | None = None
    """1 on the tokens whose surrogate counts; the others stay in the denominators. See `corrections`."""
    correction: Tensor | None = None
    """pi_old/pi_sampler, bounded: `corrections.importance_correction`."""

    def masked(self) -> "Sampled":
        """The same with 0 wherever `mask` is, so that NaN there can't come back through a product with 0."""
        inside = self.mask.bool()

        def clean(values: Tensor) -> Tensor:
            return torch.where(inside if values.shape == inside.shape else inside.any(-1, keepdim=True), values, 0.0)

        return Sampled(
            clean(self.logps),
            clean(self.old_logps.detach()),
            clean(self.advantages.detach()),
            self.mask,
            None if self.keep is None else clean(self.keep.detach()),
            None if self.correction is None else clean(self.correction.detach()),
        )

    @property
    def kept(self) -> Tensor:
        """`mask` without the tokens that `keep` leaves out."""
        return self.mask if self.keep is None else self.mask * self.keep


def token_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """log of one weight a token, (B, T)."""
    return log_ratio


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """log of one weight a row, (B, 1): the geometric mean of its tokens' (GSPO, arXiv:2507.18071)."""
    return masked_mean(log_ratio, mask, -1)[:, None]


def sequence_token_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The value of the row's weight and the gradient of the token's, (B, T) (GSPO-token, arXiv:2507.18071)."""
    return sequence_ratio(log_ratio, mask).detach() + log_ratio - log_ratio.detach()


def product_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """log of the ratio of whole completions, (B, 1): the product of the tokens' (RLOO, arXiv:2402.14740)."""
    return masked_sum(log_ratio, mask, -1)[:, None]


RATIOS = {"token": token_ratio, "sequence": sequence_ratio, "sequence_token": sequence_token_ratio}
"""Values of `importance_sampling_level`."""


def clip(
    sampled: Sampled,
    log_ratio: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347 eq. 7).

    `epsilon_high` is DAPO's upper bound (arXiv:2503.14476), by default `epsilon`; `delta` bounds the ratio of
    negative advantages as well (INTELLECT-2, arXiv:2505.07291).
    """
    ratio = capped_exp(log_ratio)
    low, high = clip_bounds(epsilon, epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(bounded * sampled.advantages, ratio.clamp(low, high) * sampled.advantages)


def clip_sequences(
    sampled: Sampled,
    log_ratio: Tensor,
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    delta: float | None = None,
) -> Tensor:
    """`clip` with GSPO's bounds: a geometric mean moves less than a token's ratio (arXiv:2507.18071)."""
    return clip(sampled, log_ratio, epsilon, epsilon_high, delta)


def cispo(sampled: Sampled, log_ratio: Tensor, epsilon_high: float = 5.0) -> Tensor:
    """The weight is capped and no token loses its gradient (CISPO, arXiv:2506.13585).

    `epsilon_high` is the cap itself, not its distance from 1. Refuses caps below 1, which scale all gradients down.
    """
    if epsilon_high < 1:
        raise ValueError(
            f"epsilon_high={epsilon_high} caps the ratios of cispo below 1, so it would scale every gradient by "
            f"{epsilon_high} even on-policy. Here it is the largest ratio itself: take 5, say"
        )
    return -capped_exp(log_ratio).clamp(max=epsilon_high).detach() * sampled.advantages * sampled.logps


def sapo(
    sampled: Sampled, log_ratio: Tensor, sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05
) -> Tensor:
    """A sigmoid gate in place of a hard clip, steeper for negative advantages (SAPO, arXiv:2511.20347)."""
    advantages = sampled.advantages
    steep = advantages.new_tensor(sapo_temperature_pos), advantages.new_tensor(sapo_temperature_neg)
    temperature = torch.where(advantages > 0, *steep)
    return -(4 / temperature) * (temperature * (capped_exp(log_ratio) - 1)).sigmoid() * advantages


def gmpo(sampled: Sampled, log_ratio: Tensor, epsilon: float = 0.4, epsilon_high: float | None = None) -> Tensor:
    """Geometric mean of ratios that are clipped in log space (GMPO, arXiv:2507.20673).

    `epsilon` is in nats. The mean is over the tokens of `Sampled.keep`, and a row without any has no loss.
    """
    clipped = log_ratio.clamp(-epsilon, epsilon if epsilon_high is None else epsilon_high)
    pessimistic = torch.where(
        sampled.advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped)
    )
    kept = sampled.kept
    mean = masked_mean(pessimistic, kept, -1)[:, None]
    # Tokens that are left out stay in the row's length, so those that remain carry their share.
    share = (sampled.mask.sum(-1) / kept.sum(-1).clamp(min=1))[:, None]
    return -capped_exp(mean) * sampled.advantages * share


def vespo(
    sampled: Sampled,
    log_ratio: Tensor,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Tensor:
    """w^k e^(lambda (1 - w)) weighs each completion, whose ratio is w, and no token is clipped (arXiv:2602.10693).

    k and lambda go by the sign of the advantage. The correction for another sampler is part of w.
    """
    log_w = whole_log_ratio(sampled, log_ratio.detach())
    positive = log_gamma(log_w, vespo_k_pos, vespo_lambda_pos)
    negative = log_gamma(log_w, vespo_k_neg, vespo_lambda_neg)
    return -torch.where(sampled.advantages >= 0, positive, negative).exp() * sampled.advantages * sampled.logps


def log_gamma(log_w: Tensor, k: float, lam: float) -> Tensor:
    """log of w^k e^(lambda (1 - w)), which is 0 at w = 1."""
    return k * log_w + max(lam, 1e-4) * (1 - log_w.exp())


def whole_log_ratio(sampled: Sampled, log_ratio: Tensor) -> Tensor:
    """log pi/pi_sampler of whole completions, (B, 1), within log 1e-8 and `MAX_LOG_RATIO`."""
    lowest = math.log(1e-8)
    total = product_ratio(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), sampled.mask)
    if sampled.correction is not None:
        correction = sampled.correction.log().clamp(lowest, MAX_LOG_RATIO)
        whole = correction.shape != sampled.mask.shape
        total = total + (correction if whole else product_ratio(correction, sampled.mask))
    return total.clamp(lowest, MAX_LOG_RATIO)


def regression(sampled: Sampled, log_ratio: Tensor, beta2: float = 1e-3) -> Tensor:
    """(beta2 log pi/ref - advantage)^2 of whole completions: A*-PO (arXiv:2505.20686)."""
    return (beta2 * log_ratio - sampled.advantages) ** 2


def clip_bounds(epsilon: float, epsilon_high: float | None, **_: Any) -> tuple[float, float]:
    """Ratios between which `clip` leaves a token its gradient."""
    return 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)


def cispo_bounds(epsilon_high: float, **_: Any) -> tuple[float, float]:
    return 0.0, epsilon_high


def gmpo_bounds(epsilon: float, epsilon_high: float | None, **_: Any) -> tuple[float, float]:
    return math.exp(-epsilon), math.exp(epsilon if epsilon_high is None else epsilon_high)


class PolicyLoss(NamedTuple):
    """Three choices that make a loss. A surrogate is `f(sampled, log_ratio, <options>)` and returns (B, T)."""

    ratio: Callable[[Tensor, Tensor], Tensor]
    surrogate: Callable[..., Tensor]
    reduction: Callable[..., Tensor]
    bounds: Callable[..., tuple[float, float]] | None = None
    """Ratios outside of which the surrogate is clipped, from its options."""

    def __call__(
        self, sampled: Sampled, counts: StepCounts, penalty: Tensor | None = None, **options: float | None
    ) -> Tensor:
        """The share of the step's loss, (). `penalty` (B, T), weighted, is added to the losses of tokens."""
        if unknown := options.keys() - self.options.keys():
            raise ValueError(f"{sorted(unknown)} are no options of this loss, whose own are {sorted(self.options)}")
        sampled = sampled.masked()
        loss = self.surrogate(sampled, self.log_ratio(sampled), **_among(options, self.surrogate, given=2))
        # The weight of vespo has the correction in it.
        if sampled.correction is not None and self.surrogate is not vespo:
            loss = loss * sampled.correction
        if sampled.keep is not None:
            loss = loss * sampled.keep
        if penalty is not None:
            loss = loss + penalty
        return self.reduction(loss, sampled.mask, counts, **_among(options, self.reduction, given=3))

    def log_ratio(self, sampled: Sampled) -> Tensor:
        """log pi/pi_old at this loss's level: (B, T), or (B, 1) where a row has one."""
        inside = sampled.mask.bool()
        return self.ratio(torch.where(inside, sampled.logps - sampled.old_logps.detach(), 0.0), sampled.mask)

    def clipped(self, sampled: Sampled, **options: float | None) -> tuple[Tensor, Tensor] | None:
        """Where the ratio is too low at a negative advantage, too high at a positive one; None if nothing is clipped.

        Both are bool and (B, T), or (B, 1) where a row has one ratio and one advantage.
        """
        if self.bounds is None:
            return None
        low, high = self.bounds(**self.options | options)
        ratio = capped_exp(self.log_ratio(sampled).detach())
        too_low, too_high = (ratio < low) & (sampled.advantages < 0), (ratio > high) & (sampled.advantages > 0)
        inside = sampled.mask.bool()
        if too_low.shape != inside.shape:
            inside = inside.any(-1, keepdim=True)
        return too_low & inside, too_high & inside

    @property
    def selects_tokens(self) -> bool:
        """Whether `Sampled.keep` can leave out single tokens: a row's ratio trains all of its tokens, or none."""
        return self.ratio in (token_ratio, sequence_token_ratio)

    @property
    def options(self) -> dict[str, Any]:
        """Its options and their defaults; `Parameter.empty` where one must be given."""
        return _options(self.surrogate, given=2) | _options(self.reduction, given=3)


def _options(function: Callable[..., Tensor], given: int) -> dict[str, Any]:
    own = list(signature(function).parameters.values())[given:]
    return {p.name: p.default for p in own if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}


def _among(options: dict[str, float | None], function: Callable[..., Tensor], given: int) -> dict[str, float | None]:
    return {name: value for name, value in options.items() if name in _options(function, given)}


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(token_ratio, clip, sequence_mean, clip_bounds),  # arXiv:2402.03300
    "bnpo": PolicyLoss(token_ratio, clip, token_mean, clip_bounds),
    "dr_grpo": PolicyLoss(token_ratio, clip, constant_length, clip_bounds),  # arXiv:2503.20783
    "dapo": PolicyLoss(token_ratio, clip, token_mean, clip_bounds),  # arXiv:2503.14476; PPO too
    "luspo": PolicyLoss(sequence_ratio, clip, sequence_sum, clip_bounds),  # arXiv:2602.05261
    "gspo": PolicyLoss(sequence_ratio, clip_sequences, sequence_mean, clip_bounds),  # arXiv:2507.18071
    "gspo_token": PolicyLoss(sequence_token_ratio, clip_sequences, sequence_mean, clip_bounds),
    "cispo": PolicyLoss(token_ratio, cispo, token_mean, cispo_bounds),
    "sapo": PolicyLoss(token_ratio, sapo, sequence_mean),
    "gmpo": PolicyLoss(token_ratio, gmpo, sequence_mean, gmpo_bounds),
    "vespo": PolicyLoss(token_ratio, vespo, token_mean),
    "rloo": PolicyLoss(product_ratio, clip, sequence_mean, clip_bounds),  # arXiv:2402.14740
    "a2po": PolicyLoss(product_ratio, regression, sequence_mean),
}

ANY_LEVEL = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo"})
"""Losses whose `importance_sampling_level` may be chosen; the others are defined by theirs."""

AGAINST_REFERENCE = frozenset({"a2po"})
"""Losses whose `old_logps` are those of the reference policy, whoever sampled."""


def policy_loss(loss_type: str, importance_sampling_level: str | None = None) -> PolicyLoss:
    """The loss of a name, with another ratio if one is named. Refuses unknown names, and a ratio where it is fixed."""
    if loss_type not in POLICY_LOSSES:
        raise ValueError(f"loss_type={loss_type!r} is no policy loss; there are {list(POLICY_LOSSES)}")
    loss = POLICY_LOSSES[loss_type]
    if importance_sampling_level is None:
        return loss
    if importance_sampling_level not in RATIOS:
        known = list(RATIOS)
        raise ValueError(f"importance_sampling_level={importance_sampling_level!r} is no level; there are {known}")
    ratio = RATIOS[importance_sampling_level]
    if loss_type not in ANY_LEVEL and loss.ratio is not ratio:
        raise ValueError(
            f"importance_sampling_level={importance_sampling_level!r} would be ignored: {loss_type} is defined by its "
            f"own ratio. Leave it unset, or take a loss_type of {sorted(ANY_LEVEL)}"
        )
    return loss._replace(ratio=ratio)
