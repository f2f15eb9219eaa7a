"""Every old name of the public surface: one table, and what happens to a keyword that is in it.

A renamed option works and warns once; one that is gone names its replacement; an unknown one suggests the nearest.
"""

import difflib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Renamed:
    """The option is now called `to`; `value` turns the old value into the new one."""

    to: str
    value: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Moved:
    """An argument of the trainer that is now the field `to` of its config."""

    to: str


@dataclass(frozen=True)
class Removed:
    """The option is gone; `instead` says what to do."""

    instead: str


def _accelerator(key: str) -> Renamed:
    return Renamed("accelerator_config", lambda value: {key: value})


TRAINING = {
    "evaluation_strategy": Renamed("eval_strategy"),
    "no_cuda": Renamed("use_cpu"),
    "per_gpu_train_batch_size": Renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Renamed("per_device_eval_batch_size"),
    "warmup_ratio": Renamed("warmup_steps"),
    "group_by_length": Renamed("train_sampling_strategy", lambda on: "group_by_length" if on else "random"),
    "include_inputs_for_metrics": Renamed("include_for_metrics", lambda on: ["inputs"] if on else []),
    "include_tokens_per_second": Removed('use include_num_input_tokens_seen="non_padding"'),
    "push_to_hub_token": Renamed("hub_token"),
    "push_to_hub_model_id": Renamed("hub_model_id"),
    "split_batches": _accelerator("split_batches"),
    "dispatch_batches": _accelerator("dispatch_batches"),
    "use_liger": Renamed("use_liger_kernel"),
    "torchdynamo": Renamed("torch_compile_backend"),
    "overwrite_output_dir": Removed("delete the folder yourself, or continue with resume_from_checkpoint=True"),
    "logging_dir": Removed("set the environment variable TENSORBOARD_LOGGING_DIR"),
    "save_safetensors": Removed("weights are always saved as safetensors"),
    "fp16_backend": Removed("fp16=True uses torch.autocast"),
    "half_precision_backend": Removed("fp16=True or bf16=True use torch.autocast"),
    "fp16_opt_level": Removed("fp16=True uses torch.autocast, which has no levels"),
    "use_mps_device": Removed("an Apple GPU is used where there is one, unless use_cpu=True"),
    "use_ipex": Removed("bf16=True on a CPU uses its own instructions"),
    "jit_mode_eval": Removed("use torch_compile=True"),
    "past_index": Removed("no model has needed it for years"),
    "ray_scope": Removed("set it on the tuner that runs the trainer"),
    "tpu_num_cores": Removed("the launcher decides: accelerate launch --num_processes"),
    "tpu_metrics_debug": Removed('use debug="tpu_metrics_debug"'),
    "fsdp_min_num_params": Removed('use fsdp_config={"min_num_params": ...}'),
    "fsdp_transformer_layer_cls_to_wrap": Removed('use fsdp_config={"transformer_layer_cls_to_wrap": [...]}'),
}

SFT = {
    "max_seq_length": Renamed("max_length"),
    "neftune_alpha": Renamed("neftune_noise_alpha"),
    "dataset_batch_size": Removed("rows are prepared in batches of a fixed size; dataset_num_proc adds workers"),
    "num_of_sequences": Removed("streams are packed within a bounded buffer; max_length is the length of a row"),
    "chars_per_token": Removed("packing counts tokens; max_length is the length of a row"),
    "max_prompt_length": Removed(
        'max_length bounds prompt and completion together; overlong="drop" leaves out long rows'
    ),
    "max_completion_length": Removed("max_length bounds prompt and completion together"),
    "use_vllm": Removed("supervised fine-tuning generates nothing"),
}

REFERENCE_FREE = {
    "generate_during_eval": Removed("pass callbacks=[LogCompletionsCallback(...)] to the trainer"),
    "is_encoder_decoder": Removed("decoder-only models are trained here; SFTTrainer takes encoder-decoder ones"),
    "padding_value": Removed("padding is neither attended to nor scored; pad_token sets it for models that need one"),
    "label_pad_token_id": Removed("labels are always padded with -100"),
}

