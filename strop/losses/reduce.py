"""Turn per-token losses into one number.

Every reduction divides by counts taken over the *whole optimizer step* (all micro-batches, all ranks), so neither loss
nor gradient depends on how the step was split. Shapes: B rows, T tokens; masks are (B, T), 1 on the tokens that count.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class StepCounts(NamedTuple):
    """What one optimizer step trains on, summed over its micro-batches and ranks."""

    tokens: int
    """Tokens with a loss."""
    sequences: int
    """Rows with at least one such token."""

    def __add__(self, other: "StepCounts") -> "StepCounts":  # type: ignore[override]
        return StepCounts(self.tokens + other.tokens, self.sequences + other.sequences)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is 1. What stands elsewhere, NaN included, reaches neither value nor gradient."""
    return torch.where(mask.bool(), values, 0.0).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is 1; 0 where nothing is."""
    return masked_sum(values, mask, dim) / mask.sum(dim).clamp(min=1)


def token_mean(loss: Tensor, mask: Tensor, counts: StepCounts) -> Tensor:
    """Every token weighs the same, (). The shares of all micro-batches of a step add up to the mean over its tokens."""
    return masked_sum(loss, mask) / max(counts.tokens, 1)


def sequence_mean(loss: Tensor, mask: Tensor, counts: StepCounts) -> Tensor:
    """Every row weighs the same, (), so tokens of long rows weigh less."""
    return masked_mean(loss, mask, dim=-1).sum() / max(counts.sequences, 1)


def sequence_sum(loss: Tensor, mask: Tensor, counts: StepCounts) -> Tensor:
    """Every row weighs as much as it has tokens, (): the mean over rows of their sums."""
    return masked_sum(loss, mask) / max(counts.sequences, 1)


def constant_length(loss: Tensor, mask: Tensor, counts: StepCounts, max_completion_length: int) -> Tensor:
    """`sequence_sum` over a constant, (): every token weighs the same in every step (Dr. GRPO, arXiv:2503.20783)."""
    return sequence_sum(loss, mask, counts) / max_completion_length
