"""`strop run`: the stages of a pipeline one after another, each in a process of its own; finished ones are skipped."""

import codecs
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from strop.cli.args import Options
from strop.cli.launch import END_WITH_PARENT
from strop.cli.stages import OVERRIDE, Pipeline, check, read_pipeline
from strop.cli.yaml_config import apply_environment, read_config
from strop.compat import suggestion
from strop.runs.pipeline import (
    CONFIG_FILE,
    LOG_FILE,
    SUMMARY_FILE,
    Stage,
    State,
    Step,
    described,
    locked,
    plan,
    step_of,
)
from strop.runs.record import replace_text

PROG = "strop run"
USAGE = f"{PROG} FILE [STAGE.option=value ...] [options]"
SECONDS_TO_END = 60
LAST_LINES = 10


@dataclass
class RunArguments:
    """Which stages of which file."""

    pipeline: str
    """YAML file with the stages, in their order."""

    output_dir: str | None = None
    """Folder that gets a folder a stage; if not set, as the file says, or else the file's name without its ending."""

    only: list[str] | None = None
    """Run these stages alone."""

    start: str | None = None
    """Run this stage and those after it; what they use of earlier ones must be finished. Or `--from`."""

    until: str | None = None
    """Run the stages up to this one."""

    force: list[str] | None = None
    """Run these stages anew, and so all that use them, though they are finished."""

    dry_run: bool = False
    """Check everything, print what would run and why, and stop."""

    def __post_init__(self):
        if self.only and (self.start or self.until):
            raise ValueError(f"only={self.only} says which stages run, so --from and --until can't too; drop one.")


def main(argv: list[str]) -> int:
    """`strop run FILE`: run what isn't finished, and print a summary. The exit code, that of a stage that failed."""
    options = Options(PROG, [RunArguments], USAGE, {"from": "start"})
    if {"-h", "--help"} & set(argv):
        options.parser.print_help()
        return 0
    changed = [word for word in argv if OVERRIDE.fullmatch(word)]
    words = [word for word in argv if word not in changed]
    if words and not words[0].startswith("-"):
        words = ["--pipeline", *words]
    (args,) = options.build(options.read(words))
    apply_environment(read_config(args.pipeline))
    pipeline = read_pipeline(args.pipeline, changed, args.output_dir)
    selected = chosen(args, [stage.name for stage in pipeline.stages])
    check(pipeline)
    if args.dry_run:
        show_plan(planned(pipeline, State(pipeline.output_dir), selected, args.force))
        return 0
    with locked(pipeline.output_dir) as lock:
        state = State(pipeline.output_dir)
        steps = planned(pipeline, state, selected, args.force)
        state.save()
        show_plan(steps)
        return work(pipeline, state, steps, lock)


def chosen(args: RunArguments, names: list[str]) -> list[str]:
    """The stages that may run. Raises ValueError for one that there isn't."""
    for option in ("only", "start", "until", "force"):
        value = getattr(args, option)
        for name in value if isinstance(value, list) else [value] if value else []:
            if name not in names:
                flag = "from" if option == "start" else option
                raise ValueError(f"--{flag} {name}: the stages are {', '.join(names)}.{suggestion(name, names)}")
    first = names.index(args.start) if args.start else 0
    last = names.index(args.until) if args.until else len(names) - 1
    if first > last:
        raise ValueError(f"--from {args.start} comes after --until {args.until}, which leaves no stage.")
    return args.only or names[first : last + 1]


def planned(pipeline: Pipeline, state: State, selected: Sequence[str], forced: Sequence[str] | None) -> list[Step]:
    return plan(pipeline.stages, pipeline.uses, state, selected, forced or ())


def work(pipeline: Pipeline, state: State, steps: Sequence[Step], lock: int) -> int:
    """Do the steps until one fails; the exit code."""
    code = 0
    for number, step in enumerate(steps, 1):
        stage = step.stage
        if step.action not in ("run", "resume"):
            continue
        say(f"{number} of {len(steps)}: {stage.name} (strop {stage.command}), {step.reason}")
        state.begin(step)
        config = pipeline.config(stage.name, step.action == "resume")
        write_config(stage, config)
        try:
            code = run_stage(stage, [stage.command, "--config", str(stage.folder / CONFIG_FILE)], lock)
            if code == 0 and stage.is_adapter:
                code = run_stage(stage, ["merge", str(stage.folder), "--output_dir", stage.output], lock)
        except KeyboardInterrupt:
            code = 130
        if code == 0 and not stage.is_there:
            say(f"{stage.name} ended well, but {stage.folder} holds no {stage.makes}")
            code = 1
        state.end(stage.name, is_finished=code == 0)
        if code:
            explain(stage, code)
            break
    show_summary(summarised(pipeline, state))
    return code


def write_config(stage: Stage, config: Mapping[str, Any]) -> None:
    """Write the options as a config file of the command, values in JSON, which YAML has in it."""
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in config.items()]
    head = f"# strop {stage.command} --config {stage.folder / CONFIG_FILE}\n"
    replace_text(stage.folder / CONFIG_FILE, head + "".join(lines))


