"""A pipeline on disk: its stages, what each was made of, and so what is left to do.

    output_dir/pipeline.json     the state: what each stage was made of, whether it is finished, how long it took
    output_dir/STAGE/            what a stage wrote; stage.yaml: its options; stage.log: what it printed
    output_dir/STAGE/STAGE/      the whole model, where it trained an adapter
    output_dir/STAGE.1/          ... before its options or inputs changed: put aside, never deleted
    output_dir/summary.json      every stage in numbers

A stage is made of its command and options as written, of the contents of the files and folders that these name, and of
the outputs of other stages, of which each has a number that changes whenever it is made anew. A finished stage that is
made of what it was made of before is skipped.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from strop.compat import suggestion
from strop.runs.record import METRICS_FILE, RUN_FILE, load_metrics, load_run, replace_text

STATE_FILE, SUMMARY_FILE, LOCK_FILE = "pipeline.json", "summary.json", ".lock"
CONFIG_FILE, LOG_FILE = "stage.yaml", "stage.log"
ROWS_FILE, RESULTS_FILE = "rows.jsonl", "results.json"
MADE = {
    "model": ("config.json", "adapter_config.json"),
    "scorer": ("config.json", "adapter_config.json"),
    "rows": (),
    "results": (RESULTS_FILE,),
}
"""What a stage makes: a model that writes, one that scores, rows, or numbers -> a file of which one is in a folder."""
ROWS_OPTIONS = ("dataset_name", "data", "prompts", "path")
MODEL_OPTIONS = re.compile(r"model|baseline|\w+_model|(\w+_)?model(_name_or)?_path")
REFERENCE = re.compile(r"\$\{([^}]*)\}")
WATCHED = re.compile(
    r"(eval_(\w+_)?)?(loss|reward|rewards/(margins|accuracies)|(mean_token_)?accuracy|margin|kl)"
    r"|objective/(kl|scores|rlhf_reward)"
)
"""Metrics of a training that its line of the summary may show."""
SECONDS_TO_WAIT = 10


@dataclass(frozen=True)
class Stage:
    """One command of a pipeline. `options` are as written, other stages by their names; `makes` is a key of `MADE`."""

    name: str
    command: str
    makes: str
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """What other stages read: a file of rows, a whole model, or else the folder."""
        inside = ROWS_FILE if self.makes == "rows" else self.name if self.is_adapter else ""
        return str(self.folder / inside)

    @property
    def is_adapter(self) -> bool:
        """Whether it trains an adapter, which no other adapter and no head for scores can be put on."""
        return bool(self.options.get("use_peft"))

    @property
    def is_there(self) -> bool:
        place = Path(self.output)
        return place.is_file() or any((place / name).is_file() for name in MADE[self.makes])

    @property
    def checkpoint(self) -> str | None:
        """The last checkpoint, if there is one."""
        return get_last_checkpoint(str(self.folder)) if self.folder.is_dir() else None


@dataclass(frozen=True)
class Step:
    """What is to be done for a stage: "run" from the start, "resume", "skip" as it is finished, or "leave" unlooked at.

    `parts` is what the stage is made of, `number` its run's, which together name the output.
    """

    stage: Stage
    action: str
    reason: str
    parts: Mapping[str, Any]
    number: int


def linked(options: Mapping[str, Any], stages: Mapping[str, Stage], name: str) -> tuple[dict[str, Any], list[str]]:
    """`options` of the stage `name` with stages replaced by what they make, and the names of these.

    A text that is a stage's name stands for its model or rows in options that take these, and `${name}` for its folder
    in any option.
    Raises ValueError for a stage that doesn't come earlier, or makes something else than is asked for.
    """
    used: list[str] = []
    earlier = list(stages)[: list(stages).index(name)]

    def stage(word: str, key: str) -> Stage:
        if word not in stages:
            raise ValueError(f"{key}: there is no stage {word!r} for ${{{word}}}.{suggestion(word, stages)}")
        if word not in earlier:
            place = "is this stage itself" if word == name else "comes later in the file; move it up"
            raise ValueError(f"{key}={word!r} {place}. A stage can use what earlier ones made.")
        used.extend([word] if word not in used else [])
        return stages[word]

    def link(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return {inner: link(item, str(inner)) for inner, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [link(item, key) for item in value]
        if not isinstance(value, str):
            return value
        if value in stages and (wanted := wanted_for(key)):
            found = stage(value, key)
            if found.makes not in wanted:
                raise ValueError(f"{key}={value!r} makes {_NOUNS[found.makes]}, but {key} takes {_NOUNS[wanted[0]]}.")
            return found.output
        return REFERENCE.sub(lambda match: str(stage(match[1], key).folder), value)

    return {key: link(value, key) for key, value in options.items()}, used


_NOUNS = {"model": "a model", "scorer": "a reward model", "rows": "rows", "results": "numbers"}


def wanted_for(key: str) -> tuple[str, ...]:
    """What the option `key` takes of another stage; nothing if a stage's name means nothing there."""
    if key in ROWS_OPTIONS:
        return ("rows",)
    if not MODEL_OPTIONS.fullmatch(key):
        return ()
    return ("scorer",) if key.startswith("reward_model") else ("model", "scorer")