DPO = REFERENCE_FREE | {
    "max_target_length": Renamed("max_completion_length"),
    "ref_model_init_kwargs": Removed("load the reference yourself and pass it as ref_model"),
    "model_adapter_name": Removed("the model's active adapter is trained"),
    "ref_adapter_name": Removed(
        "the reference is the trained adapter as it is now, kept without loading it a second time"
    ),
    "force_use_ref_model": Removed("a ref_model that is given is always used, with adapters too"),
    "reference_free": Removed("CPOTrainer and SimPOTrainer train on pairs without a reference"),
    "base_model_attribute_name": Removed("the model is called through its own forward"),
    "use_logits_to_keep": Removed("only completion tokens meet the vocabulary, always"),
    "use_liger_loss": Removed("log-probabilities are computed tile by tile, always"),
    "use_num_logits_to_keep": Removed("only completion tokens meet the vocabulary, always"),
    "tools": Removed("put them into a column called tools"),
}

LABELLED = REFERENCE_FREE | {
    "ref_model_init_kwargs": Removed("load the reference yourself and pass it as ref_model"),
    "model_adapter_name": Removed("the model's active adapter is trained"),
    "ref_adapter_name": Removed("the reference is the model as it is now, adapters included"),
    "base_model_attribute_name": Removed("the model is called through its own forward"),
    "use_liger_loss": Removed("log-probabilities are computed tile by tile, always"),
}

ON_POLICY = {
    "max_new_tokens": Renamed("max_completion_length"),
    "use_transformers_paged": Renamed("use_transformers_continuous_batching"),
    "wandb_log_unique_prompts": Renamed("log_unique_prompts"),
    "vllm_guided_decoding_regex": Renamed("vllm_structured_outputs_regex"),
    "vllm_device": Removed("vLLM would run on the devices that train"),
    "vllm_dtype": Removed("vLLM would run in the dtype of the model"),
    "vllm_max_model_len": Renamed("vllm_max_model_length"),
    "use_liger_loss": Removed("log-probabilities are computed tile by tile, always"),
}

GRPO = ON_POLICY | {
    "vllm_importance_sampling_cap": Renamed("vllm_importance_sampling_clip_max"),
    "reward_scaling": Renamed("scale_rewards"),
}

RLOO = ON_POLICY | {
    "rloo_k": Renamed("num_generations"),
    "cliprange": Renamed("epsilon"),
    "kl_coef": Renamed("beta"),
    "num_ppo_epochs": Renamed("num_iterations"),
    "num_mini_batches": Renamed("steps_per_generation"),
    "response_length": Renamed("max_completion_length"),
    "normalize_reward": Removed("normalize_advantages=True normalises what is left after the baseline"),
    "total_episodes": Removed("set max_steps, or num_train_epochs"),
    "token_level_kl": Removed("log pi/ref of whole completions is subtracted from their rewards"),
    "local_rollout_forward_batch_size": Removed("per_device_train_batch_size is used"),
    "stop_token": Removed("every end-of-sequence token of the model and the tokenizer ends a completion"),
    "stop_token_id": Removed('use generation_kwargs={"stop_token_ids": [...]}'),
}

PPO = {name: entry for name, entry in ON_POLICY.items() if name != "max_new_tokens"} | {
    "max_new_tokens": Renamed("response_length"),
    "ppo_epochs": Renamed("num_ppo_epochs"),
    "init_kl_coef": Renamed("kl_coef"),
    "horizon": Renamed("kl_horizon"),
    "target": Renamed("target_kl"),
    "adap_kl_ctrl": Removed("set target_kl to hold the KL divergence there, or leave it out for a fixed kl_coef"),
    "model_adapter_name": Removed("the model's active adapter is trained"),
    "ref_adapter_name": Removed("the reference is the model as it is now, adapters included, or ref_model"),
    **dict.fromkeys(
        ("batch_size", "mini_batch_size", "local_batch_size", "local_mini_batch_size", "micro_batch_size"),
        Removed("sizes follow from per_device_train_batch_size, gradient_accumulation_steps and num_mini_batches"),
    ),
    "num_total_batches": Removed("set total_episodes, max_steps or num_train_epochs"),
}

