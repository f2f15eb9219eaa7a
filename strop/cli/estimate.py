"""`strop estimate`: the memory a run will take, from the options of `strop sft` and the model's configuration alone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop.cli.args import Options
from strop.cli.inspect import config_file
from strop.cli.train import METHODS, all_options

PROG = "strop estimate"


@dataclass
class EstimateArguments:
    """What is counted beside training itself, and how it is printed."""

    reference: bool = False
    """Count a frozen copy of the model, as preference and on-policy methods keep one."""

    cached_tokens: int = 0
    """Tokens generated at a time, prompts included, over all sequences: their keys and values are counted."""

    json: bool = False
    """Print bytes as JSON."""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    own = Options(PROG, [EstimateArguments], f"{PROG} [--json] [options of strop sft]")
    counted, words = own.split(argv)
    options = all_options(PROG, METHODS["sft"])
    if {"-h", "--help"} & set(counted):
        own.parser.print_help()
        print("\nand the run:\n")
        options.parser.print_help()
        return 0
    (what,) = own.build(own.read(counted))
    *_, model_args, args = options.build(options.read(words, config_file(words)))
    found = estimate_run(what, model_args, args)
    print(json.dumps(found.parts | {"total": found.total}) if what.json else describe(found, model_args, args))
    return 0


def estimate_run(what: EstimateArguments, model_args: Any, args: Any) -> Any:
    """The estimate of a run with these options. Raises ValueError where model or row length are missing."""
    import torch

    from strop.models.load import loading_options, read_config
    from strop.models.model_config import get_peft_config, init_kwargs
    from strop.runs.estimate import estimate

    if not model_args.model_name_or_path:
        raise ValueError("there is no model to estimate; name one with --model_name_or_path (a hub id or a folder).")
    if args.max_length is None:
        raise ValueError("max_length is None, so rows have no longest length to estimate with; set --max_length.")
    args.model_init_kwargs = init_kwargs(model_args, args.model_init_kwargs)
    path, kwargs = loading_options(model_args.model_name_or_path, args, None)
    config = read_config(path, kwargs)
    wanted, saved = kwargs["dtype"], config.dtype
    dtype = wanted if isinstance(wanted, torch.dtype) else saved if isinstance(saved, torch.dtype) else torch.float32
    return estimate(
        config,
        batch_size=args.per_device_train_batch_size,
        length=args.max_length,
        dtype=dtype,
        autocast=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
        optim=getattr(args.optim, "value", args.optim),
        peft_config=get_peft_config(model_args),
        weight_bits=4 if model_args.load_in_4bit else 8 if model_args.load_in_8bit else None,
        checkpointing=bool(args.gradient_checkpointing),
        device=args.device.type,
        reference=what.reference,
        cached_tokens=what.cached_tokens,
    )


def describe(found: Any, model_args: Any, args: Any) -> str:
    """The table, under a line that says of what."""
    rows = f"{args.per_device_train_batch_size} rows of {args.max_length} tokens"
    adapter = "a LoRA adapter on" if model_args.use_peft else "all weights of"
    return (
        f"training {adapter} {model_args.model_name_or_path} on {rows}, one device ({args.device.type}):\n\n{found}\n\n"
        "without the framework itself, workspaces and fragmentation; sharding over devices is not taken into account"
    )
