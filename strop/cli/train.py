"""`strop sft` and its siblings: options to a trained model on disk."""

import importlib
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.cli import launch
from strop.cli.args import Options, dump
from strop.cli.arguments import CommandArguments, LaunchArguments, ScriptArguments
from strop.cli.yaml_config import Setting, apply_environment, read_config

ALIASES = {"model": "model_name_or_path", "data": "dataset_name", "dataset": "dataset_name"}


@dataclass(frozen=True)
class Method:
    """A training command: where its trainer and config are, and what its default output folder ends in."""

    trainer: str
    config: str
    suffix: str
    module: str


METHODS = {
    "sft": Method(
        trainer="strop.trainer.sft:SFTTrainer",
        config="strop.trainer.config:SFTConfig",
        suffix="SFT",
        module="strop.scripts.sft",
    ),
}


def main(name: str, argv: Sequence[str]) -> int:
    """Run the training command `name`; the exit code."""
    prog = f"strop {name}"
    try:
        return run(prog, METHODS[name], list(argv))
    except (ValueError, FloatingPointError) as error:
        if not is_explained(error):
            raise
        if launch.is_main_process():
            print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted; continue with --resume_from_checkpoint true", file=sys.stderr)
        return 130


def is_explained(error: Exception) -> bool:
    """Whether strop raised `error` itself, so that its text says all and a traceback would only hide it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    own = Path(__file__).parents[1]
    return traceback is not None and own in Path(traceback.tb_frame.f_code.co_filename).parents


def run(prog: str, method: Method, argv: list[str]) -> int:
    """Read the options, then print them, launch, or train."""
    command_options = Options(prog, [CommandArguments])
    own, words = command_options.split(argv)
    asks_help = bool({"-h", "--help"} & set(own))
    command = command_options.read([word for word in own if word not in ("-h", "--help")])
    config = command["config"].value if "config" in command else None
    file = apply_environment(read_config(config)) if config else {}
    options = all_options(prog, method)  # after the environment is set, as this imports torch
    if asks_help:
        options.parser.print_help()
        return 0
    settings = options.read(argv, file)
    what, launching, *instances = options.build(settings)
    if what.dump_config:
        print(dump(instances, settings))
        return 0
    wanted = {name: value for name, value in vars(launching).items() if value is not None}
    if wanted and not launch.is_launched():
        words = [*without_launch(words), *(["--config", config] if config else [])]
        return start(method, wanted, words, instances[-1].use_cpu, what.dry_run)
    refuse_second_launch(wanted, settings)
    return describe(prog, *instances) if what.dry_run else train(method, settings, *instances)


def all_options(prog: str, method: Method) -> Options:
    """Every option of a training command."""
    from strop.data.mixture import DatasetMixtureConfig
    from strop.models.model_config import ModelConfig

    classes = [CommandArguments, LaunchArguments, ScriptArguments, DatasetMixtureConfig, ModelConfig]
    usage = f"{prog} --model_name_or_path MODEL --dataset_name DATA [--config FILE] [options]"
    return Options(prog, [*classes, imported(method.config)], usage, ALIASES)


def imported(path: str) -> Any:
    """The object that "module:name" names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def without_launch(words: list[str]) -> list[str]:
    """The words of a command line that say nothing about its launch."""
    return Options("strop", [LaunchArguments]).split(words)[1]


def start(method: Method, wanted: dict[str, Any], words: list[str], use_cpu: bool, only_print: bool) -> int:
    """Become `accelerate launch` of the same command."""
    command = launch.launch_command(method.module, wanted, words, use_cpu)
    if only_print:
        print(shlex.join(command))
    else:
        launch.replace_process(command)
    return 0


def refuse_second_launch(wanted: dict[str, Any], settings: Mapping[str, Setting]) -> None:
    """Options of a launch on the command line of a process that is launched already would do nothing."""
    for name in wanted:
        if settings[name].origin == "command line":
            raise ValueError(f"{name}={wanted[name]!r} has no effect here: this process has been launched already.")