ONLINE = {name: entry for name, entry in ON_POLICY.items() if name != "max_new_tokens"} | {
    "dataset_num_proc": Removed("prompts are cut into tokens when they are asked"),
}

TRAINER = {"tokenizer": Renamed("processing_class")}

SFT_TRAINER = {
    name: Moved(name)
    for name in (
        "dataset_text_field",
        "packing",
        "eval_packing",
        "max_length",
        "dataset_num_proc",
        "dataset_kwargs",
        "neftune_noise_alpha",
        "model_init_kwargs",
    )
} | {
    "max_seq_length": Moved("max_length"),
    "dataset_batch_size": SFT["dataset_batch_size"],
    "num_of_sequences": SFT["num_of_sequences"],
    "chars_per_token": SFT["chars_per_token"],
    "infinite": Removed("use an iterable data set and max_steps"),
    "model_init": Removed("pass the model, or its name with model_init_kwargs"),
}

REFERENCE_FREE_TRAINER = {
    "model_init": Removed("pass the model, or its name with model_init_kwargs"),
    "preprocess_logits_for_metrics": Removed("pairs are scored, not predicted, so there are no logits to process"),
}

DPO_TRAINER = {
    name: Moved(name)
    for name in (
        *("beta", "label_smoothing", "loss_type", "truncation_mode", "max_length", "max_prompt_length"),
        *("disable_dropout", "precompute_ref_log_probs", "dataset_num_proc", "model_init_kwargs"),
    )
} | {
    "max_target_length": Moved("max_completion_length"),
    "model_init": REFERENCE_FREE_TRAINER["model_init"],
    "preprocess_logits_for_metrics": REFERENCE_FREE_TRAINER["preprocess_logits_for_metrics"],
    **{name: entry for name, entry in DPO.items() if isinstance(entry, Removed)},
}

REWARD = {"max_seq_length": Renamed("max_length")}
REWARD_TRAINER = {
    "max_length": Moved("max_length"),
    "model_init": Removed("pass the model, or its name with model_init_kwargs"),
}

ON_POLICY_TRAINER = {
    "reward_model": Removed("pass it as reward_funcs"),
    "ref_policy": Removed("the reference is the model as it is now, kept where beta isn't 0"),
    "policy": Renamed("model"),
    "config": Renamed("args"),
    "data_collator": Removed("rollouts are put into batches by the trainer itself"),
}

ONLINE_TRAINER = {
    "reward_model": Renamed("reward_funcs"),
    "reward_processing_class": Renamed("reward_processing_classes"),
}

PPO_TRAINER = {
    "policy": Renamed("model"),
    "ref_policy": Renamed("ref_model"),
    "config": Renamed("args"),
    "dataset": Renamed("train_dataset"),
}

LABELLED_TRAINER = {
    name: entry
    for name, entry in (REFERENCE_FREE_TRAINER | LABELLED).items()
    if name in ("model_init", "preprocess_logits_for_metrics", "model_adapter_name", "ref_adapter_name")
}

MODEL = {
    "torch_dtype": Renamed("dtype"),
    "model_name": Renamed("model_name_or_path"),
    "peft_lora_r": Renamed("lora_r"),
    "peft_lora_alpha": Renamed("lora_alpha"),
    "use_flash_attention_2": Renamed("attn_implementation", lambda on: "flash_attention_2" if on else None),
    "trust_remote_code": Removed("it is a field of the trainer's config: SFTConfig(trust_remote_code=True)"),
}

