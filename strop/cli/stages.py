"""The stages of a pipeline's file: which command each is, with which options, and what is wrong with them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from strop.cli import launch, train
from strop.cli.args import Options
from strop.cli.yaml_config import Setting, read_config, read_value
from strop.compat import suggestion
from strop.runs.pipeline import MODEL_OPTIONS, Stage, linked

OTHERS = {
    "generate": ("rows", ("strop.cli.chat:AnswerArguments", "strop.cli.chat:PromptArguments"), ""),
    "score": ("rows", ("strop.cli.score:ScoreArguments",), ""),
    "eval": ("results", ("strop.cli.eval:EvalArguments",), "strop.cli.eval:ALIASES"),
}
"""Commands that don't train and can be stages: what they make, their options, and other names of these."""
COMMANDS = [*train.METHODS, *OTHERS]
KEYS = ("output_dir", "env", "defaults", "stages")
DECIDED = ("output_dir", "resume_from_checkpoint", "config", "dry_run", "dump_config")
CHECKPOINTS = {"save_steps": 0.1, "save_total_limit": 1}
"""So that there is one to go on from, where the stage's options don't say when to save."""
OVERRIDE = re.compile(r"([\w-]+)\.(\w+)=(.*)", re.DOTALL)

Settings = dict[str, Setting]


@dataclass(frozen=True)
class Pipeline:
    """What a file says. `settings` are those of each stage with the names of stages replaced by what these make."""

    output_dir: Path
    stages: list[Stage]
    uses: Mapping[str, list[str]]
    settings: Mapping[str, Settings]

    def config(self, name: str, resumes: bool) -> dict[str, Any]:
        """What the command of the stage is given as its config file."""
        stage = next(stage for stage in self.stages if stage.name == name)
        values = {key: setting.value for key, setting in self.settings[name].items()}
        if "output_dir" in options_of(stage.command).options:
            values["output_dir"] = str(stage.folder)
        if stage.command in train.METHODS:
            saves = values.keys() & {"save_strategy", "save_steps", "load_best_model_at_end"}
            values = ({} if saves else CHECKPOINTS) | values
            values["resume_from_checkpoint"] = resumes
            if resumes and values.get("save_steps", 1) < 1:  # transformers warns of a share that became a number
                state = Path(str(stage.checkpoint), "trainer_state.json").read_text(encoding="utf-8")
                values["save_steps"] = json.loads(state)["save_steps"]
        return values


def read_pipeline(path: str, words: Sequence[str], output_dir: str | None) -> Pipeline:
    """The pipeline in a file, with `words` STAGE.option=value and an output folder that win over it.

    Raises ValueError for anything that is no option of a stage's command, and for stages that can't come in this order.
    """
    file = read_config(path, {"defaults": 1, "stages": 2})
    for key, setting in file.items():
        if key not in KEYS:
            raise ValueError(f"{setting.origin}: a pipeline has no {key!r}.{suggestion(key, KEYS)}")
    named = sections(file, "stages")
    if not named:
        raise ValueError(f"{path} has no stages; list them under `stages:`, e.g. `sft: {{model: ..., data: ...}}`.")
    said = overrides(words, [*named, "defaults"])
    folder = Path(output_dir or (file["output_dir"].value if "output_dir" in file else Path(path).stem))
    defaults = options_in(file.get("defaults")) | said["defaults"]
    refuse_unknown_defaults(defaults, [command_of(name, setting) for name, setting in named.items()])
    stages: dict[str, Stage] = {}
    settings: dict[str, Settings] = {}
    for name, setting in named.items():
        check_name(name, setting, stages)
        command = command_of(name, setting)
        settings[name] = merged(command, defaults, options_in(setting) | said[name])
        makes = OTHERS[command][0] if command in OTHERS else makes_of(command)
        written = {key: value.value for key, value in settings[name].items()}
        stages[name] = Stage(name, command, makes, folder / name, written)
    return with_links(folder, stages, settings)


def with_links(folder: Path, stages: dict[str, Stage], settings: Mapping[str, Settings]) -> Pipeline:
    """The pipeline, in which stages may use earlier ones."""
    uses: dict[str, list[str]] = {}
    resolved: dict[str, Settings] = {}
    for name, stage in stages.items():
        try:
            values, uses[name] = linked(stage.options, stages, name)
        except ValueError as error:
            raise ValueError(f"stage {name}: {error}") from None
        resolved[name] = {key: Setting(value, settings[name][key].origin) for key, value in values.items()}
    return Pipeline(folder, list(stages.values()), uses, resolved)


def sections(file: Mapping[str, Setting], key: str) -> dict[str, Setting]:
    return options_in(file.get(key))


def options_in(setting: Setting | None) -> dict[str, Setting]:
    """The settings in a section of the file, which may be empty."""
    if setting is None or setting.value is None:
        return {}
    if not isinstance(setting.value, dict):
        raise ValueError(f"{setting.origin}: {setting.value!r} must be a mapping, one `name: value` a line.")
    return setting.value


def overrides(words: Sequence[str], known: Sequence[str]) -> dict[str, Settings]:
    """Section -> settings of the command line. Raises ValueError for a word that is no STAGE.option=value."""
    found: dict[str, Settings] = {name: {} for name in known}
    for word in words:
        match = OVERRIDE.fullmatch(word)
        if not match or match[1] not in found:
            hint = suggestion(match[1], known) if match else ""
            raise ValueError(f"{word!r} changes no option; write STAGE.option=value, the stages are {known}.{hint}")
        found[match[1]][match[2]] = Setting(read_value(match[3]), "command line")
    return found


