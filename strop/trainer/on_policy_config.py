"""Settings of training on what the policy itself writes."""

import logging
import os
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from strop.models.arguments import ModelInitArguments
from strop.rollout.plan import BatchPlan, settled_steps
from strop.rollout.types import Sampling

from . import checks
from .config import BaseConfig
from .settled import plain, settled, told

logger = logging.getLogger(__name__)


@dataclass
class OnPolicyConfig(ModelInitArguments, BaseConfig):
    """Settings that every trainer on rollouts has."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *BaseConfig._VALID_DICT_FIELDS,
        *("model_init_kwargs", "generation_kwargs", "chat_template_kwargs", "transformers_continuous_batching_config"),
    ]
    best_metric: ClassVar[str | None] = "reward"
    """What load_best_model_at_end goes by, if metric_for_best_model isn't set; None for the loss."""
    least_generations: ClassVar[int] = 2
    """Completions a prompt that the method needs."""
    fills_blocks: ClassVar[bool] = False
    """Whether a block that an epoch's prompts don't fill goes on with those of the next."""

    learning_rate: float = 1e-6
    """Peak learning rate of the optimizer."""

    remove_unused_columns: bool | None = False
    """Reward functions are given all columns, so none is removed."""

    per_device_train_batch_size: int = 8
    """Completions, not prompts, that a device trains at a time."""

    num_generations: int = 8
    """Completions a prompt, compared with each other: at least 2."""

    num_generations_eval: int | None = None
    """Completions a prompt in evaluation; num_generations if not set."""

    generation_batch_size: int | None = None
    """Completions generated at a time over all devices; or set steps_per_generation."""

    steps_per_generation: int | None = None
    """Micro-batches that are generated at a time; gradient_accumulation_steps if not set."""

    num_iterations: int = 1
    """How often what was generated is trained."""

    shuffle_dataset: bool | None = True
    """Ask prompts in an order of its own each epoch."""

    max_prompt_length: int | None = None
    """Longest prompt in tokens; None for no limit."""

    overlong: str = "truncate"
    """What happens to prompts above max_prompt_length: "truncate" keeps their end, "drop" leaves them out, "error"."""

    max_completion_length: int | None = 512
    """Longest completion in tokens, answers of tools included."""

    temperature: float = 1.0
    """Divides the logits, in sampling and in training alike."""

    top_p: float = 1.0
    """Sample only from the fewest likeliest tokens that hold this much probability."""

    top_k: int | None = 0
    """Sample only from so many likeliest tokens; 0 for all."""

    min_p: float | None = None
    """Sample only from tokens with at least this fraction of the likeliest one's probability."""

    repetition_penalty: float = 1.0
    """Divides the logits of tokens already there when sampling; 1 for none."""

    generation_kwargs: dict[str, Any] | str | None = None
    """Further fields of `strop.rollout.types.Sampling`, e.g. {"stop": ["</answer>"]}; they win over the options."""

    chat_template_kwargs: dict[str, Any] | str | None = None
    """Arguments for the chat template, e.g. {"enable_thinking": false}; those in a row's own chat_template_kwargs
    column come on top."""

    chat_template_path: str | None = None
    """A .jinja file with a chat template, or a model or folder whose tokenizer's template (and tokens) to adopt."""

    eos_token: str | None = None
    """End-of-sequence token, if not the tokenizer's own; must be in its vocabulary."""

    pad_token: str | None = None
    """Padding token, if not the tokenizer's own (else its end-of-sequence token is used); must be in its vocabulary."""

    reward_weights: list[float] | None = None
    """Weight of each reward function; all 1 if not set."""

    reward_workers: int = 0
    """Threads in which reward functions that aren't asynchronous run side by side; 0: one after the other."""

    reward_timeout: float | None = None
    """Seconds each reward function may take; rows without an answer by then count as not applicable."""

    reward_skip_special_tokens: bool = True
    """Leave special tokens out of the texts that reward functions read."""

    beta: float = 0.0
    """Weight of the KL divergence from the reference, the model as it was before; 0: no reference is kept."""

    epsilon: float | None = None
    """How far below 1 a ratio may fall before it is clipped; the loss's own value if not set (0.2 for most)."""

    epsilon_high: float | None = None
    """How far above 1 a ratio may rise before it is clipped (of cispo: the largest ratio); the loss's own value if not
    set."""

    mask_truncated_completions: bool = False
    """Train nothing on completions that were cut off at max_completion_length."""

    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO, arXiv:2404.09656)."""

    ref_model_sync_steps: int = 512
    """Optimizer steps between two updates of the reference."""

    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in the updated reference, in (0, 1]."""

    dynamic_sampling_rounds: int = 0
    """How often at most groups without a signal, all of whose rewards are equal, are replaced by those of new prompts
    before training (DAPO, arXiv:2503.14476, section 3.2); 0 for never."""

    dynamic_sampling_reward: str | None = None
    """Name of the one reward whose differences count as a signal there, e.g. "accuracy_reward" next to one for style;
    their weighted sum if not set."""

    kl_on_equal_rewards: bool = True
    """Let the KL divergence pull on groups of equal rewards, too, which teach nothing else."""

    replay_buffer_size: int = 0
    """How many groups, those whose rewards differ most, are kept to be trained once more in the place of groups without
    a signal; 0 for none. Experimental."""

    stop_on_dead_run: bool = False
    """End the run, with a checkpoint, after three logs in a row with nine of ten completions cut off at least and no
    difference in reward, of which one is warned in any case."""

    disable_dropout: bool = True
    """Switch off dropout, so that ratios are 1 where the policy hasn't moved."""

    cast_lm_head_to_fp32: bool = False
    """Multiply by the head in float32, with weights of 16 bit and under autocast as well (MiniMax-M1,
    arXiv:2506.13585). What follows the product is computed in float32 always."""

    layout: str = "auto"
    """"packed": completions of a micro-batch share one stream without padding, and a prompt stands in it once.
    "padded": rows padded to one length. "auto": packed wherever the model allows it, verified on the first batch."""

    pad_to_multiple_of: int | str | None = "auto"
    """Round the time axis up to a multiple of this; "auto" or None for none."""

    log_completions: bool = False
    """Print completions with their rewards at every log; they are written to `rollouts/` in any case."""

    num_completions_to_print: int | None = None
    """Completions in a printed table; all if not set."""

    log_unique_prompts: bool = False
    """Print one completion a prompt only."""

    log_multimodal: bool = True
    """Accepted for TRL's sake: prompts hold no images."""

    log_completions_hub_repo: str | None = None
    """Not supported: rollouts are written to `rollouts/` in the output folder."""

    ds3_gather_for_generation: bool = True
    """Accepted for TRL's sake: sharded weights are gathered layer by layer, always."""

    cache_implementation: str | None = None
    """Not supported: generation has a cache of its own."""

    use_transformers_continuous_batching: bool = False
    """Accepted for TRL's sake: generation batches continuously, always."""

    transformers_continuous_batching_config: dict[str, Any] | str | None = None
    """Not supported: generation has a scheduler of its own."""

    use_vllm: bool = False
    """Generate by vLLM; not supported yet."""

    vllm_mode: str = "colocate"
    """Where vLLM runs: "colocate" or "server"."""

    vllm_model_impl: str = "vllm"
    """Whose code runs the model in vLLM: "vllm" or "transformers"."""

    vllm_enable_sleep_mode: bool = False
    """Let vLLM give its memory back while the model trains."""

    vllm_structured_outputs_regex: str | None = None
    """Regular expression that completions by vLLM match."""

    vllm_server_base_url: str | None = None
    """Address of the vLLM server."""

    vllm_server_host: str = "0.0.0.0"
    """Host of the vLLM server."""

    vllm_server_port: int = 8000
    """Port of the vLLM server."""

    vllm_server_timeout: float = 240.0
    """Seconds to wait for the vLLM server."""

    vllm_group_port: int = 51216
    """Port by which weights go to the vLLM server."""

    vllm_gpu_memory_utilization: float = 0.3
    """Share of the GPU's memory that vLLM takes."""

    vllm_max_model_length: int | None = None
    """Context length of vLLM."""

    vllm_tensor_parallel_size: int = 1
    """GPUs that vLLM spreads the model over."""

    def __post_init__(self):
        for name in ("model_init_kwargs", "generation_kwargs", "chat_template_kwargs"):
            setattr(self, name, checks.mapping(name, getattr(self, name)))
        self.pad_to_multiple_of = checks.multiple(self.pad_to_multiple_of)
        self.shuffle_dataset = self.shuffle_dataset is not False
        self._check_rollouts()
        self._check_reference()
        self._refuse_other_generators()
        checks.step_counts(self)
        checks.no_effect(
            self,
            {"label_smoothing_factor": 0.0, "neftune_noise_alpha": None, "auto_find_batch_size": False}
            | {"remove_unused_columns": False, "dataloader_drop_last": False, "train_sampling_strategy": "random"},
            "training on rollouts, which doesn't use it",
        )
        checks.offloading(self.activation_offloading, self.device_type)
        self._settle_best()
        super().__post_init__()
        self._settle_sizes()

    def to_dict(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in super().to_dict().items()}

    def _settle_best(self):
        if self.best_metric is None:
            return
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = self.best_metric
        elif (self.metric_for_best_model or "").endswith("loss"):
            logger.warning(
                "metric_for_best_model=%r is near 0 on rollouts, whatever was learned; %r says what completions earn",
                self.metric_for_best_model, self.best_metric,
            )  # fmt: skip

    @property
    def sampling(self) -> Sampling:
        """How completions are drawn."""
        values = {
            "max_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
        } | {SAMPLING_NAMES.get(name, name): value for name, value in (self.generation_kwargs or {}).items()}
        for name in ("stop", "stop_token_ids"):
            if name in values:
                value = values[name]
                values[name] = (value,) if isinstance(value, str | int) else tuple(value)
        return Sampling(**values)

    @property
    def lookup_size(self) -> int:
        """Completions of which log-probabilities are computed at a time before they are trained."""
        return self.completions_per_device

    @property
    def generations_in_evaluation(self) -> int:
        return self.num_generations_eval or self.num_generations

    def _check_rollouts(self):
        if not isinstance(self.num_generations, int) or self.num_generations < self.least_generations:
            raise ValueError(
                f"num_generations={self.num_generations} is too few: completions of a prompt are compared with each "
                "other, so there must be at least 2."
            )
        for name in ("num_generations_eval", "num_iterations", "max_prompt_length", "num_completions_to_print"):
            checks.at_least(name, getattr(self, name), 1)
        for name in ("reward_workers", "dynamic_sampling_rounds", "replay_buffer_size", "beta"):
            checks.at_least(name, getattr(self, name), 0)
        checks.one_of("overlong", self.overlong, ("truncate", "drop", "error"))
        checks.one_of("layout", self.layout, ("auto", "packed", "padded"))
        if not self.dynamic_sampling_rounds:
            checks.no_effect(self, {"dynamic_sampling_reward": None}, "dynamic_sampling_rounds=0")
        if not self.beta:
            checks.no_effect(self, {"kl_on_equal_rewards": True}, "beta=0")
        if self.max_prompt_length is None:
            checks.no_effect(self, {"overlong": "truncate"}, "max_prompt_length=None, as no prompt is too long")
        if self.max_completion_length is None:
            raise ValueError("max_completion_length=None sets no end to what is generated; give a number of tokens.")
        unknown = {SAMPLING_NAMES.get(name, name) for name in self.generation_kwargs or {}} - SAMPLING_FIELDS
        if unknown:
            known = ", ".join(sorted(SAMPLING_FIELDS))
            raise ValueError(f"generation_kwargs={self.generation_kwargs!r} has {min(unknown)!r}; known are {known}.")
        if not self.sampling.temperature > 0:
            raise ValueError(
                f"temperature={self.sampling.temperature} always writes the same completion, so there is nothing to "
                "compare; take one above 0."
            )

    def _check_reference(self):
        checks.at_least("ref_model_sync_steps", self.ref_model_sync_steps, 1)
        if not 0 < self.ref_model_mixup_alpha <= 1:
            raise ValueError(
                f"ref_model_mixup_alpha={self.ref_model_mixup_alpha} is out of range; a share is in (0, 1]."
            )
        if not self.sync_ref_model:
            checks.no_effect(self, {"ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6}, "sync_ref_model=False")
        elif not self.beta:
            raise ValueError("sync_ref_model=True moves the reference, but beta=0 keeps none; set beta, e.g. to 0.04.")
        if self.sync_ref_model and self.replay_buffer_size:
            raise ValueError(
                f"replay_buffer_size={self.replay_buffer_size} keeps what the reference said of completions, but "
                "sync_ref_model=True moves it; remove one of the two."
            )

    def _refuse_other_generators(self):
        if self.use_vllm:
            raise ValueError(
                "use_vllm=True needs a generator on vLLM, which strop doesn't have yet; leave it out to generate with "
                "the training model itself."
            )
        neutral = {f.name: f.default for f in fields(self) if f.name in VLLM_OPTIONS}
        checks.no_effect(self, neutral, "use_vllm=False")
        checks.no_effect(
            self,
            dict.fromkeys(
                ("cache_implementation", "transformers_continuous_batching_config", "log_completions_hub_repo")
            ),
            "generation by the training model, which has its own cache, scheduler and record",
        )
        if not self.log_completions:
            checks.no_effect(
                self, {"num_completions_to_print": None, "log_unique_prompts": False}, "log_completions=False"
            )

    @property
    def completions_per_device(self) -> int:
        """Completions that a device trains at a time."""
        return self.per_device_train_batch_size

    @property
    def completions_per_device_eval(self) -> int:
        """Completions that a device evaluates at a time."""
        return self.per_device_eval_batch_size

    def _settle_sizes(self):
        """Both names of a generation's size hold what follows from the other."""
        processes = int(os.environ.get("WORLD_SIZE", 1))
        size, accumulation = self.completions_per_device, self.gradient_accumulation_steps
        given, whole = told(self.steps_per_generation), told(self.generation_batch_size)
        steps = settled_steps(size, processes, accumulation, given, whole)
        self.steps_per_generation = settled(steps, given=given)
        self.generation_batch_size = settled(size * processes * steps, given=whole)
        self.plan(processes)

    def plan(self, num_processes: int, num_prompts: int | None = None) -> BatchPlan:
        """The sizes of a run. Raises ValueError where groups would be torn apart."""
        return BatchPlan(
            self.completions_per_device,
            num_processes,
            self.gradient_accumulation_steps,
            self.steps_per_generation,
            self.num_generations,
            self.num_iterations,
            num_prompts,
            full_blocks=self.fills_blocks or self.dynamic_sampling_rounds > 0,
        )


SAMPLING_FIELDS = frozenset(f.name for f in fields(Sampling))
SAMPLING_NAMES = {"stop_strings": "stop", "max_new_tokens": "max_tokens", "eos_token_id": "stop_token_ids"}
"""What transformers calls fields of `Sampling`."""
VLLM_OPTIONS = frozenset(f.name for f in fields(OnPolicyConfig) if f.name.startswith("vllm_") and f.name != "use_vllm")