OLD_NAMES: dict[str, dict[str, Renamed | Moved | Removed]] = {
    "BaseConfig": TRAINING,
    "SFTConfig": TRAINING | SFT,
    "ModelConfig": MODEL,
    "SFTTrainer": TRAINER | SFT_TRAINER,
    "DPOConfig": TRAINING | DPO,
    "DPOTrainer": TRAINER | DPO_TRAINER,
    "RewardConfig": TRAINING | REWARD,
    "RewardTrainer": TRAINER | REWARD_TRAINER,
    "GRPOConfig": TRAINING | GRPO,
    "RLOOConfig": TRAINING | RLOO,
    "PRMConfig": TRAINING | REWARD,
    "PPOConfig": TRAINING | PPO,
    "PPOTrainer": TRAINER | PPO_TRAINER,
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), TRAINER | ON_POLICY_TRAINER),
    **dict.fromkeys(("OnlineDPOConfig", "XPOConfig", "NashMDConfig"), TRAINING | ONLINE),
    **dict.fromkeys(("OnlineDPOTrainer", "XPOTrainer", "NashMDTrainer"), TRAINER | ONLINE_TRAINER),
    "PRMTrainer": TRAINER | REWARD_TRAINER,
    **dict.fromkeys(("CPOConfig", "SimPOConfig", "ORPOConfig", "TPOConfig"), TRAINING | REFERENCE_FREE),
    **dict.fromkeys(("CPOTrainer", "SimPOTrainer", "ORPOTrainer", "TPOTrainer"), TRAINER | REFERENCE_FREE_TRAINER),
    **dict.fromkeys(("KTOConfig", "BCOConfig"), TRAINING | LABELLED),
    **dict.fromkeys(("KTOTrainer", "BCOTrainer"), TRAINER | LABELLED_TRAINER),
}
"""Class -> old keyword -> what became of it."""

OLD_VALUES: dict[str, dict[str, dict[Any, Any]]] = {
    "SFTConfig": {
        "packing_strategy": {"bfd-requeue": "bfd_split", "bfd_requeue": "bfd_split", "ffd": "bfd"},
        "loss_type": {"chunked_nll": "nll"},
    },
    "DPOConfig": {"loss_type": {"aot_pair": "aot"}},
}
"""Class -> option -> old value -> the value that means the same today."""

_warned: set[str] = set()


def suggestion(name: object, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?" with the nearest of the `known` names, or nothing."""
    known = list(known)
    longer = [candidate for candidate in known if len(str(name)) > 2 and candidate.startswith(str(name))]
    close = longer[:1] or difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def warn_once(message: str) -> None:
    """A FutureWarning, which users see by default, once per process, at the line that called into strop."""
    if message in _warned:
        return
    _warned.add(message)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, FutureWarning, stacklevel=level)


