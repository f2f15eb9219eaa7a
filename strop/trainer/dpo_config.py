"""Settings of direct preference optimisation, and what of them contradicts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strop.compat import accepts_old_names
from strop.losses.preference import DIVERGENCE_LOSSES, F_DIVERGENCES, PREFERENCE_LOSSES, SFT, options_of
from strop.models.arguments import ReferenceArguments

from . import checks
from .config import function_name
from .preference import PreferenceConfig
from .referenced import check_reference

WHOLE_STEP = ("aot", "aot_unpaired")
"""Losses whose pairs depend on each other."""


@accepts_old_names
@dataclass
class DPOConfig(ReferenceArguments, PreferenceConfig):
    """Settings of direct preference optimisation.

    Raises ValueError for unknown values, values out of range, and options that none of the chosen losses uses.
    """

    learning_rate: float = 1e-6
    """Peak learning rate of the optimizer."""

    loss_type: str | list[str] | Callable = "sigmoid"
    """Loss of a pair, or several whose weighted sum is taken: keys of `strop.losses.preference.PREFERENCE_LOSSES`,
    "sft" (mean negative log-likelihood of the chosen tokens), or functions of `Pairs` and beta that return one loss a
    pair, also as "module:function"."""

    loss_weights: list[float] | None = None
    """Weight of each of the losses (MPO, arXiv:2411.10442); all 1 if not set."""

    beta: float = 0.1
    """Scale of the implicit reward log pi/ref, in 1/nat; larger keeps the policy closer to the reference."""

    label_smoothing: float = 0.0
    """Chance that a preference label is flipped: in [0, 0.5), above 0 for "exo_pair"."""

    discopop_tau: float = 0.05
    """Temperature of the blend in loss_type="discopop"."""

    f_divergence_type: str = "reverse_kl"
    """Divergence from the reference that the reward is derived for (arXiv:2309.16240): a key of
    `strop.losses.preference.F_DIVERGENCES`."""

    f_alpha_divergence_coef: float = 0.5
    """alpha of f_divergence_type="alpha_divergence": 0 gives forward, 1 reverse KL."""

    ld_alpha: float | None = None
    """Weight, in [0, 1], of the tokens of a completion beyond the length of the pair's shorter one (LD-DPO,
    arXiv:2409.06411)."""

    use_weighting: bool = False
    """Weigh pairs by how likely the policy is to write them (WPO, arXiv:2406.11827)."""

    rpo_alpha: float | None = None
    """Weight of the mean negative log-likelihood of the chosen tokens, added to the loss (RPO, arXiv:2404.19733 v3)."""

    def __post_init__(self):
        known = PREFERENCE_LOSSES | {SFT: None}
        self.loss_type = [by_name(checks.loss("loss_type", loss, known)) for loss in as_list(self.loss_type)]
        self._check_ranges()
        self._check_mixture()
        self._check_options()
        check_reference(self)
        super().__post_init__()

    @property
    def pair_losses(self) -> list[tuple[float, Callable[..., Any]]]:
        """(weight, function of pairs and beta) of each loss that is one of pairs."""
        weighted = zip(self.loss_weights or [1.0] * len(self.loss_type), self.loss_type, strict=True)
        return [(w, loss if callable(loss) else PREFERENCE_LOSSES[loss]) for w, loss in weighted if loss != SFT]

    @property
    def nll_weight(self) -> float:
        """Weight of the negative log-likelihood of the chosen tokens."""
        weighted = zip(self.loss_weights or [1.0] * len(self.loss_type), self.loss_type, strict=True)
        return sum(weight for weight, loss in weighted if loss == SFT) + (self.rpo_alpha or 0.0)

    def loss_options(self, loss: Callable[..., Any]) -> dict[str, float]:
        """What `loss(pairs, beta, ...)` takes besides."""
        values = {"smoothing": self.label_smoothing, "tau": self.discopop_tau}
        return {name: value for name, value in values.items() if name in options_of(loss)}

    def _check_ranges(self):
        f_divergence = getattr(self.f_divergence_type, "value", self.f_divergence_type)
        checks.one_of("f_divergence_type", f_divergence, F_DIVERGENCES)
        self.f_divergence_type = f_divergence
        checks.within("label_smoothing", self.label_smoothing, 0, 0.5)
        checks.positive("beta", self.beta)
        checks.positive("discopop_tau", self.discopop_tau)
        if self.rpo_alpha is not None:
            checks.positive("rpo_alpha", self.rpo_alpha)
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise ValueError(
                f"ld_alpha={self.ld_alpha} is out of range; the weight of tokens beyond the shorter completion is in "
                "[0, 1]: 1 is plain DPO, 0 ignores them."
            )

    def _check_mixture(self):
        if not self.loss_type:
            raise ValueError("loss_type=[] is no loss; give one of them, or several.")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(
                f"loss_weights={self.loss_weights} are {len(self.loss_weights)}, but loss_type={self._shown()} are "
                f"{len(self.loss_type)}; give one weight a loss."
            )
        if self.rpo_alpha is not None and SFT in as_list(self.loss_type):
            raise ValueError(
                f'rpo_alpha={self.rpo_alpha} and "sft" in loss_type are two names of one term; give its weight '
                "once, as rpo_alpha or in loss_weights."
            )

    def _check_options(self):
        """Refuse what none of the losses reads."""
        used = {name for _, loss in self.pair_losses for name in options_of(loss)}
        names = {loss for loss in self.loss_type if isinstance(loss, str)} - {SFT}
        if "smoothing" not in used:
            self._refuse("label_smoothing", 0.0, "sigmoid, robust, exo_pair, aot and aot_unpaired smooth labels")
        if "tau" not in used:
            self._refuse("discopop_tau", 0.05, "it is discopop's")
        if "exo_pair" in names and not self.label_smoothing:
            raise ValueError(
                'label_smoothing=0.0 makes loss_type="exo_pair" infinite, which compares with smoothed labels; set it, '
                "e.g. to 1e-3."
            )
        if not self.pair_losses:
            for name, neutral in (("ld_alpha", None), ("use_weighting", False), ("f_divergence_type", "reverse_kl")):
                self._refuse(name, neutral, "it changes losses of pairs")
        others = sorted(names - DIVERGENCE_LOSSES)
        if others:
            self._refuse("f_divergence_type", "reverse_kl", f"{others[0]} is derived for log pi/ref itself")
        if self.f_divergence_type != "alpha_divergence":
            checks.no_effect(self, {"f_alpha_divergence_coef": 0.5}, f"f_divergence_type={self.f_divergence_type!r}")
        if names & set(WHOLE_STEP):
            self._refuse("use_weighting", False, "aot compares quantiles of all pairs, of which none has a weight")

    def _refuse(self, name: str, neutral: Any, reason: str) -> None:
        given = getattr(self, name)
        if given != neutral:
            raise ValueError(f"{name}={given!r} would have no effect with loss_type={self._shown()}: {reason}.")

    def _shown(self) -> str:
        shown = [function_name(loss) if callable(loss) else loss for loss in self.loss_type]
        return repr(shown[0] if len(shown) == 1 else shown)


def by_name(loss: str | Callable) -> str | Callable:
    """The name of a function that is a row of the table."""
    return next((name for name, row in PREFERENCE_LOSSES.items() if row is loss), loss)


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
