"""Exploratory preference optimisation: DPO between a completion of the policy and one of the reference, and a bonus
for leaving what the reference writes.

policy's and reference's completion  --online DPO-->  loss of the pair + alpha log pi of the reference's
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from strop.compat import accepts_old_names
from strop.losses.online import exploration
from strop.rollout.episodes import Episodes
from strop.rollout.mixture import PairedTurns, ReferenceGenerator
from strop.rollout.types import Generator

from . import checks
from .meter import Metrics
from .online_config import one_or_several
from .online_dpo import OnlineDPOConfig, OnlineDPOTrainer, Told

__all__ = ["XPOConfig", "XPOTrainer"]


@accepts_old_names
@dataclass
class XPOConfig(OnlineDPOConfig):
    """Settings of exploratory preference optimisation (arXiv:2405.21046)."""

    alpha: float | list[float] = 1e-5
    """Weight of log pi of what the reference wrote, which is made less likely. A number, or one an epoch."""

    def __post_init__(self):
        self.alpha = one_or_several("alpha", self.alpha)
        checks.at_least("alpha", self.alpha, 0)
        super().__post_init__()


@accepts_old_names
class XPOTrainer(OnlineDPOTrainer):
    """Trains a policy by DPO on pairs of its own completion and one of the reference, and to leave the latter.

    Arguments are those of OnlineDPOTrainer. Metrics as well, scores and ends under the names of who wrote
    (`objective/model_scores`, `objective/ref_scores`, `val/model_contain_eos_token`, ...), `loss/dpo` and `loss/xpo`,
    `alpha`.
    """

    config_class = XPOConfig
    method = "XPO"
    writers = ("policy", "reference")

    def make_episodes(self) -> Episodes:
        return PairedTurns(self.generator, lambda: self.second_generator, self.encoder)

    @cached_property
    def second_generator(self) -> Generator:
        return ReferenceGenerator(self.reference, self.processing_class)

    def losses(self, told: Told) -> tuple[Tensor, Metrics]:
        alpha, size = self.now("alpha"), len(told.label)
        preference, bonus = self.preference_losses(told), exploration(told.policy[:, 1], alpha)
        parts = {"loss/dpo": (preference.sum(), size), "loss/xpo": (bonus.sum(), size), "alpha": (alpha * size, size)}
        return preference + bonus, {**self.divergence(told), **self.pair_metrics(told), **parts}
