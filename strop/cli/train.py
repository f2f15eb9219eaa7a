"""`strop sft` and its siblings: options to a trained model on disk."""

import importlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from strop.cli import launch
from strop.cli.args import Options, dump
from strop.cli.arguments import (
    CommandArguments,
    JudgeArguments,
    LaunchArguments,
    ReferenceModelArguments,
    RewardFunctionArguments,
    ScriptArguments,
    ValueModelArguments,
)
from strop.cli.yaml_config import Setting, apply_environment, read_config
from strop.compat import suggestion

ALIASES = {"model": "model_name_or_path", "data": "dataset_name", "dataset": "dataset_name"}


@dataclass(frozen=True)
class Method:
    """A training command: where its trainer and config are, and what its default output folder ends in."""

    trainer: str
    config: str
    suffix: str
    module: str
    own: tuple[type, ...] = ()
    """Options of its own. Each class has `trainer_arguments()`: what they are to the trainer's constructor."""
    rows: str = "strop.data.preference:PAIRS"
    """Where the format of its rows is, or what tells it from config and rows; there is none for "texts", "steps" and
    "prompts"."""
    task: str = "CAUSAL_LM"
    """What the model does, in peft's words."""


def _method(name: str, suffix: str, place: str, *own: type, **more: str) -> Method:
    """The command `name` of <suffix>Trainer and <suffix>Config, which are in the module `place`."""
    return Method(f"{place}:{suffix}Trainer", f"{place}:{suffix}Config", suffix, f"strop.scripts.{name}", own, **more)


_SFT = ("strop.trainer.sft:SFTTrainer", "strop.trainer.config:SFTConfig", "SFT", "strop.scripts.sft")
_ONLINE = (ReferenceModelArguments, JudgeArguments)
_PPO = (ReferenceModelArguments, ValueModelArguments, RewardFunctionArguments)
_KTO_ROWS, _BCO_ROWS = "strop.data.preference:LABELLED_MISMATCHED", "strop.data.preference:LABELLED"

METHODS = {
    "sft": Method(*_SFT, rows="texts"),
    "dpo": _method("dpo", "DPO", "strop.trainer.dpo", ReferenceModelArguments),
    "kto": _method("kto", "KTO", "strop.trainer.kto", ReferenceModelArguments, rows=_KTO_ROWS),
    "bco": _method("bco", "BCO", "strop.trainer.bco", ReferenceModelArguments, rows=_BCO_ROWS),
    "cpo": _method("cpo", "CPO", "strop.trainer.cpo"),
    "simpo": _method("simpo", "SimPO", "strop.trainer.cpo"),
    "orpo": _method("orpo", "ORPO", "strop.trainer.orpo"),
    "tpo": _method("tpo", "TPO", "strop.trainer.tpo", rows="strop.data.preference:TRIPLES"),
    "grpo": _method("grpo", "GRPO", "strop.trainer.grpo", RewardFunctionArguments, rows="prompts"),
    "ppo": _method("ppo", "PPO", "strop.trainer.ppo", *_PPO, rows="prompts"),
    "online_dpo": _method("online_dpo", "OnlineDPO", "strop.trainer.online_dpo", *_ONLINE, rows="prompts"),
    "nash_md": _method("nash_md", "NashMD", "strop.trainer.nash_md", *_ONLINE, rows="prompts"),
    "xpo": _method("xpo", "XPO", "strop.trainer.xpo", *_ONLINE, rows="prompts"),
    "rloo": _method("rloo", "RLOO", "strop.trainer.rloo", RewardFunctionArguments, rows="prompts"),
    "reward": _method(
        "reward", "Reward", "strop.trainer.reward", rows="strop.trainer.reward:format_of", task="SEQ_CLS"
    ),
    "prm": _method("prm", "PRM", "strop.trainer.prm", rows="steps", task="TOKEN_CLS"),
}


