"""Configs of the trainers: flat dataclasses on `transformers.TrainingArguments`, composed of arguments by owner.

A field is documented once, by the string under it, which is also its help on the command line.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from transformers.utils import strtobool

from strop.compat import accepts_old_names
from strop.data.arguments import DataArguments, PackingArguments, TargetArguments
from strop.losses.supervised import SUPERVISED_LOSSES
from strop.models.arguments import ModelInitArguments
from strop.trainer import checks


@accepts_old_names
@dataclass
class BaseConfig(transformers.TrainingArguments):
    """`transformers.TrainingArguments` with the defaults of post-training, checked before anything is loaded.

    Raises ValueError for unknown values, values out of range and options that contradict each other.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *transformers.TrainingArguments._VALID_DICT_FIELDS,
        "liger_kernel_config",
    ]

    bf16: bool | None = None
    """Mixed precision in bfloat16. If neither `bf16` nor `fp16` is set the device decides: float32 on a CPU, bfloat16
    on a GPU that has it, else float16."""

    fp16: bool | None = None
    """Mixed precision in float16 with loss scaling; for GPUs without bfloat16."""

    activation_checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of keeping them; yes if not set. TRL's name for it,
    `gradient_checkpointing`, means the same."""

    gradient_checkpointing: bool | None = None
    """TRL's name of `activation_checkpointing`."""

    activation_checkpointing_kwargs: dict[str, Any] | str | None = None
    """Keyword arguments of the model's `activation_checkpointing_enable`, e.g. {"every_n_layers": 2}."""

    gradient_checkpointing_kwargs: dict[str, Any] | str | None = None
    """TRL's name of `activation_checkpointing_kwargs`."""

    logging_steps: float = 10
    """Optimizer steps between two log lines; below 1 a share of the run."""

    logging_nan_inf_filter: bool = False
    """Replace losses that are not finite by the running mean in the logs. Off, so that a NaN is seen at once."""

    report_to: str | list[str] | None = "none"
    """Experiment trackers that receive the logs, e.g. "tensorboard" or "wandb"; if not set, nothing leaves
    the machine."""

    resume_from_checkpoint: str | bool | None = None
    """For commands: continue from this checkpoint, or from the last one in `output_dir` (true). In Python it is an
    argument of `trainer.train`."""

    parallelism_config: ParallelismConfig | dict[str, Any] | None = None
    """Sizes of the device mesh, e.g. {"dp_shard_size": 2, "tp_size": 4}."""

    ddp_find_unused_parameters: bool | None = False
    """Let distributed data parallel look for parameters without a gradient at every step; only models with unused
    branches need that."""

    def __post_init__(self):
        if self.hub_token == "<HUB_TOKEN>":  # to_dict hides the token; a config read back has none
            self.hub_token = None
        if isinstance(self.parallelism_config, dict):
            self.parallelism_config = ParallelismConfig(**self.parallelism_config)
        self._check_base()
        self._decide_checkpointing()
        self._decide_precision()
        if (self.bf16 or self.bf16_full_eval) and self.device_type == "cpu":
            self.use_cpu = True  # else transformers looks for a GPU with bfloat16
        super().__post_init__()

    def _check_base(self):
        for name, enum in checks.TRAINING_ENUMS.items():
            checks.one_of(name, getattr(self, name), [member.value for member in enum])
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            checks.at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "num_train_epochs", "warmup_steps"):
            checks.at_least(name, getattr(self, name), 0)
        checks.within("label_smoothing_factor", self.label_smoothing_factor, 0, 1)
        checks.one_of("train_sampling_strategy", self.train_sampling_strategy, checks.SAMPLING_STRATEGIES)
        if self.load_best_model_at_end and self.eval_strategy == "no":
            raise ValueError(
                'load_best_model_at_end=True can\'t tell which model is best with eval_strategy="no"; set '
                'eval_strategy="steps" or "epoch" (and save_strategy alike).'
            )
        checks.liger(self.use_liger_kernel, self.liger_kernel_config, self.device_type)

    def _decide_checkpointing(self):
        """Both names of activation checkpointing hold the same value from here on."""
        for new, old, default in (
            ("activation_checkpointing", "gradient_checkpointing", True),
            ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", None),
        ):
            value = checks.same(new, getattr(self, new), old, getattr(self, old))
            setattr(self, new, default if value is None else value)
            setattr(self, old, getattr(self, new))
        if self.activation_checkpointing_kwargs and not self.activation_checkpointing:
            raise ValueError(
                f"activation_checkpointing_kwargs={self.activation_checkpointing_kwargs!r} has no effect with "
                "activation_checkpointing=False; remove one of the two."
            )

    def _decide_precision(self):
        """`bf16` and `fp16` as asked, else as `accelerate launch --mixed_precision` says, else by device."""
        if self.bf16 is None and self.fp16 is None:
            wanted = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
            if wanted not in ("bf16", "fp16"):
                wanted = mixed_precision_of(self.device_type)
            self.bf16, self.fp16 = wanted == "bf16", wanted == "fp16"
        elif self.bf16 is None:
            self.bf16 = not self.fp16 and mixed_precision_of(self.device_type) == "bf16"
        self.fp16 = bool(self.fp16)
        checks.precision(self.bf16, self.fp16, self.device_type, mixed_precision_of(self.device_type))

    @property
    def device_type(self) -> str:
        """ "cpu", or the type of the accelerator that will train, without initialising it."""
        if self.use_cpu or strtobool(os.environ.get("ACCELERATE_USE_CPU", "false")):
            return "cpu"
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator.type if accelerator else "cpu"

    def to_dict(self) -> dict[str, Any]:
        """Every field as JSON can hold it. Functions become "module:name", the hub token is hidden."""
        own = copy.copy(self)  # super() writes into nested dictionaries
        for name in self._VALID_DICT_FIELDS:
            if isinstance(value := getattr(self, name), dict):
                setattr(own, name, dict(value))
        values = transformers.TrainingArguments.to_dict(own)
        for name in ("eos_token", "pad_token"):  # super() takes them for secrets
            if name in values:
                values[name] = getattr(self, name)
        return {name: _without_functions(value) for name, value in values.items()}


