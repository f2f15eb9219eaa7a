"""Losses on given completions, each one a line of `SUPERVISED_LOSSES`.

A loss takes `logps` (B, T), natural log-probabilities of the target tokens, and returns one loss a token, (B, T).
"""

from collections.abc import Callable

from torch import Tensor


def nll(logps: Tensor) -> Tensor:
    """Negative log-likelihood."""
    return -logps


def dft(logps: Tensor) -> Tensor:
    """Dynamic fine-tuning: the likelihood loss weighted by the token's own probability (arXiv:2508.05629 eq. 9)."""
    return -logps.detach().exp() * logps


def label_smoothed(loss: Tensor, mean_logps: Tensor, smoothing: float) -> Tensor:
    """`loss` against a target that gives `smoothing` of its mass to the uniform distribution (arXiv:1512.00567 sec. 7).

    `mean_logps` (B, T) are the log-probabilities averaged over the vocabulary.
    """
    return (1 - smoothing) * loss - smoothing * mean_logps


SUPERVISED_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"nll": nll, "dft": dft}