def translate(cls_name: str, given: dict[str, Any], known: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of `cls_name` as they are called today, and those that now belong to its config.

    `known` are the keywords it has. Raises ValueError for a removed one and for an old and a new name with different
    values, TypeError for an unknown one.
    """
    known, table = list(known), OLD_NAMES.get(cls_name, {})
    current = {name: value for name, value in given.items() if name in known}
    moved: dict[str, Any] = {}
    for name in [name for name in given if name not in current]:
        if name not in table:
            raise TypeError(f"{cls_name} has no option {name!r}.{suggestion(name, [*known, *table])}")
        to, value = renamed(cls_name, name, given[name])
        _put(cls_name, moved if isinstance(table[name], Moved) else current, to, value, name)
    for option, old, new in _old_values(cls_name, current):
        warn_once(f"{option}={old!r} is now called {new!r}; the old name will stop working in 1.0.")
        current[option] = new
    return current, moved


def renamed(cls_name: str, name: str, value: Any) -> tuple[str, Any]:
    """Today's name and value of an option given by its old `name`; warns. Raises ValueError if the option is gone."""
    entry = OLD_NAMES[cls_name][name]
    if isinstance(entry, Removed):
        raise ValueError(f"{cls_name} has no option {name!r} any more: {entry.instead}.")
    now = f"a field of its config: {entry.to}" if isinstance(entry, Moved) else f"called {entry.to}"
    warn_once(f"{cls_name}({name}=...) is now {now}; the old name will stop working in 1.0.")
    convert = entry.value if isinstance(entry, Renamed) else None
    return entry.to, convert(value) if convert else value


def _put(cls_name: str, values: dict[str, Any], to: str, value: Any, old: str) -> None:
    if to in values and values[to] is not value and values[to] != value:
        raise ValueError(
            f"{cls_name} got {to}={values[to]!r} and {old}={value!r}, two names of one option with different values; "
            f"keep {to}."
        )
    values[to] = value


def _old_values(cls_name: str, values: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    replacements = OLD_VALUES.get(cls_name, {})
    return [
        (option, value, replacements[option][value])
        for option, value in values.items()
        if isinstance(value, str) and value in replacements.get(option, {})
    ]


def accepts_old_names(cls: type) -> type:
    """Class decorator: the constructor understands the old names of `OLD_NAMES` and explains the ones it refuses.

    On a config it goes above `@dataclass`. On a trainer, options that moved to the config arrive in `args`: a config is
    replaced by one with these fields, and without a config `args` is a dict of them.
    """
    init = cls.__init__
    signature = inspect.signature(init)
    names = list(signature.parameters)[1:]

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        current, moved = translate(cls.__name__, kwargs, names)
        if moved:
            bound = signature.bind_partial(self, *args, **current)
            bound.arguments["args"] = with_fields(bound.arguments.get("args"), moved)
            return init(*bound.args, **bound.kwargs)
        return init(self, *args, **current)

    cls.__init__ = __init__
    return cls


def with_fields(args: Any, moved: dict[str, Any]) -> Any:
    """`args` (a config, a dict of its fields or None) with the fields `moved`; a config of the caller stays untouched.

    A config without such fields becomes a dict. Raises ValueError where the config says something else already.
    """
    if args is None or isinstance(args, dict):
        return {**(args or {}), **moved}
    own = {field.name: field.default for field in fields(args) if field.init}
    for name in moved.keys() & own.keys():
        if getattr(args, name) not in (moved[name], own[name]):
            raise ValueError(
                f"{name}={moved[name]!r} was passed to the trainer and {name}={getattr(args, name)!r} to its config; "
                "keep the one in the config."
            )
    if moved.keys() <= own.keys():
        return replace(args, **moved)
    return {name: getattr(args, name) for name in own} | moved


OLD_EXPORTS = {
    "DataCollatorForCompletionOnlyLM": "SFTConfig(completion_only_loss=True) or SFTConfig(assistant_only_loss=True)",
    "ConstantLengthDataset": "SFTConfig(packing=True)",
    "SFTScriptArguments": "ScriptArguments",
    "setup_chat_format": "clone_chat_template",
    "HfArgumentParser": "TrlParser",
    "HfPairwiseJudge": "PairwiseJudge(model, base_url)",
    "OpenAIPairwiseJudge": "PairwiseJudge(model, base_url)",
    "PairRMJudge": "RewardJudge(reward_model)",
}
"""Names that `strop` doesn't have, though scripts of older days import them -> what does the job."""


def missing_export(name: str, known: Iterable[str]) -> Exception:
    """The error for `from strop import name`: an ImportError that names the replacement where there is one."""
    if name in OLD_EXPORTS:  # an AttributeError's text would not reach `from strop import ...`
        return ImportError(f"strop has no {name!r}; its job is done by {OLD_EXPORTS[name]}.")
    return AttributeError(f"module 'strop' has no attribute {name!r}.{suggestion(name, known)}")
