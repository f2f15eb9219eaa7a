"""Losses of reward models, from scores alone."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from .reduce import masked_sum


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Negative log-likelihood that the chosen wins by `margin`, (B,) (Bradley & Terry 1952; arXiv:2307.09288 eq. 2)."""
    return -logsigmoid(chosen - rejected - margin)


def centring(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Square of the summed scores, (B,), which pins their free constant at 0 (arXiv:2312.09244 eq. 2)."""
    return (chosen + rejected) ** 2


def plackett_luce(scores: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood of a ranking, (G,) (Plackett 1975; Luce 1959): the best is drawn first, then the next.

    `scores` (G, K) stand best first; `mask` (G, K) is 1 where there is an answer. Two answers give `bradley_terry`.
    """
    num_answers = scores.shape[-1]
    still_there = mask.bool()[:, None, :] & torch.ones(num_answers, num_answers, device=scores.device).triu().bool()
    above = scores[:, None, :] - scores[:, :, None]  # (G, draw, answer): score of the answer minus that of the drawn
    above = torch.where(still_there, above, torch.finfo(scores.dtype).min)
    return masked_sum(above.logsumexp(-1), mask, -1)


def step_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of judged steps, (M,), from `logits` (M, 2) and `labels` (M,), True or 1 for a correct step.

    Process reward models (arXiv:2305.20050).
    """
    return cross_entropy(logits, labels.long(), reduction="none")
