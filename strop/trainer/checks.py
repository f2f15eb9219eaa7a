"""What a config refuses, one function a subject; each error shows the value, the reason and the remedy."""

import importlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from strop.compat import suggestion

TRAINING_ENUMS = {
    "eval_strategy": IntervalStrategy,
    "logging_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
}
SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length", "batch_rebalance")


def one_of(name: str, value: Any, known: Iterable[str]) -> None:
    """Refuse a `value` (or enum member) that is not among the `known` ones."""
    known = list(known)
    plain = getattr(value, "value", value)
    if plain not in known:
        shown = ", ".join(known) if len(known) <= 12 else f"{', '.join(known[:6])}... ({len(known)} in all)"
        raise ValueError(f"{name}={plain!r} is unknown; choose one of {shown}.{suggestion(plain, known)}")


def at_least(name: str, value: float | list[float] | None, least: float) -> None:
    """Refuse a number below `least`, alone or in a list; None means not set."""
    several = value if isinstance(value, list | tuple) else [value]
    if any(one is not None and not one >= least for one in several):
        raise ValueError(f"{name}={value!r} is out of range; it must be at least {least}.")


def positive(name: str, value: float | list[float]) -> None:
    """Refuse a number that isn't above 0, alone or in a list."""
    if not all(one > 0 for one in (value if isinstance(value, list | tuple) else [value])):
        raise ValueError(f"{name}={value!r} is out of range; it must be positive.")


