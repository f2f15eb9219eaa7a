"""Triple preference optimisation: a pair without a reference policy, and the likelihood of a reference completion."""

from dataclasses import dataclass

from strop.compat import accepts_old_names
from strop.data.preference import TRIPLES
from strop.losses.preference import Pairs

from . import checks
from .cpo import CPOTrainer
from .preference import PreferenceConfig


@accepts_old_names
@dataclass
class TPOConfig(PreferenceConfig):
    """Settings of triple preference optimisation."""

    learning_rate: float = 5e-7
    """Peak learning rate of the optimizer."""

    loss_type: str = "sigmoid"
    """Loss of a pair: "sigmoid" (TPO), "hinge", "ipo", or "tpo-l" (TPO-L: per-token averages and a margin)."""

    beta: float = 0.01
    """Scale of the difference of log-probabilities, in 1/nat; of per-token averages with ipo and tpo-l."""

    label_smoothing: float = 0.0
    """Chance that a preference label is flipped, in [0, 0.5); with sigmoid and tpo-l."""

    tpo_alpha: float = 1.0
    """Weight of the likelihood of the reference completions, a mean over the step's tokens."""

    tpo_l_gamma: float = 0.5
    """Margin by which the chosen should win, before the logistic function; with tpo-l."""

    def __post_init__(self):
        checks.one_of("loss_type", self.loss_type, ("sigmoid", "hinge", "ipo", "tpo-l"))
        checks.positive("beta", self.beta)
        checks.at_least("tpo_alpha", self.tpo_alpha, 0)
        checks.within("label_smoothing", self.label_smoothing, 0, 0.5)
        neutral = {"label_smoothing": 0.0} if self.loss_type in ("hinge", "ipo") else {}
        neutral |= {} if self.loss_type == "tpo-l" else {"tpo_l_gamma": 0.5}
        checks.no_effect(self, neutral, f"loss_type={self.loss_type!r}")
        super().__post_init__()


@accepts_old_names
class TPOTrainer(CPOTrainer):
    """Trains a policy on triples (arXiv:2405.16681): the chosen against the rejected, and the reference as a target.

    Rows are those of DPO with a third completion, `reference`: the one to imitate. Metrics are those of CPO, with
    `nll_loss` and a share of `entropy` from the reference completion.
    """

    config_class = TPOConfig
    method = "TPO"
    wanted = TRIPLES
    nll_side = 2

    @property
    def loss_name(self) -> str:
        return self.args.loss_type

    @property
    def loss_options(self) -> dict[str, float]:
        return {"gamma": self.args.tpo_l_gamma, "smoothing": self.args.label_smoothing}

    @property
    def nll_weight(self) -> float:
        return self.args.tpo_alpha

    def rewards(self, pairs: Pairs) -> Pairs:
        return pairs
