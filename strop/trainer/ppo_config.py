"""Settings of PPO, and what of them contradicts."""

import math
import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from strop.compat import accepts_old_names
from strop.losses.penalties import KL_ESTIMATORS
from strop.rollout.types import Sampling

from . import checks
from .on_policy_config import OnPolicyConfig
from .settled import as_given, settled, told

VALUE_FUNCTIONS = ("auto", "separate", "reward", "shared")
TWO_NAMES: dict[str, tuple[str, Any]] = {
    "kl_coef": ("beta", 0.05),
    "cliprange": ("epsilon", 0.2),
    "num_ppo_epochs": ("num_iterations", 4),
    "response_length": ("max_completion_length", 53),
}
"""PPO's name of an option -> the name it has in other methods, and its value if neither is given."""


@accepts_old_names
@dataclass
class PPOConfig(OnPolicyConfig):
    """Settings of proximal policy optimisation (arXiv:1707.06347) with a KL penalty in the reward (arXiv:1909.08593).

    `per_device_train_batch_size` x `gradient_accumulation_steps` x processes completions are written at a time. They
    are trained in `num_mini_batches` optimizer steps, `num_ppo_epochs` times.
    """

    least_generations: ClassVar[int] = 1
    fills_blocks: ClassVar[bool] = True

    learning_rate: float = 3e-6
    """Peak learning rate of the optimizer."""

    num_generations: int = 1
    """Completions a prompt."""

    total_episodes: int | None = None
    """Completions to train on in all, from which max_steps follows if that isn't set."""

    num_ppo_epochs: int | None = None
    """How often what was written is trained; 4 if not set."""

    num_iterations: int | None = None
    """Another name of num_ppo_epochs."""

    num_mini_batches: int = 1
    """Optimizer steps in which what was written is trained once."""

    response_length: int | None = None
    """Longest completion in tokens, answers of tools included; 53 if not set."""

    max_completion_length: int | None = None
    """Another name of response_length."""

    temperature: float = 0.7
    """Divides the logits, in sampling and in training alike."""

    stop_token: str | None = None
    """"eos" says what holds anyway: the model's end-of-sequence tokens end a completion."""

    stop_token_id: int | None = None
    """Id of a token that ends a completion, besides the end-of-sequence tokens."""

    missing_eos_penalty: float | None = None
    """Subtracted from the score of completions that were cut off before their end."""

    kl_coef: float | None = None
    """Weight of the KL divergence from the reference, which is subtracted from the reward of each token; 0.05 if not
    set, 0: no reference is kept."""

    beta: float | None = None
    """Another name of kl_coef."""

    kl_estimator: str = "k1"
    """Estimate of the KL divergence: a key of `strop.losses.penalties.KL_ESTIMATORS`."""

    target_kl: float | None = None
    """KL divergence of a completion, in nats, that kl_coef is moved to hold (arXiv:1909.08593, section 2.2); None
    leaves kl_coef as it is."""

    kl_horizon: int = 10000
    """Completions in which kl_coef moves by about a fifth with target_kl, at most."""

    cliprange: float | None = None
    """How far a ratio may go from 1 before it is clipped; 0.2 if not set."""

    epsilon: float | None = None
    """Another name of cliprange."""

    vf_coef: float = 0.1
    """Weight of the loss of the values."""

    cliprange_value: float = 0.2
    """How far a value may go from what it was before its loss is clipped."""

    gamma: float = 1.0
    """Discount a token."""

    lam: float = 0.95
    """lambda of generalised advantage estimation (arXiv:1506.02438): 0 trusts values, 1 rewards."""

    whiten_rewards: bool = False
    """Give the rewards of a block's tokens a variance of 1; their mean stays."""

    whiten_advantages: bool = True
    """Give the advantages of a block's tokens mean 0 and variance 1."""

    value_function: str = "auto"
    """What estimates values: "separate", a model with a trunk of its own; "reward", a copy of the reward model;
    "shared", a head on the policy's own states. "auto": the value_model if one is given, else a copy of the reward
    model if there is one that reads the policy's tokens, else a shared trunk."""

    num_value_pretraining_steps: int = 0
    """Optimizer steps at the beginning that train the values only."""

    reward_model_path: str | None = None
    """Reward model, a folder or hub id, if none is passed to the trainer."""

    sft_model_path: str | None = None
    """Policy to start from, in the place of a model given by name, whose tokenizer is kept."""

    local_rollout_forward_batch_size: int = 64
    """Completions of which log-probabilities and values are computed at a time before they are trained."""

    max_tool_calling_iterations: int | None = None
    """Rounds of tool calls in an episode at most; None for no limit but response_length."""

    tool_timeout: float | None = None
    """Seconds that a tool, or a method of an environment, may take; None for no limit. One that takes longer is told
    to the model as failed. Plain functions run in threads of their own then."""

    num_sample_generations: int = 10
    """Accepted for TRL's sake: every completion is written to `rollouts/`, log_completions prints them, eval_strategy
    scores held-out prompts."""

    dataset_num_proc: int | None = None
    """Accepted for TRL's sake: prompts become tokens when they are asked."""

    def __post_init__(self):
        values = {name: self._said(name) for name in TWO_NAMES}
        as_given(self)
        for name, value in values.items():
            setattr(self, name, settled(value))
            setattr(self, TWO_NAMES[name][0], getattr(self, name))
        self._check_ppo()
        steps = self.steps_per_generation
        if steps is None and self.generation_batch_size is None:
            self._cut_into_mini_batches()
        super().__post_init__()
        self.steps_per_generation = settled(self.steps_per_generation, given=steps)
        if self.steps_per_generation != self.num_mini_batches * self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation={self.steps_per_generation} micro-batches (or generation_batch_size="
                f"{self.generation_batch_size}) aren't num_mini_batches={self.num_mini_batches} optimizer steps of "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}. Leave out steps_per_generation: "
                "per_device_train_batch_size x gradient_accumulation_steps completions a device are cut into "
                "num_mini_batches."
            )
        self._settle_steps()

    @property
    def sampling(self) -> Sampling:
        """How completions are drawn."""
        sampling = super().sampling
        if self.stop_token_id is None:
            return sampling
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, self.stop_token_id))

    @property
    def lookup_size(self) -> int:
        return self.local_rollout_forward_batch_size

    def _said(self, name: str) -> Any:
        """What an option of two names is: as given by either, else as a config that was replaced had it, else the
        default."""
        other, default = TWO_NAMES[name]
        both = getattr(self, name), getattr(self, other)
        value = checks.same(name, told(both[0]), other, told(both[1]))
        return next((one for one in (value, *both) if one is not None), default)

    def _check_ppo(self):
        checks.one_of("value_function", self.value_function, VALUE_FUNCTIONS)
        checks.one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        for name in ("num_mini_batches", "num_ppo_epochs", "total_episodes", "response_length", "kl_horizon"):
            checks.at_least(name, getattr(self, name), 1)
        for name in ("num_generations", "local_rollout_forward_batch_size"):
            checks.at_least(name, getattr(self, name), 1)
        for name in (
            "kl_coef",
            "cliprange",
            "epsilon_high",
            "vf_coef",
            "cliprange_value",
            "num_value_pretraining_steps",
        ):
            checks.at_least(name, getattr(self, name), 0)
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is out of range; it is in [0, 1].")
        self._check_ends()
        if self.target_kl is not None:
            checks.positive("target_kl", self.target_kl)
            if not self.kl_coef:
                raise ValueError(
                    f"target_kl={self.target_kl} can't be held by kl_coef=0, which it multiplies; set kl_coef, e.g. to "
                    "0.05."
                )
        else:
            checks.no_effect(self, {"kl_horizon": 10000}, "target_kl=None")
        if not self.kl_coef:
            checks.no_effect(self, {"kl_estimator": "k1"}, "kl_coef=0")
        if not self.vf_coef:
            checks.no_effect(
                self, {"num_value_pretraining_steps": 0, "cliprange_value": 0.2}, "vf_coef=0, which trains no values"
            )
        checks.no_effect(
            self,
            {"dynamic_sampling_rounds": 0, "replay_buffer_size": 0, "kl_on_equal_rewards": True},
            "PPO, whose baseline is a value function and not a group's mean",
        )

    def _check_ends(self):
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ValueError(
                f"stop_token={self.stop_token!r} and stop_token_id={self.stop_token_id} are both given; keep one."
            )
        if self.stop_token not in (None, "eos"):
            raise ValueError(f'stop_token={self.stop_token!r} is unknown; it is "eos", or set stop_token_id.')
        if self.missing_eos_penalty is not None and not self.missing_eos_penalty >= 0:
            raise ValueError(
                f"missing_eos_penalty={self.missing_eos_penalty} would reward completions that are cut off, as it is "
                "subtracted from their score; give a positive number."
            )

    def _cut_into_mini_batches(self):
        """Micro-batches that make num_mini_batches optimizer steps of what a device writes at a time."""
        size, accumulation, parts = (
            self.per_device_train_batch_size,
            self.gradient_accumulation_steps,
            self.num_mini_batches,
        )
        whole = size * accumulation
        if whole % parts:
            divisors = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
            raise ValueError(
                f"num_mini_batches={parts} doesn't divide the {whole} completions that a device writes at a time "
                f"(per_device_train_batch_size={size} x gradient_accumulation_steps={accumulation}); take one of "
                f"{divisors}, or change one of the others."
            )
        part = whole // parts
        each = next(n for n in range(min(size, part), 0, -1) if part % n == 0)
        self.per_device_train_batch_size = settled(each, given=size)
        self.gradient_accumulation_steps = settled(part // each, given=accumulation)
        self.steps_per_generation = parts * self.gradient_accumulation_steps

    def _settle_steps(self):
        if self.total_episodes is None or self.max_steps > 0:
            return
        block = self.plan(int(os.environ.get("WORLD_SIZE", 1))).completions_per_block
        blocks, passes = math.ceil(self.total_episodes / block), self.num_iterations or 1
        self.max_steps = settled(blocks * self.num_mini_batches * passes, given=self.max_steps)
