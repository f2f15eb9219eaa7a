"""Weights and masks for tokens that the policy in training would not have sampled, all without gradient."""

import torch
from torch import Tensor

from .policy import capped_exp
from .reduce import masked_mean, masked_sum

CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def importance_correction(
    old_logps: Tensor,
    sampling_logps: Tensor,
    mask: Tensor,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Tensor:
    """pi_old/pi_sampler of tokens, (B, T), or of whole completions, (B, 1): truncated importance sampling.

    Both are the same weights in two programs, of which one has sampled. "truncate" holds ratios within the bounds,
    "mask" gives those outside the weight 0. Where the sampler reports no number (NaN) the ratio is 1. Refuses unknown
    modes, "truncate" without a bound and bounds that cross.
    """
    check_correction(mode, clip_min, clip_max)
    level, bound = mode.split("_")
    log_ratio = torch.where(mask.bool(), old_logps - sampling_logps, 0.0).detach().nan_to_num(0.0)
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, -1)[:, None]
    ratio = capped_exp(log_ratio)
    if bound == "truncate":
        return ratio.clamp(clip_min, clip_max)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if clip_min is not None:
        outside |= ratio < clip_min
    if clip_max is not None:
        outside |= ratio > clip_max
    return ratio.masked_fill(outside, 0.0)


def check_correction(mode: str, clip_min: float | None, clip_max: float | None) -> None:
    """Refuses what `importance_correction` can't do."""
    if mode not in CORRECTION_MODES:
        raise ValueError(f"mode={mode!r} is no importance correction; there are {list(CORRECTION_MODES)}")
    if clip_min is not None and clip_max is not None and clip_min >= clip_max:
        raise ValueError(f"clip_min={clip_min} is not below clip_max={clip_max}, so no ratio lies between them")
    if mode.endswith("truncate") and clip_min is None and clip_max is None:
        raise ValueError(f"mode={mode!r} has no bound to truncate at: give clip_max, 3.0 say, or clip_min")


def off_policy_keep(
    logps: Tensor, sampling_logps: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """1 on rows that are good or still likely, shaped like `advantages` (DeepSeek-V3.2, arXiv:2512.02556).

    A row with a negative advantage goes where the mean of log pi_sampler/pi over its tokens is above `threshold` nats.
    """
    moved = masked_mean((sampling_logps - logps).detach().nan_to_num(0.0), mask, -1)[:, None]
    return ((advantages >= 0) | (moved <= threshold)).to(logps.dtype)


def entropy_threshold(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """The entropy, (), that a share `quantile` of the trained tokens have or exceed (arXiv:2506.01939).

    Give all tokens over which the share is to hold. Without any, minus infinity.
    """
    trained = entropies.detach()[mask.bool()].float()
    if not len(trained):
        return entropies.new_tensor(-torch.inf)
    # torch.quantile refuses more than 2^24 values, so interpolate between two order statistics.
    place = (1 - quantile) * (len(trained) - 1)
    ranked = trained.sort().values
    below, above = ranked[int(place)], ranked[min(int(place) + 1, len(trained) - 1)]
    return torch.lerp(below, above, place - int(place)).to(entropies.dtype)


def top_entropy_keep(entropies: Tensor, mask: Tensor, threshold: Tensor) -> Tensor:
    """1 on trained tokens whose entropy is at least `threshold`, (B, T)."""
    return ((entropies.detach() >= threshold) & mask.bool()).to(entropies.dtype)