def run_stage(stage: Stage, words: Sequence[str], lock: int) -> int:
    """Run a command of the stage to its end and show what it prints; the exit code.

    Rows that it prints go to a file, which gets its name when they are complete.
    """
    rows = Path(f"{stage.output}.partial") if stage.makes == "rows" else None
    with (stage.folder / LOG_FILE).open("ab") as log, ExitStack() as stack:
        out = stack.enter_context(rows.open("wb")) if rows else subprocess.PIPE
        code = followed(start(words, out, lock), log)
    if code == 0 and rows:
        rows.replace(stage.output)
    return code


def start(words: Sequence[str], out: Any, lock: int) -> subprocess.Popen:
    """`strop words...` in a process and a process group of its own, which ends with this process and holds the lock.

    What it prints comes through a pipe, but for its output if `out` is a file.
    """
    err = subprocess.STDOUT if out == subprocess.PIPE else subprocess.PIPE
    env = os.environ | {END_WITH_PARENT: "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-P", "-m", "strop", *words]
    return subprocess.Popen(command, stdout=out, stderr=err, env=env, pass_fds=[lock], start_new_session=True)


def followed(process: subprocess.Popen, log: Any) -> int:
    """Show and log what the process prints until it ends; the exit code, as a shell has it.

    Ctrl-C ends it in order, once more at once.
    """
    stream: Any = process.stdout or process.stderr
    with stream:
        try:
            echo(stream, log)
        except BaseException:
            signal_group(process.pid, signal.SIGINT)
            alarm = threading.Timer(SECONDS_TO_END, signal_group, (process.pid, signal.SIGKILL))
            alarm.start()
            try:
                echo(stream, log)
            finally:
                alarm.cancel()
                signal_group(process.pid, signal.SIGKILL)
                process.wait()
            raise
    code = process.wait()
    return code if code >= 0 else 128 - code


def echo(stream: Any, log: Any) -> None:
    """Write what comes out of `stream` to the screen and to `log`, as it comes."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while part := os.read(stream.fileno(), 65536):
        log.write(part)
        log.flush()
        sys.stdout.write(decoder.decode(part))
        sys.stdout.flush()


def signal_group(pid: int, which: signal.Signals) -> None:
    """Send a signal to a stage and all that it started, if it is there still."""
    with suppress(ProcessLookupError):
        os.killpg(pid, which)


def say(text: str) -> None:
    print(f"{PROG}: {text}", flush=True)


def explain(stage: Stage, code: int) -> None:
    """Say how a stage ended that didn't finish, and how to go on."""
    checkpoint = stage.checkpoint
    where = f"at {f'step {step_of(checkpoint)}' if checkpoint else 'the start'} of {stage.name}"
    if code == 130:
        print(f"{PROG}: interrupted; the same command (without --force) goes on {where}.", file=sys.stderr)
        return
    lines = (stage.folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    print(
        f"{PROG}: stage {stage.name} failed with exit code {code}. What it printed last (all of it: "
        f"{stage.folder / LOG_FILE}):",
        *(f"    {line}" for line in lines),
        f"The same command (without --force) goes on {where}; with other options of the stage, it starts anew.",
        sep="\n",
        file=sys.stderr,
    )


def show_plan(steps: Sequence[Step]) -> None:
    """Print what will be done for each stage, and why."""
    table = Table("stage", "command", "plan", "why", "output", box=None, header_style="bold")
    for step in steps:
        stage = step.stage
        add(table, stage.name, stage.command, step.action, step.reason, stage.output)
    show(table)


def summarised(pipeline: Pipeline, state: State) -> dict[str, dict[str, Any]]:
    """Every stage in numbers, written to summary.json too."""
    found = {stage.name: described(stage, state.stages.get(stage.name)) for stage in pipeline.stages}
    replace_text(pipeline.output_dir / SUMMARY_FILE, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return found


def show_summary(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line a stage, and what evaluations found."""
    from strop.evals.results import EvalResults

    table = Table(
        "stage", "command", "status", "steps", "time", "first -> last", "folder", box=None, header_style="bold"
    )
    for name, facts in found.items():
        steps = facts.get("steps") or (f"{facts['rows']} rows" if "rows" in facts else "")
        metrics = [f"{key} {first:.4g} -> {last:.4g}" for key, (first, last) in facts.get("metrics", {}).items()]
        seconds = clock(facts["seconds"]) if "seconds" in facts else ""
        add(table, name, facts["command"], facts["status"], str(steps), seconds, "\n".join(metrics), facts["folder"])
    show(table)
    for name, facts in found.items():
        if "results" in facts:
            table = EvalResults.load(facts["folder"]).table()
            table.title = f"{name}: {table.title}"
            show(table)


def add(table: Table, *cells: str) -> None:
    """A row of words as they are: brackets are no markup."""
    table.add_row(*(Text(cell) for cell in cells))


def show(table: Table) -> None:
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    console.print(table, highlight=False)


def clock(seconds: float) -> str:
    """ "1:02:03", or "2:03" below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
