"""Odds ratio preference optimisation: fine-tuning on the chosen completions, and a term against the rejected ones."""

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import logsigmoid

from strop.compat import accepts_old_names
from strop.losses.preference import Pairs
from strop.losses.reference_free import odds_margin

from . import checks
from .cpo import CPOTrainer
from .meter import Metrics
from .preference import PreferenceConfig, means_of


@accepts_old_names
@dataclass
class ORPOConfig(PreferenceConfig):
    """Settings of odds ratio preference optimisation."""

    learning_rate: float = 1e-6
    """Peak learning rate of the optimizer."""

    beta: float = 0.1
    """Weight of the odds ratio term beside the likelihood of the chosen completions; the paper's lambda."""

    def __post_init__(self):
        checks.positive("beta", self.beta)
        super().__post_init__()


@accepts_old_names
class ORPOTrainer(CPOTrainer):
    """Trains a policy on pairs (arXiv:2403.07691 eq. 6): likelihood of the chosen, plus beta times their odds' ratio.

    Rows are those of DPO. Metrics are those of CPO, of per-token averages, with `log_odds_chosen` (mean log odds ratio
    of chosen to rejected) and `log_odds_ratio` (mean log-sigmoid of it).
    """

    config_class = ORPOConfig
    method = "ORPO"
    loss_name = "orpo"
    loss_options: ClassVar[dict[str, float]] = {}
    nll_weight = 1.0

    def rewards(self, pairs: Pairs) -> Pairs:
        return pairs

    def pair_metrics(self, pairs: Pairs, rewards: Pairs) -> Metrics:
        log_odds = odds_margin(pairs)
        values = {"log_odds_chosen": log_odds, "log_odds_ratio": logsigmoid(log_odds)}
        return {**super().pair_metrics(pairs, rewards), **means_of(values, len(log_odds))}