def describe(prog: str, script: Any, mixture: Any, model_args: Any, args: Any) -> int:
    """Print what would be trained on what."""
    data = [dataset.path for dataset in mixture.datasets] or script.dataset_name
    adapter = f"LoRA adapter of rank {model_args.lora_r}" if model_args.use_peft else "all weights"
    print(f"{prog} would train {adapter} of {model_args.model_name_or_path} on {data} in this process,")
    print(f"on {args.device_type} (bf16={args.bf16}, fp16={args.fp16}), writing to {args.output_dir}.")
    return 0


def train(
    method: Method, settings: Mapping[str, Setting], script: Any, mixture: Any, model_args: Any, args: Any
) -> int:
    """Train, save, and say where."""
    from strop.models.model_config import get_peft_config, get_quantization_config, init_kwargs
    from strop.runs.record import recorded
    from strop.trainer.config import default_output_dir

    show_logs()
    if not model_args.model_name_or_path:
        raise ValueError("there is no model to train; name one with --model_name_or_path (a hub id or a folder).")
    if "output_dir" not in settings:
        args.output_dir = default_output_dir(model_args.model_name_or_path, method.suffix)
    train_dataset, eval_dataset = data_sets(script, mixture, args)
    args.model_init_kwargs = init_kwargs(model_args, args.model_init_kwargs)
    trainer = imported(method.trainer)(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    if script.ignore_bias_buffers:
        ignore_bias_buffers(trainer.model)
    with recorded(trainer):
        trainer.train(resume_from_checkpoint=checkpoint_to_resume(args.resume_from_checkpoint))
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    if trainer.is_world_process_zero():
        print(f"saved to {args.output_dir}; talk to it with: strop chat {shlex.quote(args.output_dir)}")
    return 0


def data_sets(script: Any, mixture: Any, args: Any) -> tuple[Any, Any]:
    """Rows to train on, and rows to evaluate on or None where no evaluation is asked for."""
    evaluates = args.do_eval or str(args.eval_strategy.value) != "no"
    if mixture.datasets and script.dataset_name:
        raise ValueError(
            f"dataset_name={script.dataset_name!r} and a mixture of {len(mixture.datasets)} datasets are both given; "
            "keep one of them."
        )
    if mixture.datasets:
        return mixed(mixture, evaluates)
    if not script.dataset_name:
        raise ValueError(
            "there are no rows to train on; name them with --dataset_name (a hub id, a folder or a file), or list "
            "`datasets:` in the config file."
        )
    splits = [script.dataset_train_split, *([script.dataset_test_split] if evaluates else [])]
    rows = [load_rows(script.dataset_name, script.dataset_config, split, script.dataset_streaming) for split in splits]
    return rows[0], rows[1] if evaluates else None


def mixed(mixture: Any, evaluates: bool) -> tuple[Any, Any]:
    """The rows of a mixture, and those it keeps for evaluation."""
    from strop.data.mixture import get_dataset

    splits = get_dataset(mixture)
    if evaluates and "test" not in splits:
        raise ValueError(
            "evaluation is asked for, but the mixture keeps no rows for it; set test_split_size, e.g. 0.05, or "
            "eval_strategy=no."
        )
    return splits["train"], splits["test"] if evaluates else None


def checkpoint_to_resume(value: str | bool | None) -> str | bool | None:
    """`--resume_from_checkpoint` as `trainer.train` takes it: a path, True for the last checkpoint, None for none."""
    words = {"true": True, "false": None, "": None}
    return words.get(value.lower(), value) if isinstance(value, str) else value or None


def ignore_bias_buffers(model: Any) -> None:
    """Have distributed data parallel leave out buffers of type bool."""
    import torch

    ignored = [name for name, buffer in model.named_buffers() if buffer.dtype == torch.bool]
    model._ddp_params_and_buffers_to_ignore = ignored


def show_logs() -> None:
    """What the package logs goes to stderr, from the main process."""
    logger = logging.getLogger("strop")
    if launch.is_main_process() and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
