"""Nash-MD: a policy learns to win against a mixture of itself and the reference.

policy's completion against the mixture's  --rewards or a judge-->  chance to win  --policy gradient, KL-->  loss
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Module

from strop.callbacks.state import refuse_shards
from strop.compat import accepts_old_names
from strop.data.collate import Batch
from strop.losses.online import nash_md
from strop.losses.reduce import StepCounts, masked_sum
from strop.models.logps import logps
from strop.rollout.buffer import Experience
from strop.rollout.episodes import Episodes
from strop.rollout.mixture import MixtureGenerator, PairedTurns
from strop.rollout.types import Generator, Rollout

from .meter import Metrics
from .online import OnlinePreferenceTrainer
from .online_config import OnlinePreferenceConfig, one_or_several
from .preference import means_of

__all__ = ["NashMDConfig", "NashMDTrainer"]


@accepts_old_names
@dataclass
class NashMDConfig(OnlinePreferenceConfig):
    """Settings of Nash-MD (arXiv:2312.00886)."""

    mixture_coef: float | list[float] = 0.5
    """Share of the reference in the logits of the mixture that the policy plays against: 0 is the policy itself, 1 the
    reference. A number, or one an epoch."""

    def __post_init__(self):
        self.mixture_coef = one_or_several("mixture_coef", self.mixture_coef)
        several = self.mixture_coef if isinstance(self.mixture_coef, list) else [self.mixture_coef]
        if not all(0 <= one <= 1 for one in several):
            raise ValueError(f"mixture_coef={self.mixture_coef} is out of range; a share is in [0, 1].")
        super().__post_init__()


@accepts_old_names
class NashMDTrainer(OnlinePreferenceTrainer):
    """Trains a policy on its chance to win against a mixture of itself and the reference, by Nash-MD's policy gradient.

    Arguments are those of OnlineDPOTrainer. The chance is a judge's, or sigmoid of the difference of rewards. Its own
    completion is trained, ties too; pairs without a verdict train nothing.

    Metrics: `loss/kl` (log pi/ref of a completion, nats), `loss/score` ((chance - 1/2) log pi), `objective/entropy`,
    `rewards/probabilities` (chance to win), `rewards/accuracies` (share of wins, ties half), with rewards those of the
    policy's completion (`rewards/chosen`) and of the mixture's (`rewards/rejected`), `rewards/margins` and GRPO's;
    `logps/chosen` and `logps/rejected` (log pi and log ref of the policy's completion), `val/model_contain_eos_token`,
    `val/ref_contain_eos_token`, `preferences/...`, `beta`, `mixture_coef`.
    """

    config_class = NashMDConfig
    method = "NashMD"
    writers = ("policy", "mixture")

    def make_episodes(self) -> Episodes:
        return PairedTurns(self.generator, lambda: self.second_generator, self.encoder)

    @cached_property
    def second_generator(self) -> Generator:
        refuse_shards(self.args, "Nash-MD, whose mixture reads two models token by token,")
        return MixtureGenerator(self.model, self.reference, lambda: self.now("mixture_coef"), self.processing_class)

    def lead(self, probability: float) -> float:
        return probability - 0.5

    def experience(self, rollout: Rollout) -> Experience:
        experience = super().experience(rollout)
        if rollout.extras["writer"] != "policy" or not rollout.extras["trained"]:
            experience.completion_mask = [0] * len(rollout.token_ids)
        return experience

    def batch_of(self, experiences: Sequence[Experience]) -> Batch:
        """What trains nothing, the mixture's completions among it, isn't read."""
        return super().batch_of([one for one in experiences if any(one.completion_mask)])

    def measured_rewards(self, rollouts: Sequence[Rollout], group: int) -> Metrics:
        metrics = super().measured_rewards(rollouts, group)
        chances = torch.tensor([c for r in rollouts[::2] if (c := r.extras["preference"]) is not None])
        told = {"rewards/probabilities": chances, "rewards/accuracies": ((chances - 0.5).sign() + 1) / 2}
        if self.judge is None:
            first, second = self.totals(rollouts).view(-1, 2).T
            known = ~(first - second).isnan()
            first, second = first[known], second[known]
            told |= {"rewards/chosen": first, "rewards/rejected": second, "rewards/margins": first - second}
        return {**metrics, **{name: (values.sum().item(), len(values)) for name, values in told.items()}}

    # Loss

    def loss(self, model: Module, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
        mask, beta, coef = batch["completion_mask"], self.now("beta"), self.now("mixture_coef")
        scores = logps(model, batch, temperature=batch["temperature"])
        reference, lead = batch.get("ref_logps", torch.zeros_like(scores.logps)), batch["advantages"][:, 0]
        losses = nash_md(scores.logps, reference, mask, lead + 0.5, beta)
        balancing, balance = self.balancing(scores.aux_loss, batch, counts)
        kept = mask.bool().any(-1)
        policy, reference = (masked_sum(x.detach(), mask, -1)[kept] for x in (scores.logps, reference))
        values = {
            "loss/kl": policy - reference,
            "loss/score": lead[kept] * policy,
            "objective/entropy": -policy,
            "logps/chosen": policy,
            "logps/rejected": reference,
        }
        size = len(policy)
        constants = {"beta": (beta * size, size), "mixture_coef": (coef * size, size)}
        return losses.sum() / max(counts.sequences, 1) + balancing, {**means_of(values, size), **constants, **balance}