def sources(options: Any, output_dir: Path) -> Iterator[Path]:
    """Files and folders that `options` name, and modules of the working directory that functions are named from.

    A folder with the pipeline's own output in it is none: it would never be the same.
    """
    if isinstance(options, Mapping):
        options = list(options.values())
    if isinstance(options, (list, tuple)):
        for item in options:
            yield from sources(item, output_dir)
    elif isinstance(options, str) and options:
        path = Path(os.path.expanduser(options))
        function = re.fullmatch(r"(\w+(?:\.\w+)*)[.:]\w+(?:\(.*\))?", options, re.DOTALL)
        module = f"{function[1].replace('.', '/')}.py" if function else ""
        if os.path.exists(path):
            if path.resolve() not in [output_dir.resolve(), *output_dir.resolve().parents]:
                yield path
        elif os.path.isfile(module):
            yield Path(module)


class State:
    """`pipeline.json`, which holds the old state or the new one whenever a process is killed."""

    def __init__(self, output_dir: Path):
        self.path = output_dir / STATE_FILE
        content = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}
        self.stages: dict[str, dict[str, Any]] = content.get("stages", {})
        self._digests: dict[str, list[Any]] = content.get("digests", {})

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"stages": self.stages, "digests": self._digests}
        replace_text(self.path, json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n")

    def digest(self, path: Path) -> str:
        """SHA-256 of a file's contents, or of all files of a folder but hidden ones and checkpoints.

        What was read once isn't read again while its size and time of change are the same.
        """
        if path.is_dir():
            inside = sorted(_files(path))
            return _hex("".join(f"{file.relative_to(path)}\0{self.digest(file)}\n" for file in inside).encode())
        about, key = path.stat(), str(path.resolve())
        known = self._digests.get(key)
        if known is None or known[:2] != [about.st_size, about.st_mtime_ns]:
            with path.open("rb") as file:
                known = [about.st_size, about.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest()]
            self._digests[key] = known
        return known[2]

    def begin(self, step: Step) -> None:
        """Make room for the stage, and note that it runs."""
        folder, record = step.stage.folder, self.stages.get(step.stage.name)
        if step.action == "run":
            if folder.exists():
                put_away(step.stage, record)
            record = {"seconds": 0.0}
        elif (
            record and (log := folder / LOG_FILE).is_file() and "began" in record
        ):  # the last attempt's end was not seen
            record["seconds"] += max(0.0, log.stat().st_mtime - record["began"])
        now = {"parts": dict(step.parts), "number": step.number, "is_finished": False, "began": time.time()}
        self.stages[step.stage.name] = (record or {}) | now
        self.save()
        folder.mkdir(parents=True, exist_ok=True)

    def end(self, name: str, is_finished: bool) -> None:
        """Note how a stage ended."""
        record = self.stages[name]
        record["seconds"] += time.time() - record.pop("began")
        record["is_finished"] = is_finished
        self.save()


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "checkpoint-"))]
        yield from (Path(parent, name) for name in names if not name.startswith(".") and Path(parent, name).is_file())


