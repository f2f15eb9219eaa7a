"""`strop estimate`: the memory a run will take, from the options of its command and the model's configuration alone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop.cli.args import Options
from strop.cli.arguments import ReferenceModelArguments
from strop.cli.inspect import config_file
from strop.cli.train import METHODS, Method, all_options, format_of, method_of

PROG = "strop estimate"


@dataclass
class EstimateArguments:
    """What is counted beside training itself, and how it is printed."""

    reference: bool = False
    """Count a frozen copy of the model, also for a method that keeps none. Those that do need not be told."""

    cached_tokens: int = 0
    """Tokens generated at a time, prompts included, over all sequences: their keys and values are counted. Methods that
    train on rollouts need not be told."""

    json: bool = False
    """Print bytes as JSON."""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    own = Options(PROG, [EstimateArguments], f"{PROG} [METHOD] [--json] [options of strop METHOD, sft if not said]")
    name, words = method_of(argv)
    method = METHODS[name]
    counted, words = own.split(words)
    options = all_options(PROG, method)
    if {"-h", "--help"} & set(counted):
        own.parser.print_help()
        print("\nand the run:\n")
        options.parser.print_help()
        return 0
    (what,) = own.build(own.read(counted))
    _, _, _, _, model_args, *more, args = options.build(options.read(words, config_file(words)))
    found = estimate_run(what, method, model_args, args, *more)
    print(json.dumps(found.parts | {"total": found.total}) if what.json else describe(found, method, model_args, args))
    return 0


def estimate_run(what: EstimateArguments, method: Method, model_args: Any, args: Any, *more: Any) -> Any:
    """The estimate of a run with these options. Raises ValueError where model or row length are missing."""
    from strop.models.model_config import get_peft_config
    from strop.runs.estimate import estimate, estimate_rollouts

    if not model_args.model_name_or_path:
        raise ValueError("there is no model to estimate; name one with --model_name_or_path (a hub id or a folder).")
    refuse_what_has_no_size(what, method, args)
    config, dtype = shape_of(model_args.model_name_or_path, model_args, args)
    named = next((part.ref_model_name_or_path for part in more if isinstance(part, ReferenceModelArguments)), None)
    reference = shape_of(named, model_args, args)[0] if named else config if keeps_copy(what, method, args) else None
    common = {
        "dtype": dtype,
        "autocast": torch_dtype(args),
        "optim": getattr(args.optim, "value", args.optim),
        "peft_config": get_peft_config(model_args),
        "weight_bits": 4 if model_args.load_in_4bit else 8 if model_args.load_in_8bit else None,
        "checkpointing": bool(args.gradient_checkpointing),
        "device": args.device.type,
        "reference": reference if named or not model_args.use_peft else None,
    }
    if method.rows == "prompts":
        return estimate_rollouts(config, sizes_of(args), **common)
    size = {"batch_size": rows_per_batch(method, args), "length": args.max_length}
    return estimate(config, **size, **common, cached_tokens=what.cached_tokens, task=method.task)


def refuse_what_has_no_size(what: EstimateArguments, method: Method, args: Any) -> None:
    """Raises ValueError where rows have no longest length, and for methods that keep more than is counted."""
    if method.rows != "prompts":
        if args.max_length is None:
            raise ValueError("max_length is None, so rows have no longest length to estimate with; set --max_length.")
        return
    if ReferenceModelArguments in method.own:
        raise ValueError(
            "of methods on rollouts only the memory of grpo and rloo can be estimated; try a run with --max_steps 2."
        )
    if what.cached_tokens:
        raise ValueError(
            f"cached_tokens={what.cached_tokens} would have no effect: what is generated at a time follows from the "
            "run's own options."
        )
    if args.max_prompt_length is None:
        raise ValueError(
            "max_prompt_length is None, so prompts have no longest length to estimate with; set --max_prompt_length."
        )


def sizes_of(args: Any) -> Any:
    """What one device of a run on rollouts writes and trains at a time."""
    from strop.runs.estimate import RolloutSizes

    return RolloutSizes(
        rows=args.per_device_train_batch_size * args.steps_per_generation,
        batch_size=args.per_device_train_batch_size,
        group=args.num_generations,
        prompt=args.max_prompt_length,
        completion=args.max_completion_length,
        shares_prompts=args.layout != "padded",
    )


def keeps_copy(what: EstimateArguments, method: Method, args: Any) -> bool:
    """Whether a frozen copy of the model stands beside it."""
    if method.rows == "prompts":
        return what.reference or bool(args.beta)
    has_reference = ReferenceModelArguments in method.own and not getattr(args, "precompute_ref_log_probs", False)
    return what.reference or has_reference


def rows_per_batch(method: Method, args: Any) -> int:
    """Rows of max_length that a micro-batch has at most: one for each completion of an example."""
    wanted = format_of(method, args)
    return args.per_device_train_batch_size * (len(wanted.sides) if wanted else 1)


def shape_of(name: str, model_args: Any, args: Any) -> tuple[Any, Any]:
    """The model's configuration, and the dtype it would be loaded in. Raises ValueError for an adapter."""
    import torch

    from strop.models.adapters import is_adapter
    from strop.models.load import loading_options, read_config
    from strop.models.model_config import init_kwargs

    if is_adapter(name, {}):
        raise ValueError(
            f"{name} is an adapter, which has no shape of its own; name the model that it goes on, with --use_peft and "
            "the adapter's options."
        )
    args.model_init_kwargs = init_kwargs(model_args, args.model_init_kwargs)
    path, kwargs = loading_options(name, args, None)
    config = read_config(path, kwargs)
    wanted, saved = kwargs["dtype"], config.dtype
    dtype = wanted if isinstance(wanted, torch.dtype) else saved if isinstance(saved, torch.dtype) else torch.float32
    return config, dtype


def torch_dtype(args: Any) -> Any:
    """The dtype of computation where it is not that of the weights."""
    import torch

    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def describe(found: Any, method: Method, model_args: Any, args: Any) -> str:
    """The table, under a line that says of what."""
    rows = f"{rows_per_batch(method, args)} rows of {getattr(args, 'max_length', None)} tokens"
    if method.rows == "prompts":
        sizes = sizes_of(args)
        rows = (
            f"{sizes.batch_size} of {sizes.rows} completions of {sizes.completion} tokens, {sizes.group} to a prompt "
            f"of {sizes.prompt}"
        )
    adapter = "a LoRA adapter on" if model_args.use_peft else "all weights of"
    return (
        f"training {adapter} {model_args.model_name_or_path} on {rows}, one device ({args.device.type}):\n\n{found}\n\n"
        "without the framework itself, workspaces and fragmentation; sharding over devices is not taken into account"
    )