def method_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The training command whose options `argv` has, which its first word names ("sft" if it is an option already),
    and the other words. Raises ValueError for a first word that names none."""
    first, *rest = argv or [""]
    if not first or first.startswith("-"):
        return "sft", list(argv)
    if first not in METHODS:
        raise ValueError(f"there is no training command {first!r}.{suggestion(first, METHODS)}")
    return first, rest


def main(name: str, argv: Sequence[str]) -> int:
    """Run the training command `name`; the exit code."""
    prog = f"strop {name}"
    launch.end_with_parent()
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
    what, wanted = options.instance(CommandArguments, settings), launch_wanted(options, settings)
    if wanted and not launch.is_launched() and not what.dump_config:
        words = [*without_launch(words), *(["--config", config] if config else [])]
        words = launch.launch_words(method.module, wanted, words, "use_cpu" in settings and settings["use_cpu"].value)
        return show_launch(words) if what.dry_run else launch.start(words)
    instances = options.build(settings)[2:]
    _, _, model_args, *_, args = instances
    if "output_dir" not in settings:
        args.output_dir = output_dir(model_args.model_name_or_path or "model", method.suffix)
    if what.dump_config:
        print(dump(instances, settings))
        return 0
    check(settings, *instances)
    return describe(prog, *instances) if what.dry_run else train(method, *instances)


def launch_wanted(options: Options, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Options of a launch that were said. On the command line of a process that is launched already they do nothing."""
    launching = vars(options.instance(LaunchArguments, settings))
    wanted = {name: value for name, value in launching.items() if value is not None}
    for name in wanted:
        if launch.is_launched() and settings[name].origin == "command line":
            raise ValueError(f"{name}={wanted[name]!r} has no effect here: this process has been launched already.")
    return wanted


def show_launch(words: list[str]) -> int:
    print(shlex.join(["accelerate", "launch", *words]))
    return 0


def check(settings: Mapping[str, Setting], script: Any, mixture: Any, model_args: Any, *more: Any) -> None:
    """Refuse, before anything is loaded, a command without model or rows, or with rows that nobody reads."""
    *own, args = more
    if not model_args.model_name_or_path:
        raise ValueError("there is no model to train; name one with --model_name_or_path (a hub id or a folder).")
    if mixture.datasets and script.dataset_name:
        raise ValueError(
            f"dataset_name={script.dataset_name!r} and a mixture of {len(mixture.datasets)} datasets are both given; "
            "keep one of them."
        )
    if not mixture.datasets and not script.dataset_name:
        raise ValueError(
            "there are no rows to train on; name them with --dataset_name (a hub id, a folder or a file), or list "
            "`datasets:` in the config file."
        )
    for part in own:
        if isinstance(part, RewardFunctionArguments):
            part.check(getattr(args, "reward_model_path", None))
    if "dataset_test_split" in settings and not evaluates(args):
        raise ValueError(
            f"dataset_test_split={script.dataset_test_split!r} has no effect without evaluation; set "
            "eval_strategy, e.g. --eval_strategy epoch, or remove it."
        )
    if mixture.datasets and evaluates(args) and mixture.test_split_size is None:
        raise ValueError(
            f"eval_strategy={args.eval_strategy.value!r}, but the mixture keeps no rows for evaluation; set "
            "test_split_size, e.g. 0.05."
        )


def evaluates(args: Any) -> bool:
    """Whether the run asks for evaluation."""
    return args.do_eval or args.eval_strategy != "no"


def all_options(prog: str, method: Method) -> Options:
    """Every option of a training command."""
    from strop.data.mixture import DatasetMixtureConfig
    from strop.models.model_config import ModelConfig

    classes = [CommandArguments, LaunchArguments, ScriptArguments, DatasetMixtureConfig, ModelConfig]
    classes += [*method.own, imported(method.config)]
    usage = f"{prog} --model_name_or_path MODEL --dataset_name DATA [--config FILE] [options]"
    return Options(prog, classes, usage, ALIASES | short_names(classes))


def short_names(classes: Sequence[type]) -> dict[str, str]:
    """ "reward_model" for reward_model_name_or_path, and the like."""
    names = [field.name for cls in classes for field in fields(cls)]
    return {match[1]: name for name in names if (match := re.fullmatch(r"(\w+_model)(?:_name_or)?_path", name))}


