"""Losses on pairs that the policy takes part in writing: judged both ways round, explored, or played as a game."""

from collections.abc import Callable

from torch import Tensor

from .preference import Pairs
from .reduce import masked_sum


def labelled(loss: Callable[..., Tensor], pairs: Pairs, beta: float, label: Tensor) -> Tensor:
    """(B,): what `loss` expects if `label` (B,) is the chance that what `pairs` calls chosen is the better one."""
    flipped = Pairs(pairs.rejected, pairs.chosen, pairs.rejected_length, pairs.chosen_length)
    return label * loss(pairs, beta) + (1 - label) * loss(flipped, beta)


def exploration(logps: Tensor, alpha: float) -> Tensor:
    """(B,): XPO's term beside DPO (arXiv:2405.21046, algorithm 1), alpha log pi of what the reference wrote."""
    return alpha * logps


def nash_md(logps: Tensor, ref_logps: Tensor, mask: Tensor, probability: Tensor, beta: float) -> Tensor:
    """(B,): Nash-MD's policy gradient (arXiv:2312.00886, section 7) as a loss of the policy's own completions.

    `logps` and `ref_logps` are (B, T), `probability` (B,) the chance that a completion beats the mixture's. Its value
    means nothing: the gradient of each token is (beta log pi/ref of the token - (probability - 1/2)) of its log pi.
    """
    weight = beta * (logps.detach() - ref_logps) - (probability[:, None] - 0.5)
    return masked_sum(weight * logps, mask, -1)
