"""`strop quickstart`: a small real model learns worded arithmetic in three stages, measured after each.

The stages are in `strop.cli.quickstart_stages`: the public trainers as anyone would use them.
"""

import shlex
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.args import Options
from strop.cli.train import is_explained, show_logs
from strop.compat import suggestion

if TYPE_CHECKING:  # torch is imported once the options are known to be good
    from strop import EvalResults
    from strop.cli.quickstart_task import Task

STAGES = ("sft", "dpo", "grpo")
START = "start"
NUM_SHOWN = 3
LABELS = {
    "loss": "loss, nats a token",
    "pairs": "better likelier, %",
    "well_formed": "well-formed, %",
    "correct": "correct, %",
    "answer_tokens": "tokens an answer",
}
"""Metrics that are shown, and what a line of the table calls them."""


@dataclass
class QuickstartArguments:
    """What is trained on what. Without options: SmolLM2-135M-Instruct on worded arithmetic, by sft, dpo and grpo."""

    model: str | None = None
    """A folder or hub id of a model to train instead of SmolLM2-135M-Instruct."""

    data: str | None = None
    """Your own rows, e.g. a .jsonl file, instead of the embedded ones: texts, prompts with completions or
    conversations for sft, or pairs (chosen, rejected) for sft and dpo. A part is held out to measure on."""

    output_dir: str = "quickstart"
    """Folder that gets a folder a stage, with its adapter, checkpoint, metrics and page."""

    stages: list[str] | None = None
    """Stages to run, of sft, dpo and grpo; all that there are rows for if not set."""

    steps: int | None = None
    """Optimizer steps of each stage; if not set, 20 of sft, 8 of dpo, 20 of grpo."""

    learning_rate: float | None = None
    """Peak learning rate of each stage; if not set, 2e-3 of sft, 3e-4 of dpo, 2e-4 of grpo."""

    num_heldout: int = 96
    """Embedded problems to measure on."""

    seed: int = 0
    """Random state of rows, answers and training."""

    def __post_init__(self):
        for name in ("steps", "num_heldout"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} leaves nothing to do; give at least 1.")
        for stage in self.stages or ():
            if stage not in STAGES:
                raise ValueError(
                    f"there is no stage {stage!r}: choose of {', '.join(STAGES)}.{suggestion(stage, STAGES)}"
                )
        if self.stages is not None and (not self.stages or len(set(self.stages)) < len(self.stages)):
            raise ValueError(f"stages={self.stages}: name each stage that runs once, e.g. --stages sft grpo.")


def main(argv: list[str]) -> int:
    """Run the command; the exit code."""
    options = Options("strop quickstart", [QuickstartArguments], "strop quickstart [options]")
    if {"-h", "--help"} & set(argv):
        options.parser.print_help()
        return 0
    try:
        run(*options.build(options.read(argv)))
    except ValueError as error:
        if not is_explained(error):
            raise
        print(f"strop quickstart: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstrop quickstart: interrupted; finished stages stay in the output folder.", file=sys.stderr)
        return 130
    return 0


def run(args: QuickstartArguments) -> dict[str, "EvalResults"]:
    """Train stage by stage, and print what changed; what was measured at the start and after each stage."""
    from strop.cli import quickstart_stages as stages

    began = time.monotonic()
    show_logs()
    quieten_libraries()
    task = task_of(args, args.steps or stages.STEPS["sft"])
    chosen = stages_of(args, task)
    model = args.model or starting_model()
    say("measuring the model as it is")
    found, seconds = {START: measure(model, START, task, args)}, {START: 0.0}
    for stage in chosen:
        folder = str(Path(args.output_dir, stage))
        say(f"{stage}: training")
        start = time.monotonic()
        trainer = getattr(stages, stage)(model, task, **settings_of(args, folder))
        trainer.train()
        trainer.save_model()
        del trainer  # two models needn't be in memory
        seconds[stage] = time.monotonic() - start
        say(f"{stage}: measuring")
        found[stage] = measure(folder, stage, task, args)
        model = folder
    report(task, found, seconds)
    print(
        f"\nDone in {time.monotonic() - began:.0f} s. In {shlex.quote(args.output_dir)}, a folder a stage: the adapter,"
    )
    print("its last checkpoint, metrics.jsonl, loss.svg, report.html, and in eval/ every answer. Talk to it:")
    print(f"\n    strop chat {shlex.quote(model)}\n")
    return found


def say(message: str) -> None:
    print(f"- {message}", flush=True)


