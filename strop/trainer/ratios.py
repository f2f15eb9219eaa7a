"""What ratios of probabilities tell in numbers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from strop.losses.policy import PolicyLoss, Sampled, capped_exp, cispo, log_gamma, vespo, whole_log_ratio
from strop.losses.reduce import masked_sum

from .meter import Metrics


def ratio_metrics(loss: PolicyLoss, sampled: Sampled, options: Mapping[str, Any]) -> Metrics:
    """How many ratios are clipped: of tokens, or of rows where a row has one; vespo: how rows are weighed."""
    mask = sampled.mask
    has_tokens = mask.any(-1)
    if loss.surrogate is vespo:
        weights = vespo_weights(loss, sampled, options)[has_tokens]
        return {"vespo/phi_seq_mean": (weights.sum(), len(weights))}
    sides = loss.clipped(sampled, **options)
    if sides is None or not has_tokens.any():
        return {}
    low, high = (side.double() for side in sides)
    weight = mask if low.shape == mask.shape else has_tokens[:, None]
    if loss.surrogate is cispo:
        return {"cispo_clip_ratio": (high.sum(), weight.sum())}
    shares = [(side.sum(-1) / weight.sum(-1).clamp(min=1))[has_tokens] for side in (low, high)]
    return {
        "clip_ratio/low_mean": (low.sum(), weight.sum()),
        "clip_ratio/low_min": (shares[0].min(), 1),
        "clip_ratio/high_mean": (high.sum(), weight.sum()),
        "clip_ratio/high_max": (shares[1].max(), 1),
        "clip_ratio/region_mean": (low.sum() + high.sum(), weight.sum()),
    }


def vespo_weights(loss: PolicyLoss, sampled: Sampled, options: Mapping[str, Any]) -> Tensor:
    """(B,): what the gradient of each row is multiplied by."""
    values = loss.options | dict(options)
    log_w = whole_log_ratio(sampled.masked(), loss.log_ratio(sampled).detach())
    signs = [log_gamma(log_w, values[f"vespo_k_{sign}"], values[f"vespo_lambda_{sign}"]) for sign in ("pos", "neg")]
    return torch.where(sampled.advantages >= 0, *signs).exp().squeeze(-1)


def sampling_metrics(old: Tensor, sampling: Tensor, mask: Tensor, correction: Tensor) -> Metrics:
    """How far the sampler's log-probabilities are from the policy's, in nats, and what they are corrected by."""
    inside = mask.bool()
    gaps = (old - sampling).abs()[inside]
    gaps = gaps[~gaps.isnan()]
    ratios = correction[inside] if correction.shape == mask.shape else correction[inside.any(-1)].flatten()
    metrics: dict[str, tuple[Any, Any]] = {}
    if len(gaps):
        metrics["sampling/sampling_logp_difference/mean"] = (gaps.sum(), len(gaps))
        metrics["sampling/sampling_logp_difference/max"] = (gaps.max(), 1)
    if len(ratios):
        metrics["sampling/importance_sampling_ratio/mean"] = (ratios.sum(), len(ratios))
        metrics["sampling/importance_sampling_ratio/min"] = (ratios.min(), 1)
        metrics["sampling/importance_sampling_ratio/max"] = (ratios.max(), 1)
        metrics["sampling/masked_ratio"] = ((ratios == 0).sum(), len(ratios))
    return metrics


def moved_metrics(loss: PolicyLoss, sampled: Sampled, options: Mapping[str, Any]) -> Metrics:
    """How far from the policy that wrote, over tokens, in PPO's names: half the mean square of log ratios, the share
    clipped, the mean ratio, and its mean square, from which `val/ratio_var` follows."""
    mask = sampled.mask
    log_ratio = loss.log_ratio(sampled).detach()
    ratio = capped_exp(log_ratio)
    sides = loss.clipped(sampled, **options)
    clipped = 0.0 if sides is None else (sides[0] | sides[1]).double().sum()
    tokens = mask.sum()
    return {
        "policy/approxkl_avg": (0.5 * masked_sum(log_ratio**2, mask), tokens),
        "policy/clipfrac_avg": (clipped, tokens),
        "val/ratio": (masked_sum(ratio, mask), tokens),
        "val/ratio_square": (masked_sum(ratio.double() ** 2, mask), tokens),
    }


def value_metrics(values: Tensor, returns: Tensor, losses: Tensor, mask: Tensor) -> Metrics:
    """The share of tokens whose value loss is clipped."""
    is_clipped = losses > 0.5 * torch.where(mask.bool(), values - returns, 0.0) ** 2
    return {"val/clipfrac_avg": ((is_clipped & mask.bool()).sum(), mask.sum())}
