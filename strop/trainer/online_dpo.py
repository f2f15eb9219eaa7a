"""Online DPO: the policy writes both completions of a pair, rewards or a judge say which is better, DPO trains on it.

log pi of both - log ref of both = log-ratios  --a line of PREFERENCE_LOSSES, by the chance of either order-->  loss
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Module

from strop.compat import accepts_old_names
from strop.data.collate import Batch
from strop.losses.online import labelled
from strop.losses.preference import PREFERENCE_LOSSES, Pairs
from strop.losses.reduce import StepCounts, masked_sum
from strop.models.logps import logps
from strop.rollout.buffer import Experience
from strop.rollout.types import Rollout

from . import checks
from .meter import Metrics
from .online import OnlinePreferenceTrainer
from .online_config import ONLINE_LOSSES, OnlinePreferenceConfig
from .preference import means_of

__all__ = ["OnlineDPOConfig", "OnlineDPOTrainer"]


@accepts_old_names
@dataclass
class OnlineDPOConfig(OnlinePreferenceConfig):
    """Settings of online direct preference optimisation (arXiv:2402.04792)."""

    loss_type: str = "sigmoid"
    """Loss of a pair, a key of `strop.losses.preference.PREFERENCE_LOSSES`. "ipo" compares log-ratios of whole
    completions (arXiv:2310.12036 eq. 17)."""

    soft_preferences: bool = False
    """Weigh both orders of a pair by their chances, a judge's or by Bradley-Terry those of the rewards, instead of
    taking the likelier one for certain. Ties then train as well: towards no difference."""

    def __post_init__(self):
        checks.one_of("loss_type", self.loss_type, ONLINE_LOSSES)
        super().__post_init__()


@dataclass
class Told:
    """Trained pairs: log-probabilities (n, 2) of policy and reference, in the order they were written, lengths (n, 2),
    and the chance (n,) that the first is better."""

    policy: Tensor
    reference: Tensor
    lengths: Tensor
    label: Tensor

    @property
    def log_ratios(self) -> Tensor:
        return self.policy - self.reference

    @property
    def without_ties(self) -> "Told":
        kept = self.label != 0.5
        return Told(self.policy[kept], self.reference[kept], self.lengths[kept], self.label[kept])

    def better(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(n, 2) of first and second as (n,) of the likely better and worse one."""
        is_first = self.label > 0.5
        first, second = values.unbind(-1)
        return torch.where(is_first, first, second), torch.where(is_first, second, first)


@accepts_old_names
class OnlineDPOTrainer(OnlinePreferenceTrainer):
    """Trains a policy by DPO on pairs of its own completions.

    Rows have a `prompt`, a text or messages. `reward_funcs` are those of GRPOTrainer; in their place a `judge` may
    compare completions. Without `ref_model` the reference is the model as it is now, with a fresh adapter the model
    without it.

    Metrics: `objective/kl`, `objective/entropy` (log pi/ref and -log pi of a completion, nats),
    `objective/non_score_reward` (-beta kl), with rewards `objective/scores`, `objective/scores_margin`,
    `objective/rlhf_reward` and GRPO's; `rewards/chosen`, `rewards/rejected`, `rewards/margins` (beta log pi/ref),
    `rewards/accuracies` (equal ones count half), `logps/chosen`, `logps/rejected`, `val/contain_eos_token`,
    `preferences/ties` and `preferences/no_verdict` (shares of pairs), `beta`. Padding is in none.
    """

    config_class = OnlineDPOConfig
    method = "OnlineDPO"

    @cached_property
    def pair_loss(self):
        return PREFERENCE_LOSSES[self.args.loss_type]

    def is_trained(self, pair: Sequence[Rollout], probability: float) -> bool:
        is_told = self.args.soft_preferences or probability != 0.5
        return is_told and super().is_trained(pair, probability)

    def lead(self, probability: float) -> float:
        lead = 2 * probability - 1
        return lead if self.args.soft_preferences else math.copysign(1.0, lead)

    def experience(self, rollout: Rollout) -> Experience:
        mask = rollout.completion_mask if rollout.extras["trained"] else [0] * len(rollout.token_ids)
        return Experience(
            rollout.token_ids, rollout.prompt_length, mask, rollout.advantage, ref_logps=rollout.ref_logps
        )

    def measured_rewards(self, rollouts: Sequence[Rollout], group: int) -> Metrics:
        metrics = super().measured_rewards(rollouts, group)
        if self.judge is not None:
            return metrics
        margins = self.totals(rollouts).view(-1, 2).diff(dim=-1).abs()
        margins = margins[~margins.isnan()]
        return {**metrics, "objective/scores_margin": (margins.sum().item(), len(margins))}

    # Loss

    def count(self, batch: Batch) -> StepCounts:
        """Tokens, and pairs."""
        rows = super().count(batch)
        return StepCounts(rows.tokens, rows.sequences // 2)

    def loss(self, model: Module, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
        scores = logps(model, batch, temperature=batch["temperature"])
        told = told_pairs(scores.logps, batch)
        share, metrics = self.losses(told)
        balancing, balance = self.balancing(scores.aux_loss, batch, counts)
        return share.sum() / max(counts.sequences, 1) + balancing, {**metrics, **balance}

    def losses(self, told: Told) -> tuple[Tensor, Metrics]:
        """(n,): the loss of each pair; and what it is made of."""
        return self.preference_losses(told), {**self.divergence(told), **self.pair_metrics(told)}

    def preference_losses(self, told: Told) -> Tensor:
        """(n,)."""
        ratios, lengths = told.log_ratios, told.lengths
        if self.args.loss_type == "ipo":  # of whole completions
            lengths = torch.ones_like(lengths)
        pairs = Pairs(*ratios.unbind(-1), *lengths.unbind(-1))
        return labelled(self.pair_loss, pairs, self.now("beta"), told.label)

    def divergence(self, told: Told) -> Metrics:
        """How far the policy is from the reference, of a completion."""
        kl, size = told.log_ratios.detach().sum(), told.policy.numel()
        return {
            "objective/kl": (kl, size),
            "objective/entropy": (-told.policy.detach().sum(), size),
            "objective/non_score_reward": (-self.now("beta") * kl, size),
        }

    def pair_metrics(self, told: Told) -> Metrics:
        beta, size = self.now("beta"), len(told.label)
        told = told.without_ties
        chosen, rejected = told.better(beta * told.log_ratios.detach())
        logps_chosen, logps_rejected = told.better(told.policy.detach())
        values = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": ((chosen - rejected).sign() + 1) / 2,
            "logps/chosen": logps_chosen,
            "logps/rejected": logps_rejected,
        }
        return {**means_of(values, len(chosen)), "beta": (beta * size, size)}

    def derived(self, metrics):
        metrics = super().derived(metrics)
        parts = [metrics.get(name) for name in ("objective/scores", "objective/non_score_reward")]
        return metrics if None in parts else metrics | {"objective/rlhf_reward": sum(parts)}


def told_pairs(policy: Tensor, batch: Batch) -> Told:
    """The pairs of a batch that are trained; of both of its rows, or none, the mask has a 1."""
    mask = batch["completion_mask"]
    kept = mask.bool().any(-1)
    reference = batch.get("ref_logps", torch.zeros_like(policy))
    sums = (masked_sum(values, mask, -1)[kept].view(-1, 2) for values in (policy, reference))
    first = batch["advantages"][kept].view(-1, 2)[:, 0]
    return Told(*sums, mask.sum(-1)[kept].view(-1, 2), (1 + first) / 2)