def quieten_libraries() -> None:
    """Bars and warnings of libraries would stand between the lines that say what happens."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def starting_model() -> str:
    """Folder of SmolLM2-135M-Instruct, made if this is the first time."""
    from strop.models.smollm2 import smollm2

    return str(smollm2(say))


def task_of(args: QuickstartArguments, sft_steps: int) -> "Task":
    from strop.cli.quickstart_stages import ROWS_PER_STEP
    from strop.cli.quickstart_task import embedded_task, own_task

    if args.data is not None:
        return own_task(args.data, args.seed)
    return embedded_task(sft_steps * ROWS_PER_STEP, args.num_heldout, args.seed)


def stages_of(args: QuickstartArguments, task: "Task") -> list[str]:
    """The stages that run. Raises ValueError for one that there are no rows for."""
    for stage in args.stages or ():
        if stage not in task.stages:
            raise ValueError(
                f"stage {stage} can't run on {args.data}, which has rows for {' and '.join(task.stages)}: dpo needs "
                "columns chosen and rejected, grpo problems with a check (use strop grpo with a reward of yours)."
            )
    if args.stages is None and task.stages != STAGES:
        say(f"{args.data} has rows for {' and '.join(task.stages)}; other stages are left out")
    return list(args.stages or task.stages)


def settings_of(args: QuickstartArguments, folder: str) -> dict[str, Any]:
    """What all stages' configs have in common."""
    from strop.cli.quickstart_stages import precision

    said = {"max_steps": args.steps, "learning_rate": args.learning_rate}
    return {
        "output_dir": folder,
        "seed": args.seed,
        "activation_checkpointing": False,
        "save_total_limit": 1,
        **precision(),
        **{name: value for name, value in said.items() if value is not None},
    }


def measure(model: str, stage: str, task: "Task", args: QuickstartArguments) -> "EvalResults":
    """What the model is worth on the held-out rows; its answers, one a row at temperature 1, go on disk."""
    from strop import evaluate
    from strop.cli.quickstart_stages import MAX_NEW_TOKENS, dtype_of, precision

    answers = any(callable(metric) for metric in task.metrics)
    options = {"temperature": 1.0, "max_new_tokens": MAX_NEW_TOKENS} if answers else {}
    folder = Path(args.output_dir, stage, "eval")
    return evaluate(
        model, task.heldout, task.metrics, dtype=dtype_of(precision()), output_dir=folder, seed=args.seed, **options
    )


def report(task: "Task", found: dict[str, "EvalResults"], seconds: dict[str, float]) -> None:
    """Print all measurements side by side, what the later stages added, and some answers."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console, first, last = Console(), found[START], list(found)[-1]
    title = f"on {len(task.heldout)} held-out rows, with 95 % intervals"
    columns = [START, *(f"after {stage}" for stage in list(found)[1:])]
    table = Table("", *columns, title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for name in first.metrics:
        if name in LABELS:
            table.add_row(LABELS[name], *(cell(name, results) for results in found.values()))
    table.add_row("training, s", *(f"{spent:.0f}" if spent else "" for spent in seconds.values()))
    console.print(table)
    if "correct" in first.metrics and len(found) > 2:
        console.print(gained(found, list(found)[1], last), highlight=False)
    if first.answers:
        shown = Table("prompt", START, f"after {last}", title="answers", title_justify="left", show_lines=True)
        for (old,), (new,) in list(zip(first.answers, found[last].answers, strict=True))[:NUM_SHOWN]:
            shown.add_row(*map(escaped, texts(old, new)))
        console.print(shown)


def cell(name: str, results: "EvalResults") -> str:
    """A number of the table; of shares, per cent with their interval."""
    number = results[name].model
    if name in ("loss", "answer_tokens"):
        return f"{number.value:.3f}" if name == "loss" else f"{number.value:.1f}"
    interval = "" if number.low is None or number.high is None else f" ({100 * number.low:.0f}-{100 * number.high:.0f})"
    return f"{100 * number.value:.0f}{interval}"


def gained(found: dict[str, "EvalResults"], before: str, after: str) -> str:
    """How much more the last stage's model gets right than the first one's, on the same problems."""
    from strop.evals.compare import rewards_of, totals_of
    from strop.evals.statistics import proportion_difference

    old, new = (totals_of(rewards_of(found[stage].answers, "correct")) for stage in (before, after))
    change = proportion_difference(new, old)
    value, low, high = (100 * (share or 0) for share in (change.value, change.low, change.high))
    interval = f"{value:+.0f} points ({low:+.0f} to {high:+.0f})"
    return f"correct after {after} against {before}, on the same problems: {interval}, p = {change.p_value:.2g}"


def texts(old: Any, new: Any) -> tuple[str, str, str]:
    """The question, the first model's answer, the last one's."""
    from strop.cli.quickstart_task import question_of
    from strop.rewards.texts import text_of

    return question_of(old.prompt), text_of(old.completion).strip(), text_of(new.completion).strip()


def escaped(text: str) -> str:
    """`text` with nothing that rich would take for markup."""
    from rich.markup import escape

    return escape(text)
