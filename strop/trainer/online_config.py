"""Settings of training on preferences between completions that the policy takes part in writing."""

from dataclasses import dataclass
from typing import ClassVar

from strop.losses.preference import PREFERENCE_LOSSES

from . import checks
from .on_policy_config import OnPolicyConfig

ONLINE_LOSSES = tuple(name for name in PREFERENCE_LOSSES if name not in ("robust", "aot", "aot_unpaired"))
"""Those that need one pair and beta. `robust` without smoothing is `sigmoid`; `aot` compares pairs with each other."""
MAX_NEW_TOKENS = 64


@dataclass
class OnlinePreferenceConfig(OnPolicyConfig):
    """Settings that trainers on two completions of a prompt share. A list has one value an epoch, the last one from
    there on."""

    best_metric: ClassVar[str | None] = None  # a judge gives no rewards

    learning_rate: float = 5e-7
    """Peak learning rate of the optimizer."""

    per_device_train_batch_size: int = 8
    """Prompts, with two completions each, that a device trains at a time."""

    per_device_eval_batch_size: int = 8
    """Prompts, with two completions each, that a device evaluates at a time."""

    num_generations: int = 2
    """Completions a prompt: two, always."""

    generation_batch_size: int | None = None
    """Completions, two a prompt, generated at a time over all devices; or set steps_per_generation."""

    max_completion_length: int | None = None
    """Longest completion in tokens; 64 if not set. TRL's name for it, `max_new_tokens`, means the same."""

    max_new_tokens: int | None = None
    """TRL's name of `max_completion_length`."""

    max_length: int | None = 512
    """Longest prompt and completion together, in tokens: a prompt keeps what max_completion_length leaves of it. None
    for no limit."""

    temperature: float = 0.9
    """Divides the logits in sampling. Log-probabilities are those of the policy itself, at temperature 1."""

    missing_eos_penalty: float | None = None
    """Subtracted from the reward of a completion that was cut off before its end; none if not set."""

    reward_model_path: str | None = None
    """Reward model whose scores are a reward too: a hub id or a folder."""

    beta: float | list[float] = 0.1
    """How much a log pi/ref counts; larger keeps the policy closer to the reference. A number, or one an epoch."""

    mask_truncated_completions: bool = False
    """Train nothing on pairs of which a completion was cut off at max_completion_length."""

    def __post_init__(self):
        self._settle_lengths()
        self.beta = one_or_several("beta", self.beta)
        checks.positive("beta", self.beta)
        checks.at_least("missing_eos_penalty", self.missing_eos_penalty, 0)
        for name in ("num_generations", "num_generations_eval"):
            if getattr(self, name) not in (2, None):
                raise ValueError(
                    f"{name}={getattr(self, name)} would have no effect: the two completions of a prompt are compared "
                    "with each other. Remove it."
                )
        checks.no_effect(
            self,
            {"dynamic_sampling_rounds": 0, "replay_buffer_size": 0, "epsilon": None, "epsilon_high": None}
            | {"kl_on_equal_rewards": True},
            "preferences between two completions, which have no ratio and no group to look at",
        )
        super().__post_init__()

    def _settle_lengths(self):
        """Both names of a completion's length hold the same; prompts get what it leaves."""
        given = checks.same("max_completion_length", self.max_completion_length, "max_new_tokens", self.max_new_tokens)
        longest = MAX_NEW_TOKENS if given is None else given
        self.max_completion_length = self.max_new_tokens = longest
        if self.max_length is None:
            return
        room = self.max_length - longest
        if room < 1:
            raise ValueError(
                f"max_length={self.max_length} has no room for a prompt beside max_completion_length={longest} "
                "(max_new_tokens); raise the first or lower the second."
            )
        self.max_prompt_length = room if self.max_prompt_length is None else min(room, self.max_prompt_length)

    @property
    def completions_per_device(self) -> int:
        return 2 * self.per_device_train_batch_size

    @property
    def completions_per_device_eval(self) -> int:
        return 2 * self.per_device_eval_batch_size

    @property
    def schedules(self) -> dict[str, list[float]]:
        """Settings with several values, one an epoch, by name."""
        named = {name: getattr(self, name, None) for name in ("beta", "alpha", "mixture_coef")}
        return {name: values for name, values in named.items() if isinstance(values, list)}


def one_or_several(name: str, value: float | list[float]) -> float | list[float]:
    """A number, or a list of at least two."""
    if not isinstance(value, list | tuple):
        return value
    if not value:
        raise ValueError(f"{name}=[] has no value; give a number, or one for each epoch.")
    return value[0] if len(value) == 1 else list(value)


def at_epoch(value: float | list[float], epoch: float) -> float:
    """The value of an epoch, counted from 0."""
    return value[min(int(epoch), len(value) - 1)] if isinstance(value, list) else value