def _hex(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put_away(stage: Stage, record: Mapping[str, Any] | None) -> None:
    """Free the stage's folder: rename it, or delete it if nothing is lost with it."""
    if is_worth_keeping(stage, record):
        stage.folder.rename(aside_of(stage))
    else:
        shutil.rmtree(stage.folder)


def is_worth_keeping(stage: Stage, record: Mapping[str, Any] | None) -> bool:
    """False for the folder of a run of the pipeline's own that stopped before a checkpoint."""
    return record is None or record["is_finished"] or stage.checkpoint is not None


def aside_of(stage: Stage) -> Path:
    """Where the stage's folder would be put: the first free one of STAGE.1, STAGE.2, ..."""
    names = (stage.folder.with_name(f"{stage.name}.{number}") for number in range(1, 1_000_000))
    return next(name for name in names if not name.exists())


def plan(
    stages: Sequence[Stage],
    uses: Mapping[str, Sequence[str]],
    state: State,
    chosen: Collection[str] | None = None,
    forced: Collection[str] = (),
) -> list[Step]:
    """What is to be done, stage by stage; for stages that aren't `chosen`, nothing.

    Raises ValueError where a chosen stage uses one that isn't chosen and isn't finished.
    """
    steps: dict[str, Step] = {}
    output_dir = state.path.parent
    for stage in stages:
        parts: dict[str, Any] = {"command": stage.command, **stage.options}
        for path in sources(stage.options, output_dir):
            if str(path) not in uses[stage.name]:
                parts[f"content of {path}"] = state.digest(path)
        parts |= {f"output of {name}": identity(steps[name]) for name in uses[stage.name]}
        parts = json.loads(json.dumps(parts, default=str))  # as it will be read back
        record = state.stages.get(stage.name)
        action, reason = _judged(stage, parts, record, stage.name in forced)
        number = record["number"] if record else 0
        if chosen is not None and stage.name not in chosen and action != "skip":
            action, parts = "leave", record["parts"] if record else parts
        step = Step(stage, action, reason, parts, number + (action == "run"))
        if action in ("run", "resume"):
            _refuse_unfinished(step, [steps[name] for name in uses[stage.name]])
        steps[stage.name] = step
    return list(steps.values())


def identity(step: Step) -> str:
    """A name for what the step makes, or has made."""
    return f"{_hex(json.dumps(step.parts, sort_keys=True).encode())[:16]}.{step.number}"


def _judged(stage: Stage, parts: Mapping, record: Mapping | None, is_forced: bool) -> tuple[str, str]:
    """What is to be done for a stage, and why."""
    is_kept = stage.folder.exists() and is_worth_keeping(stage, record)
    aside = f"; {stage.folder} goes to {aside_of(stage).name}" if is_kept else ""
    if is_forced:
        return "run", f"forced{aside}"
    if record is None:
        return "run", f"new{aside}"
    if changed := changes(record["parts"], parts):
        return "run", f"changed: {changed}{aside}"
    if record["is_finished"]:
        return ("skip", "finished, and nothing changed") if stage.is_there else ("run", "its output is gone")
    if (checkpoint := stage.checkpoint) and not stage.options.get("save_only_model"):
        return "resume", f"stopped; goes on at step {step_of(checkpoint)}"
    return "run", "stopped before a checkpoint"


def step_of(checkpoint: str) -> int:
    return int(checkpoint.rpartition("-")[2])


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In words what differs; nothing if nothing does."""
    said = []
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = before.get(key), now.get(key)
        if old != new or (key in before) != (key in now):
            is_hash = key.startswith(("content of ", "output of "))
            said.append(key if is_hash else f"{key} {_short(old)} -> {_short(new)}")
    return ", ".join(said)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse_unfinished(step: Step, used: Sequence[Step]) -> None:
    for other in used:
        if other.action == "leave":
            raise ValueError(
                f"stage {step.stage.name} uses {other.stage.name}, which is left out but not finished as the file says "
                f"({other.reason}). Choose it as well, or run without --only, --from and --until."
            )


@contextmanager
def locked(output_dir: Path) -> Iterator[int]:
    """Holds the pipeline's lock, given as a file descriptor that a child process may inherit, and then holds as well.

    A killed pipeline's stage ends within moments, which are waited for. Raises ValueError where another one is at work.
    """
    import fcntl

    output_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    try:
        until = time.monotonic() + SECONDS_TO_WAIT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    holder = os.pread(descriptor, 20, 0).decode() or "?"
                    raise ValueError(
                        f"{output_dir} is being worked on by another `strop run` (process {holder}); two at once would "
                        "write over each other. Wait for it, or end it."
                    ) from None
                time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def described(stage: Stage, record: Mapping[str, Any] | None) -> dict[str, Any]:
    """A stage in numbers: steps, seconds, first and last values of its metrics, results of an evaluation."""
    facts: dict[str, Any] = {"command": stage.command, "folder": str(stage.folder)}
    facts["status"] = "not run" if record is None else "finished" if record["is_finished"] else "unfinished"
    if record is None:
        return facts
    facts["seconds"] = round(record["seconds"], 1)
    if (stage.folder / RUN_FILE).is_file():
        facts["steps"] = load_run(stage.folder).get("last_step")
    if (stage.folder / METRICS_FILE).is_file():
        facts["metrics"] = first_and_last(load_metrics(stage.folder))
    if stage.makes == "results" and stage.is_there:
        facts["results"] = json.loads((stage.folder / RESULTS_FILE).read_text(encoding="utf-8"))
    if stage.makes == "rows" and stage.is_there:
        with Path(stage.output).open("rb") as rows:
            facts["rows"] = sum(1 for _ in rows)
    return facts


def first_and_last(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """[first, last] value of each watched metric."""
    found: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if WATCHED.fullmatch(name) and isinstance(value, (int, float)):
                found[name] = [found.get(name, [value])[0], value]
    return found