def imported(path: str) -> Any:
    """The object that "module:name" names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def format_of(method: Method, args: Any, rows: Any = None) -> Any:
    """The format of the rows that the method reads with these settings; None for texts, steps and prompts."""
    if ":" not in method.rows:
        return None
    found = imported(method.rows)
    return found(args, rows) if callable(found) else found


def output_dir(model: str, suffix: str) -> str:
    """Where a run goes that doesn't say; as in Python without a config."""
    from strop.trainer.config import default_output_dir

    return default_output_dir(model, suffix)


def without_launch(words: list[str]) -> list[str]:
    """The words of a command line that say nothing about its launch."""
    return Options("strop", [LaunchArguments]).split(words)[1]


def describe(prog: str, script: Any, mixture: Any, model_args: Any, *more: Any) -> int:
    """Print what would be trained on what."""
    args = more[-1]
    data = [dataset.path for dataset in mixture.datasets] or script.dataset_name
    adapter = f"LoRA adapter of rank {model_args.lora_r}" if model_args.use_peft else "all weights"
    print(f"{prog} would train {adapter} of {model_args.model_name_or_path} on {data} in this process,")
    print(f"on {args.device_type} (bf16={args.bf16}, fp16={args.fp16}), writing to {args.output_dir}.")
    return 0


def train(method: Method, script: Any, mixture: Any, model_args: Any, *more: Any) -> int:
    """Train, save, and say where."""
    from strop.models.model_config import get_peft_config, get_quantization_config, init_kwargs

    *own, args = more
    show_logs()
    train_dataset, eval_dataset = rows(script, mixture, evaluates(args))
    args.model_init_kwargs = init_kwargs(model_args, args.model_init_kwargs)
    trainer = imported(method.trainer)(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
        **{name: value for part in own for name, value in part.trainer_arguments().items()},
    )
    if script.ignore_bias_buffers:
        ignore_bool_buffers(trainer.model)
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(args.resume_from_checkpoint))
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    if trainer.is_world_process_zero():
        use = "talk to it with: strop chat" if method.task == "CAUSAL_LM" else "score answers with: strop score"
        print(f"saved to {args.output_dir}; {use} {shlex.quote(args.output_dir)}")
    trainer.accelerator.end_training()
    return 0


def rows(script: Any, mixture: Any, with_test: bool) -> tuple[Any, Any]:
    """Rows to train on, and rows to evaluate on or None."""
    from strop.data.mixture import get_dataset
    from strop.data.sources import as_conversations, load_rows, renamed

    loaded: list[Any]
    if mixture.datasets:
        splits = get_dataset(mixture)
        loaded = [splits["train"], *([splits["test"]] if with_test else [])]
    else:
        names = [script.dataset_train_split, *([script.dataset_test_split] if with_test else [])]
        loaded = [
            load_rows(script.dataset_name, name, script.dataset_config, script.dataset_streaming) for name in names
        ]
    name = script.dataset_name or "the mixture"
    if script.dataset_columns:
        loaded = [renamed(part, script.dataset_columns, name) for part in loaded]
    if script.dataset_as_chat:
        loaded = [as_conversations(part, name) for part in loaded]
    return loaded[0], loaded[1] if with_test else None


def checkpoint_to_resume(value: str | bool | None) -> str | bool | None:
    """`--resume_from_checkpoint` as `trainer.train` takes it: a path, True for the last checkpoint, None for none."""
    words = {"true": True, "false": None, "": None}
    return words.get(value.lower(), value) if isinstance(value, str) else value or None


def ignore_bool_buffers(model: Any) -> None:
    """Have distributed data parallel leave out buffers of type bool."""
    import torch

    ignored = [name for name, buffer in model.named_buffers() if buffer.dtype == torch.bool]
    model._ddp_params_and_buffers_to_ignore = ignored


def show_logs() -> None:
    """What the package logs goes to stderr, from the main process."""
    from strop.callbacks import log

    if launch.is_main_process():
        log.show_logs()
