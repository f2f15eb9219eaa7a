"""Settings of group-relative policy optimisation, and what of them contradicts."""

from dataclasses import dataclass, fields
from typing import Any

from strop.compat import accepts_old_names
from strop.losses.advantages import ADVANTAGES
from strop.losses.corrections import CORRECTION_MODES, check_correction
from strop.losses.penalties import KL_ESTIMATORS
from strop.losses.policy import AGAINST_REFERENCE, POLICY_LOSSES, PolicyLoss, cispo, policy_loss

from . import checks
from .on_policy_config import OnPolicyConfig

LOSSES = tuple(name for name in POLICY_LOSSES if name not in AGAINST_REFERENCE)
ESTIMATORS = tuple(name for name in ADVANTAGES if name not in ("group", "batch", "none", "a2po"))


@accepts_old_names
@dataclass
class GRPOConfig(OnPolicyConfig):
    """Settings of group-relative policy optimisation.

    Raises ValueError for unknown values, values out of range, and options that the chosen loss doesn't use.
    """

    loss_type: str = "dapo"
    """A key of `strop.losses.policy.POLICY_LOSSES`: what ratio, surrogate and mean make up the loss."""

    importance_sampling_level: str | None = None
    """What a ratio is of: "token", "sequence" (GSPO, arXiv:2507.18071) or "sequence_token"; the loss's own if not
    set."""

    delta: float | None = None
    """Bound of the ratio where the advantage is negative, too (INTELLECT-2, arXiv:2505.07291); None for none."""

    sapo_temperature_pos: float = 1.0
    """Steepness of loss_type="sapo" at positive advantages."""

    sapo_temperature_neg: float = 1.05
    """Steepness of loss_type="sapo" at negative advantages."""

    vespo_k_pos: float = 2.0
    """k of loss_type="vespo" at positive advantages."""

    vespo_lambda_pos: float = 3.0
    """lambda of loss_type="vespo" at positive advantages."""

    vespo_k_neg: float = 3.0
    """k of loss_type="vespo" at negative advantages."""

    vespo_lambda_neg: float = 2.0
    """lambda of loss_type="vespo" at negative advantages."""

    scale_rewards: str | bool = "group"
    """What advantages are divided by: the standard deviation of their "group", of the "batch", or "none"."""

    advantage_type: str | None = None
    """Another way from rewards to advantages: a key of `strop.losses.advantages.ADVANTAGES`, e.g. "leave_one_out"."""

    multi_objective_aggregation: str = "sum_then_normalize"
    """Several rewards are summed first, or normalised alone first: "normalize_then_sum" (GDPO, arXiv:2601.05242)."""

    top_entropy_quantile: float = 1.0
    """Share of the tokens, those of highest entropy, that are trained (arXiv:2506.01939)."""

    entropy_coef: float = 0.0
    """Weight of the mean entropy, which is added to what is maximised."""

    use_adaptive_entropy: bool = False
    """Move entropy_coef so that the entropy stays at entropy_target at least (Skywork-OR1, arXiv:2505.22312)."""

    entropy_coef_min: float = 0.0
    """Least entropy_coef with use_adaptive_entropy."""

    entropy_coef_max: float = 1.0
    """Largest entropy_coef with use_adaptive_entropy."""

    entropy_coef_delta: float = 0.005
    """How much entropy_coef moves a step with use_adaptive_entropy."""

    entropy_target: float = 0.2
    """Entropy, in nats a token, to hold with use_adaptive_entropy."""

    off_policy_mask_threshold: float | None = None
    """Leave out rows of negative advantage whose tokens have become less likely by more nats on average
    (DeepSeek-V3.2, arXiv:2512.02556)."""

    use_bias_correction_kl: bool = True
    """Multiply the KL divergence by the ratio, which makes its gradient right off-policy (arXiv:2512.02556)."""

    kl_estimator: str = "k3"
    """Estimate of the KL divergence: a key of `strop.losses.penalties.KL_ESTIMATORS`."""

    kl_in_reward: bool = False
    """Subtract the KL divergence from rewards, instead of adding it to the loss."""

    max_tool_calling_iterations: int | None = None
    """Rounds of tool calls in an episode at most; None for no limit but max_completion_length."""

    tool_timeout: float | None = None
    """Seconds that a tool, or a method of an environment, may take; None for no limit. One that takes longer is told
    to the model as failed. Plain functions run in threads of their own then."""

    vllm_importance_sampling_correction: bool = True
    """Correct for a sampler that says other log-probabilities than the model in training: vLLM, or a rollout_func."""

    vllm_importance_sampling_mode: str = "sequence_mask"
    """How: ratios of tokens or whole sequences, truncated or masked: "token_truncate", "token_mask",
    "sequence_truncate", "sequence_mask"."""

    vllm_importance_sampling_clip_max: float | None = 3.0
    """Largest ratio to the sampler."""

    vllm_importance_sampling_clip_min: float | None = None
    """Least ratio to the sampler."""

    def __post_init__(self):
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        checks.one_of("loss_type", self.loss_type, LOSSES)
        checks.one_of("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        checks.one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        aggregations = ("sum_then_normalize", "normalize_then_sum")
        checks.one_of("multi_objective_aggregation", self.multi_objective_aggregation, aggregations)
        self._check_loss()
        self._check_advantages()
        self._check_entropy()
        self._check_corrections()
        super().__post_init__()
        self._check_kl()

    @property
    def policy_loss(self) -> PolicyLoss:
        return policy_loss(self.loss_type, self.importance_sampling_level)

    @property
    def loss_options(self) -> dict[str, Any]:
        """What the loss takes besides tensors, without what is left at its own value."""
        values = {name: getattr(self, name, None) for name in self.policy_loss.options}
        return {name: value for name, value in values.items() if value is not None}

    def _check_loss(self):
        loss = self.policy_loss
        neutral = {f.name: f.default for f in fields(GRPOConfig) if f.name.startswith(("sapo_", "vespo_"))}
        neutral |= dict.fromkeys(("epsilon", "epsilon_high", "delta"))
        unused = {name: value for name, value in neutral.items() if name not in loss.options}
        checks.no_effect(self, unused, f"loss_type={self.loss_type!r}, which doesn't use it")
        checks.at_least("epsilon", self.epsilon, 0)
        checks.at_least("epsilon_high", self.epsilon_high, 0)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_lambda_pos", "vespo_lambda_neg"):
            checks.positive(name, getattr(self, name))
        if self.delta is not None and self.delta <= 1:
            raise ValueError(
                f"delta={self.delta} would stop every gradient of a policy that hasn't moved, as it bounds ratios from "
                "above and that policy's are 1; take 2 or 4, say."
            )
        if loss.surrogate is cispo and self.epsilon_high is not None and self.epsilon_high < 1:
            raise ValueError(
                f"epsilon_high={self.epsilon_high} would scale every gradient of loss_type={self.loss_type!r} by it: "
                "there it is the largest ratio itself; take 5, say."
            )

    def _check_advantages(self):
        if self.advantage_type is not None:
            checks.one_of("advantage_type", self.advantage_type, ESTIMATORS)
            cause = f"advantage_type={self.advantage_type!r}"
            checks.no_effect(self, {"multi_objective_aggregation": "sum_then_normalize"}, cause)
            checks.no_effect(self, {"scale_rewards": "group"}, cause)
        if self.multi_objective_aggregation == "normalize_then_sum":
            checks.no_effect(
                self,
                {"scale_rewards": "group", "kl_in_reward": False},
                'multi_objective_aggregation="normalize_then_sum", which normalises each reward alone',
            )

    def _check_entropy(self):
        if not 0 < self.top_entropy_quantile <= 1:
            raise ValueError(f"top_entropy_quantile={self.top_entropy_quantile} is out of range; a share is in (0, 1].")
        if self.top_entropy_quantile < 1 and not self.policy_loss.selects_tokens:
            raise ValueError(
                f"top_entropy_quantile={self.top_entropy_quantile} would have no meaning with loss_type="
                f"{self.loss_type!r}, whose ratio is one of whole rows; take a loss of tokens, e.g. "
                '"dapo", or leave it at 1.'
            )
        adaptive = {"entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005}
        if not self.use_adaptive_entropy:
            checks.no_effect(self, adaptive | {"entropy_target": 0.2}, "use_adaptive_entropy=False")
        elif not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef={self.entropy_coef} is not between entropy_coef_min={self.entropy_coef_min} and "
                f"entropy_coef_max={self.entropy_coef_max}, where use_adaptive_entropy holds it."
            )

    def _check_corrections(self):
        checks.one_of("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, CORRECTION_MODES)
        check_correction(
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )
        checks.at_least("off_policy_mask_threshold", self.off_policy_mask_threshold, 0)
        checks.at_least("max_tool_calling_iterations", self.max_tool_calling_iterations, 0)

    def _check_kl(self):
        if not self.beta:
            neutral = {"kl_estimator": "k3", "kl_in_reward": False, "use_bias_correction_kl": True}
            checks.no_effect(self, neutral, "beta=0")
        elif self.kl_estimator == "k1" and not self.kl_in_reward:
            raise ValueError(
                'kl_estimator="k1" in the loss has an expected gradient of 0; set kl_in_reward=True, or take "k2" or '
                '"k3".'
            )
        if self.kl_in_reward and self.kl_estimator != "k1":
            raise ValueError(
                f"kl_in_reward=True subtracts log pi/ref itself, but kl_estimator={self.kl_estimator!r}; set it to "
                '"k1".'
            )
        if self.kl_in_reward:
            checks.no_effect(self, {"use_bias_correction_kl": True}, "kl_in_reward=True, which leaves the loss alone")
