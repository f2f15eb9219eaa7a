"""Losses on pairs without a reference policy, each one a line of `REFERENCE_FREE_LOSSES`.

They take the `Pairs` of `preference`, whose values are then log pi. A trainer adds the likelihood of the chosen
completion (of the reference completion in TPO), which keeps the policy in place of the reference.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .preference import Pairs, box_cox, hinge, ipo, logistic, sigmoid


def simpo(pairs: Pairs, beta: float, gamma: float = 0.5, smoothing: float = 0.0) -> Tensor:
    """SimPO (arXiv:2405.14734 eq. 6): per-token averages that differ by gamma / beta. TPO-L (arXiv:2405.16681) too."""
    return logistic(beta * pairs.mean_margin - gamma, smoothing)


def orpo(pairs: Pairs, beta: float) -> Tensor:
    """The odds ratio term of ORPO (arXiv:2403.07691 eq. 7), times its weight `beta` (the paper's lambda)."""
    return -beta * logsigmoid(odds_margin(pairs))


def odds_margin(pairs: Pairs) -> Tensor:
    """log odds(chosen) - log odds(rejected), (B,), of probabilities averaged per token (arXiv:2403.07691 eq. 4)."""
    chosen, rejected = pairs.means
    return log_odds(chosen) - log_odds(rejected)


def log_odds(logp: Tensor) -> Tensor:
    """log p / (1 - p) from log p, which is held below 0 by one rounding unit."""
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    # 1 - p near p = 1 from expm1 and near p = 0 from log1p: each loses all digits at the other end.
    log_complement = torch.where(logp > -math.log(2), (-logp.expm1()).log(), (-logp.exp()).log1p())
    return logp - log_complement


REFERENCE_FREE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": sigmoid,  # CPO (arXiv:2401.08417 eq. 3), TPO (arXiv:2405.16681)
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "tpo-l": simpo,
}

PER_TOKEN_MEAN = frozenset({"ipo", "simpo", "orpo", "tpo-l"})
"""Rows that read averages over a completion's tokens; the others read sums."""


def alphapo_reward(logps: Tensor, alpha: float) -> Tensor:
    """AlphaPO's reward (1 - p^-alpha) / alpha from log p (arXiv:2501.03884); alpha 0 gives log p."""
    return box_cox(logps, -alpha)


def alphapo_pairs(pairs: Pairs, alpha: float, mean: bool) -> Pairs:
    """`pairs` with AlphaPO's rewards, of per-token averages if `mean`, for any row: as if each were one token long."""
    chosen, rejected = pairs.means if mean else (pairs.chosen, pairs.rejected)
    one = torch.ones_like(pairs.chosen_length)
    return Pairs(alphapo_reward(chosen, alpha), alphapo_reward(rejected, alpha), one, one)
