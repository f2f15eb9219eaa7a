"""Every old name of the public surface: one table, and what happens to a keyword that is in it.

A renamed option works and warns once; one that is gone names its replacement; an unknown one suggests the nearest.
"""

import difflib
import functools
import inspect
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
}
"""Class -> old keyword -> what became of it."""

OLD_VALUES: dict[str, dict[str, dict[Any, Any]]] = {
    "SFTConfig": {
        "packing_strategy": {"bfd-requeue": "bfd_split", "bfd_requeue": "bfd_split", "ffd": "bfd"},
        "loss_type": {"chunked_nll": "nll"},
    },
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
    """A FutureWarning, which users see by default, once per process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, FutureWarning, stacklevel=4)


def translate(cls_name: str, given: dict[str, Any], known: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of `cls_name` as they are called today, and those that now belong to its config.

    `known` are the keywords it has. Raises ValueError for a removed one and for an old and a new name with different
    values, TypeError for an unknown one.
    """
    known, table = list(known), OLD_NAMES.get(cls_name, {})
    current = {name: value for name, value in given.items() if name in known}
    moved: dict[str, Any] = {}
    for name in [name for name in given if name not in current]:
        match table.get(name):
            case Renamed(to, value):
                warn_once(f"{cls_name}({name}=...) is now called {to}; the old name will stop working in 1.0.")
                _put(cls_name, current, to, value(given[name]) if value else given[name], name)
            case Moved(to):
                warn_once(f"{cls_name}({name}=...) is now a field of its config: {to}; this will stop working in 1.0.")
                _put(cls_name, moved, to, given[name], name)
            case Removed(instead):
                raise ValueError(f"{cls_name} has no option {name!r} any more: {instead}.")
            case _:
                hint = suggestion(name, [*known, *table])
                raise TypeError(f"{cls_name} has no option {name!r}.{hint}")
    for option, old, new in _old_values(cls_name, current):
        warn_once(f"{option}={old!r} is now called {new!r}; the old name will stop working in 1.0.")
        current[option] = new
    return current, moved


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
