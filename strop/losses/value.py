"""What PPO needs of a value function: rewards of tokens, advantages, a loss.

All are (B, T); `mask` is 1 on the policy's own tokens. Tokens that it didn't write, a tool's in the middle or padding
at the end, are no steps in time: from the last token before them to the first behind is one step.
"""

import torch
from torch import Tensor

from .reduce import masked_mean, masked_sum


def token_rewards(scores: Tensor, mask: Tensor, penalty: Tensor | None = None) -> Tensor:
    """Rewards (B, T): each row's score (B,) at its last own token, minus `penalty` (B, T) at every one."""
    inside = mask.bool()
    last = inside & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    rewards = torch.where(last, scores[:, None], 0.0)
    return rewards if penalty is None else rewards - torch.where(inside, penalty, 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (B, T) each and 0 where `mask` is, without gradient (arXiv:1506.02438 eq. 16)."""
    rewards, values, inside = rewards.detach(), values.detach(), mask.bool()
    next_value = next_advantage = values.new_zeros(len(values))
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        surprise = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = surprise + gamma * lam * next_advantage
        next_advantage = torch.where(inside[:, t], advantage, next_advantage)
        next_value = torch.where(inside[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(inside[:, t], advantage, 0.0)
    return advantages, torch.where(inside, advantages + values, 0.0)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """`values` with variance 1 over all tokens of `mask`, and mean 0 or, unless `shift_mean`, the one they had; (B, T).

    Masked positions are 0. Give a whole step.
    """
    mean = masked_mean(values, mask)
    variance = masked_sum((values - mean) ** 2, mask) / (mask.sum() - 1).clamp(min=1)
    white = (values - mean) * (variance + 1e-8).rsqrt()
    return torch.where(mask.bool(), white if shift_mean else white + mean, 0.0)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange: float = 0.2
) -> Tensor:
    """Half the squared error of every token's value, or of the value held near the old one if that is larger, (B, T).

    PPO's practice (arXiv:2005.12729); reduce it with `token_mean`.
    """
    values, old_values, returns = (torch.where(mask.bool(), x, 0.0) for x in (values, old_values, returns))
    held = values.clamp(old_values - cliprange, old_values + cliprange)
    return 0.5 * torch.maximum((values - returns) ** 2, (held - returns) ** 2)