def within(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside [low, high)."""
    if not low <= value < high:
        raise ValueError(f"{name}={value!r} is out of range; it must be at least {low} and below {high}.")


def same(new: str, new_value: Any, old: str, old_value: Any) -> Any:
    """The value of an option that has two names, None if neither is given."""
    if new_value is not None and old_value is not None and new_value != old_value:
        raise ValueError(
            f"{new}={new_value!r} and {old}={old_value!r} contradict each other: they are two names of one option. "
            f"Give only one of them (with dataclasses.replace, set both)."
        )
    return old_value if new_value is None else new_value


def mapping(name: str, value: dict | str | None) -> dict[str, Any] | None:
    """A dict given as such or as JSON text; an empty one for "{}"."""
    if value is None or isinstance(value, dict):
        return value
    try:
        parsed = json.loads(value)
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f'{name}={value!r} is not JSON ({error}); write it as \'{{"key": "value"}}\'.') from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{name}={value!r} is a JSON {type(parsed).__name__}; it must be an object: '{{\"key\": 1}}'.")
    return parsed


def multiple(value: int | str | None) -> int | None:
    """pad_to_multiple_of as a number; None for "auto" and "none"."""
    if isinstance(value, str) and value.lower() in ("auto", "none", "null"):
        return None
    if isinstance(value, str) and not value.isdecimal():
        raise ValueError(f'pad_to_multiple_of={value!r} is neither a number nor "auto" nor "none".')
    value = None if value is None else int(value)
    at_least("pad_to_multiple_of", value, 1)
    return value


def loss(name: str, value: str | Callable, known: dict[str, Callable]) -> str | Callable:
    """The name of a known loss, or a function given as such or as "module:function"."""
    if callable(value):
        return value
    if isinstance(value, str) and ":" in value:
        return _function(name, value)
    one_of(name, value, known)
    return value


def _function(name: str, path: str) -> Callable:
    module, _, attributes = path.partition(":")
    try:
        found = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name}={path!r} cannot be imported ({error}); a function is named as module:function, defined at the top "
            "level of a module that Python finds, or passed as the function itself."
        ) from None
    if not callable(found):
        raise ValueError(f"{name}={path!r} is a {type(found).__name__}; it must be a function.")
    return found


def label_smoothing(factor: float, loss_type: str | Callable) -> None:
    """Smoothing changes the target of the likelihood loss; other losses have no target to smooth."""
    if factor and loss_type != "nll":
        shown = getattr(loss_type, "__qualname__", loss_type)
        raise ValueError(
            f"label_smoothing_factor={factor} would have no meaning with loss_type={shown!r}, which is no likelihood "
            'of smoothed targets; use loss_type="nll" or label_smoothing_factor=0.'
        )


def data(args: Any) -> None:
    """Lengths, truncation and preparation: the options of `DataArguments`."""
    one_of("truncation_mode", args.truncation_mode, ("keep_start", "keep_end"))
    one_of("overlong", args.overlong, ("truncate", "drop", "split", "error"))
    at_least("max_length", args.max_length, 1)
    at_least("dataset_num_proc", args.dataset_num_proc, 1)
    if args.max_length is None and args.overlong != "truncate":
        raise ValueError(
            f"overlong={args.overlong!r} has no effect with max_length=None, as no row is too long; set max_length."
        )
    if args.truncation_mode == "keep_end" and args.overlong != "truncate":
        raise ValueError(
            f'truncation_mode="keep_end" has no effect with overlong={args.overlong!r}, which truncates nothing; '
            'use overlong="truncate" or leave truncation_mode at "keep_start".'
        )
    for key in args.dataset_kwargs or {}:
        one_of("a key of dataset_kwargs", key, ("skip_prepare_dataset",))
    if (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        no_effect(
            args,
            dict.fromkeys(("dataset_num_proc", "eval_packing", "chat_template_kwargs"))
            | dict.fromkeys(("packing", "assistant_only_loss", "shuffle_dataset"), False)
            | {"overlong": "truncate", "truncation_mode": "keep_start", "dataset_text_field": "text"},
            'dataset_kwargs={"skip_prepare_dataset": true}, which leaves the rows as they are (packed ones say so in '
            "seq_lengths)",
        )
    else:
        no_effect(args, {"length_column_name": "length"}, "rows whose preparation measures their lengths itself")


def preference_data(args: Any) -> None:
    """Lengths, truncation and layout: the options of `PreferenceArguments`."""
    one_of("truncation_mode", args.truncation_mode, ("keep_start", "keep_end"))
    one_of("overlong", args.overlong, ("truncate", "drop", "error"))
    one_of("layout", args.layout, ("auto", "packed", "padded"))
    for name in ("max_length", "max_prompt_length", "max_completion_length", "dataset_num_proc"):
        at_least(name, getattr(args, name), 1)
    if args.max_length is None and args.overlong != "truncate":
        raise ValueError(
            f"overlong={args.overlong!r} has no effect with max_length=None, as no row is too long; set max_length."
        )
    if args.truncation_mode == "keep_end" and (args.overlong != "truncate" or args.max_length is None):
        raise ValueError(
            f'truncation_mode="keep_end" has no effect with overlong={args.overlong!r} and max_length='
            f"{args.max_length}, which truncate nothing; remove it."
        )
    no_effect(args, {"length_column_name": "length"}, "rows whose preparation measures their lengths itself")
    if args.padding_free and args.layout == "padded":
        raise ValueError(
            'padding_free=True and layout="padded" contradict each other; remove one (layout="auto" pads only where '
            "the model needs it)."
        )


def no_effect(args: Any, neutral: dict[str, Any], cause: str) -> None:
    """Refuse fields of `args` that aren't `neutral` though nothing reads them because of `cause`."""
    for name, value in neutral.items():
        given = getattr(args, name)
        if given != value:
            raise ValueError(f"{name}={given!r} would have no effect with {cause}; remove one of the two.")


def no_balancing(args: Any) -> None:
    """Classification models of transformers don't give the load-balancing loss of their experts."""
    if args.router_aux_loss_coef:
        raise ValueError(
            f"router_aux_loss_coef={args.router_aux_loss_coef} would have no effect: transformers' classification "
            "models return no load-balancing loss. Remove it."
        )


def collator(args: Any) -> None:
    """A collator of the user's decides itself what rows look like in a batch."""
    no_effect(
        args,
        {"layout": "auto", "padding_free": False, "pad_to_multiple_of": None},
        "a data_collator of your own, which decides how rows become a batch",
    )


def users_loss(args: Any) -> None:
    """A loss function of the user's takes the place of those that options describe."""
    no_effect(
        args,
        {"loss_type": "nll", "label_smoothing_factor": 0.0, "router_aux_loss_coef": None},
        "a compute_loss_func, which computes the whole loss",
    )


def step_counts(args: Any) -> None:
    """A step is counted over its batches and ranks, by what collators call `labels`."""
    if args.label_names not in (None, [], ["labels"]):
        raise ValueError(
            f"label_names={args.label_names!r} would have no effect: a loss is computed where `labels` are not -100. "
            "Call the column labels, and remove label_names."
        )
    if not args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices=False would have no effect: the loss is the mean over all tokens of a step, "
            "on however many devices. Remove it."
        )