def check_name(name: str, setting: Setting, stages: Mapping[str, Stage]) -> None:
    if not re.fullmatch(r"\w[\w-]*", name) or name == "defaults":
        raise ValueError(
            f"{setting.origin}: {name!r} can't be a stage's name, which is a folder's too: letters, digits, - and _."
        )
    if name.lower() in [other.lower() for other in stages]:
        raise ValueError(f"{setting.origin}: {name} differs from another stage's name by case only; rename one.")


def command_of(name: str, setting: Setting) -> str:
    """The stage's command: `command`, or its name."""
    said = options_in(setting).get("command", Setting(name, setting.origin))
    if said.value not in COMMANDS:
        remedy = "" if "command" in options_in(setting) else f" Name it: `command: ` one of {', '.join(COMMANDS)}."
        hint = suggestion(said.value, COMMANDS)
        raise ValueError(f"{said.origin}: stage {name} has no command: {said.value!r} is none.{hint}{remedy}")
    return said.value


def makes_of(command: str) -> str:
    return "model" if train.METHODS[command].task == "CAUSAL_LM" else "scorer"


@cache
def options_of(command: str) -> Options:
    """Every option of a command."""
    if command in train.METHODS:
        return train.all_options(f"strop {command}", train.METHODS[command])
    _, classes, aliases = OTHERS[command]
    names = train.imported(aliases) if aliases else {}
    return Options(f"strop {command}", [train.imported(place) for place in classes], aliases=names)


def merged(command: str, defaults: Settings, own: Settings) -> Settings:
    """A stage's settings under their full names: its own, and the defaults that its command knows."""
    options = options_of(command)
    known = {*options.names, *options.old}
    own = {name: setting for name, setting in own.items() if name != "command"}
    env = {"env": own.pop("env")} if "env" in own else {}
    shared = options.read([], {name: setting for name, setting in defaults.items() if name in known})
    found = shared | options.read([], own) | env
    for name in DECIDED:
        if name in found:
            raise ValueError(
                f"{found[name].origin}: {name} is not a stage's to say: its output goes to the pipeline's output_dir, "
                "and it goes on by itself where it was stopped. Remove it."
            )
    return found


def refuse_unknown_defaults(defaults: Settings, commands: Sequence[str]) -> None:
    known = [name for command in dict.fromkeys(commands) for name in (*options_of(command).names,)]
    old = {name for command in commands for name in options_of(command).old}
    for name, setting in defaults.items():
        if name not in known and name not in old:
            raise ValueError(
                f"{setting.origin}: defaults: no stage has an option {name!r}.{suggestion(name, sorted({*known}))}"
            )


def check(pipeline: Pipeline) -> None:
    """Raise ValueError for the first stage that would refuse its options, its rows, or the models that it starts from.

    What another stage is to make is taken for granted.
    """
    for stage in pipeline.stages:
        try:
            check_models(stage, pipeline)
            check_options(stage, pipeline)
        except (ValueError, OSError) as error:
            if isinstance(error, ValueError) and not train.is_explained(error):
                raise
            raise ValueError(f"stage {stage.name}: {error}") from error


def check_models(stage: Stage, pipeline: Pipeline) -> None:
    """Refuse a model that isn't there, and one that writes where one that scores is wanted."""
    from strop.models.load import SCORING, task_of

    names = [other.name for other in pipeline.stages]
    for key, value in stage.options.items():
        if not MODEL_OPTIONS.fullmatch(key) or not isinstance(value, str) or value in names or "${" in value:
            continue
        try:
            task = task_of(value)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{key}={value!r} is neither a stage nor a model that can be read.{suggestion(value, names)} "
                f"{str(error).splitlines()[0]}"
            ) from error
        if key.startswith("reward_model") and task not in SCORING:
            raise ValueError(f"{key}={value!r} is a language model, which scores nothing; train one with `reward`.")


def check_options(stage: Stage, pipeline: Pipeline) -> None:
    """Build what the command builds of its options, and read the rows that are there already."""
    options = options_of(stage.command)
    config = {name: Setting(value, "") for name, value in pipeline.config(stage.name, False).items()}
    config.pop("env", None)
    settings = options.read([], config)
    instances = options.build(settings)
    if stage.command not in train.METHODS:
        read_rows(stage.command, pipeline, instances)
        return
    _, launching, script, mixture, model_args, *more = instances
    train.check(settings, script, mixture, model_args, *more)
    wanted = {name: value for name, value in vars(launching).items() if value is not None}
    launch.launch_words("", wanted, [], more[-1].use_cpu)
    named = [script.dataset_name or "", *(dataset.path for dataset in mixture.datasets)]
    if not any(is_made(pipeline, name) for name in named):
        train.rows(script, mixture, train.evaluates(more[-1]))


def read_rows(command: str, pipeline: Pipeline, instances: Sequence[Any]) -> None:
    """Read and check what a command that doesn't train reads, unless another stage makes it."""
    from strop.cli import eval
    from strop.cli.chat import read_prompts
    from strop.data.sources import load_rows

    args = instances[-1]
    path = args.prompts if command == "generate" else args.data
    if path is not None and is_made(pipeline, path):
        return
    if command == "eval":
        args.metrics = [to_come if is_made(pipeline, name) else name for name in args.metrics]
        eval.check(args)
    elif command == "score":
        load_rows(str(path), "train")
    elif path is not None:
        read_prompts(path)


def to_come(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Stands for a reward model that another stage makes."""
    return [0.0] * len(completions)


def is_made(pipeline: Pipeline, path: str) -> bool:
    """Whether a stage of the pipeline makes what is at `path`."""
    return any(Path(path).is_relative_to(stage.folder) for stage in pipeline.stages)