@accepts_old_names
@dataclass
class SFTConfig(TargetArguments, PackingArguments, DataArguments, ModelInitArguments, BaseConfig):
    """Settings of supervised fine-tuning."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*BaseConfig._VALID_DICT_FIELDS, "model_init_kwargs", "dataset_kwargs"]

    learning_rate: float = 2e-5
    """Peak learning rate of the optimizer."""

    loss_type: str | Callable = "nll"
    """Loss of a token: "nll" (negative log-likelihood), "dft" (weighted by the probability, arXiv:2508.05629), or a
    function of log-probabilities (B, T) that returns (B, T), also as "module:function"."""

    label_smoothing_factor: float = 0.0
    """Share of the target's mass that goes to the uniform distribution over the vocabulary; with loss_type="nll"."""

    def __post_init__(self):
        self.loss_type = checks.loss("loss_type", self.loss_type, SUPERVISED_LOSSES)
        self.pad_to_multiple_of = checks.multiple(self.pad_to_multiple_of)
        for name in ("model_init_kwargs", "dataset_kwargs"):
            setattr(self, name, checks.mapping(name, getattr(self, name)))
        checks.data(self)
        checks.step_counts(self)
        checks.packing(self)
        checks.targets(self)
        checks.label_smoothing(self.label_smoothing_factor, self.loss_type)
        checks.at_least("neftune_noise_alpha", self.neftune_noise_alpha, 0)
        checks.offloading(self.activation_offloading, self.device_type)
        super().__post_init__()


def mixed_precision_of(device_type: str) -> str:
    """ "bf16", "fp16" or "no": what a device of this type trains in when nothing is said."""
    if device_type == "cpu":
        return "no"
    if device_type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device_type == "mps":
        return "no"
    return "bf16" if transformers.utils.is_torch_bf16_gpu_available() else "fp16"


def _without_functions(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_functions(part) for part in value]
    return function_name(value) if callable(value) else value


def function_name(function: Callable) -> str:
    """ "module:name" of a function, which `loss_type` and the command line read back."""
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def config_for(config_class: type, args: Any, model: Any, suffix: str) -> Any:
    """The config a trainer runs with, from what its caller gave as `args`.

    None: the defaults, writing to "<model's name>-<suffix>". A dict: these fields over those defaults. A plain
    `TrainingArguments`: its values in a `config_class`. A `config_class`: itself.

    Raises ValueError for anything else, and for precisions that the device this process trains on cannot do.
    """
    config = _as_config(config_class, args, model, suffix)
    checks.fp16_device(config.fp16, config.device_type)
    if config.device_type == "cpu":
        config.dataloader_pin_memory = False  # there is no device to copy to, and torch warns
    return config


def _as_config(config_class: type, args: Any, model: Any, suffix: str) -> Any:
    if isinstance(args, config_class):
        return args
    if isinstance(args, transformers.TrainingArguments):
        return config_class(**_plain_values(args))
    if args is None or isinstance(args, dict):
        return config_class(**{"output_dir": default_output_dir(model, suffix)} | (args or {}))
    raise ValueError(
        f"args is a {type(args).__name__}, which has no training settings; pass a {config_class.__name__} or nothing."
    )


def default_output_dir(model: Any, suffix: str) -> str:
    """ "<last part of the model's name>-<suffix>", in the working directory."""
    name = model if isinstance(model, str) else model.config._name_or_path
    return f"{os.path.basename(name.rstrip('/')) or 'model'}-{suffix}"


def _plain_values(args: transformers.TrainingArguments) -> dict[str, Any]:
    values = {field.name: getattr(args, field.name) for field in fields(transformers.TrainingArguments) if field.init}
    if values["remove_unused_columns"]:  # transformers' own default, which says nothing of what a method's rows need
        del values["remove_unused_columns"]
    return values