def packing(args: Any) -> None:
    """How rows share a forward pass: the options of `PackingArguments`."""
    one_of("packing_strategy", args.packing_strategy, ("bfd", "bfd_split", "wrapped"))
    one_of("layout", args.layout, ("auto", "packed", "padded"))
    packs = args.packing or bool(args.eval_packing)
    if packs and args.max_length is None:
        raise ValueError("packing needs the length of a packed row, but max_length=None; set max_length, e.g. 2048.")
    if not packs and args.packing_strategy != "bfd":
        raise ValueError(
            f"packing_strategy={args.packing_strategy!r} has no effect with packing=False; set packing=True "
            "or remove it."
        )
    if args.packing and args.overlong == "split" and args.packing_strategy != "bfd_split":
        raise ValueError(
            f'overlong="split" and packing_strategy={args.packing_strategy!r} contradict each other on what becomes of '
            'long rows; packing_strategy="bfd_split" cuts them into several.'
        )
    if args.padding_free and args.layout == "padded":
        raise ValueError(
            'padding_free=True and layout="padded" contradict each other; remove one (layout="auto" pads only where '
            "the model needs it)."
        )
    if args.packing and args.layout == "padded" and args.packing_strategy != "wrapped":
        raise ValueError(
            f"packing=True with packing_strategy={args.packing_strategy!r} keeps rows apart in one stream, which "
            'layout="padded" cannot; use layout="auto" or packing=False.'
        )


def targets(args: Any) -> None:
    """Which tokens are trained: the options of `TargetArguments`."""
    one_of("train_on_turns", args.train_on_turns, ("all", "last", "expand"))
    if args.train_on_turns != "all" and not args.assistant_only_loss:
        raise ValueError(
            f"train_on_turns={args.train_on_turns!r} selects among the assistant's turns, but "
            "assistant_only_loss=False trains on everything; set assistant_only_loss=True or remove train_on_turns."
        )


def offloading(wanted: bool, device_type: str) -> None:
    """Activations can only be moved to host memory from somewhere else."""
    if wanted and device_type == "cpu":
        raise ValueError(
            "activation_offloading=True moves activations from an accelerator to host memory, but this run is on a "
            "CPU; remove it (activation_checkpointing=True saves memory on a CPU too)."
        )


def liger(wanted: bool, config: dict[str, bool] | None, device_type: str) -> None:
    """Liger's kernels are for GPUs, and its fused loss bypasses the one reader of logits."""
    if wanted and device_type == "cpu":
        raise ValueError(
            "use_liger_kernel=True needs a GPU, as its kernels are written in Triton, but this run is on a CPU; "
            "remove it."
        )
    if config and not wanted:
        raise ValueError(f"liger_kernel_config={config!r} has no effect with use_liger_kernel=False; set it to True.")
    if isinstance(config, dict) and config.get("fused_linear_cross_entropy"):
        raise ValueError(
            'liger_kernel_config={"fused_linear_cross_entropy": true} would replace the model\'s output by a loss, but '
            "losses here read log-probabilities (tiled, so that no full logits exist); remove it."
        )


def precision(bf16: bool, fp16: bool, device_type: str, native: str) -> None:
    """Refuse mixed precision that the device cannot do; `native` is what it does by itself ("bf16", "fp16" or "no")."""
    if bf16 and fp16:
        raise ValueError("bf16=True and fp16=True contradict each other; set one of them.")
    if bf16 and device_type not in ("cpu", "mps") and native != "bf16":
        raise ValueError(
            f"bf16=True, but this {device_type} device has no bfloat16; use fp16=True, or bf16=False for float32."
        )


def fp16_device(fp16: bool, device_type: str) -> None:
    """Refuse float16 on a CPU. For trainers: a config may be written on another machine than the one that trains."""
    if fp16 and device_type == "cpu":
        raise ValueError(
            "fp16=True needs a GPU, as float16 with loss scaling does not run on a CPU; remove it for float32, or use "
            "bf16=True where the CPU has bfloat16 instructions (`strop env` tells)."
        )
