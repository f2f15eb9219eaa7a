"""`strop eval`: what a model is worth on rows, alone or against another one."""

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from strop.cli.args import Options
from strop.cli.chat import LoadArguments
from strop.cli.yaml_config import apply_environment, read_config
from strop.compat import suggestion
from strop.evals.options import LOSS, EvalOptions

if TYPE_CHECKING:
    from strop.evals.results import EvalResults

PROG = "strop eval"
ALIASES = {
    "model_name_or_path": "model",
    "dataset_name": "data",
    "dataset": "data",
    "reward_model_name_or_path": "reward_model",
}
RECORDED = ("dataset_text_field", "assistant_only_loss", "completion_only_loss", "train_on_turns")
"""What the record of a training tells of its loss."""
SPLITS = ("test", "validation", "train")
"""What is evaluated on where no split is named: the first of these that there is."""


@dataclass
class ConfigArguments:
    """Where options are read from."""

    config: str | None = None
    """YAML file with the same names as these options. The command line wins over it, and it over the defaults."""


@dataclass
class EvalArguments(EvalOptions, LoadArguments):
    """What is measured, on what, against what."""

    metrics: list[str] = field(default_factory=list)

    reward_funcs: list[str] = field(default_factory=list)
    """Rewards, as among the metrics; the name that training commands have for them."""

    reward_model: str | None = None
    """Reward model whose score of answers is a metric: a hub id or a folder."""

    data: str | None = None
    """Rows: a .jsonl, .json, .csv or .parquet file, a folder, or a data set on the hub."""

    dataset_config: str | None = None
    """Configuration of a data set on the hub that has several."""

    split: str | None = None
    """Split to evaluate on; test, validation or train, whichever there is first, if not set."""

    dataset_columns: dict[str, str] | None = None
    """New names of columns, e.g. {"question": "prompt", "answer": "solution"}."""

    dataset_as_chat: bool = False
    """Take plain prompts and answers for what a user asks and an assistant answers, so that the model's chat template
    renders them."""

    baseline: str | None = None
    """A second model that is measured on the same rows; every metric then comes with the difference."""

    judge: str | None = None
    """Model that says whose answer is better, behind an OpenAI-compatible endpoint; the key is read from the
    environment variable OPENAI_API_KEY."""

    judge_url: str = "https://api.openai.com/v1"
    """Where the judge is; the address ends before /chat/completions."""

    judge_both_orders: bool = True
    """Show the judge each two answers both ways round, since judges favour a place; false asks once, in an order drawn
    by the seed."""

    output_dir: str | None = None
    """Folder for results.json, every answer with its rewards, and what is said of each row, a JSON line each."""

    json: bool = False
    """Print the results as JSON instead of a table."""

    def __post_init__(self):
        super().__post_init__()
        self.metrics = [*self.metrics, *self.reward_funcs, *([self.reward_model] if self.reward_model else [])]
        self.reward_funcs, self.reward_model = [], None
        if self.data is None and not self.tasks:
            raise ValueError("there is nothing to evaluate on; name rows with --data, e.g. --data rows.jsonl.")
        if self.judge is None:
            for name in ("judge_url", "judge_both_orders"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"{name}={getattr(self, name)!r} has no effect without a judge. Name one.")
        elif self.baseline is None:
            raise ValueError(f"judge={self.judge!r} compares two models; name the other one with --baseline.")


def main(argv: list[str]) -> int:
    """`strop eval MODEL --data FILE --metrics NAMES`: print a table of the results. The exit code."""
    options = Options(PROG, [EvalArguments, ConfigArguments], f"{PROG} MODEL --data ROWS [options]", ALIASES)
    if {"-h", "--help"} & set(argv):
        options.parser.print_help()
        return 0
    words = ["--model", *argv] if argv and not argv[0].startswith("-") else argv
    config = options.read(words).get("config")
    file = apply_environment(read_config(config.value)) if config else {}
    args, _ = options.build(options.read(words, file))
    with redirect_stdout(sys.stderr) if args.json else nullcontext():  # where what reward functions print goes, too
        results = run(args)
    show(args, results)
    return 0


def run(args: EvalArguments) -> "EvalResults":
    """The evaluation that `args` ask for."""
    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    from strop.callbacks.log import show_logs
    from strop.evals.evaluate import default_metrics, evaluate

    show_logs()
    disable_progress_bar()
    disable_progress_bars()
    rows = load(args)
    settings = {one.name: getattr(args, one.name) for one in fields(EvalOptions)}
    metrics = settings.pop("metrics") or default_metrics(rows, args.judge is not None, args.dataset_text_field)
    settings |= as_trained(args, LOSS in metrics)
    return evaluate(
        args.model,
        rows,
        metrics,
        baseline=args.baseline,
        judge=judge_of(args),
        output_dir=args.output_dir,
        dtype=args.dtype,
        base_model=args.base_model,
        **settings,
    )


def check(args: EvalArguments) -> None:
    """Raise ValueError where `run` would before it loads a model."""
    from strop.evals.evaluate import Plan

    settings = EvalOptions(**{one.name: getattr(args, one.name) for one in fields(EvalOptions)})
    Plan(load(args), settings, judge_of(args), args.baseline is not None, None)


def judge_of(args: EvalArguments) -> Any:
    """The judge that is asked for, or None."""
    from strop.rewards.judges import PairwiseJudge

    return args.judge and PairwiseJudge(args.judge, args.judge_url, both_orders=args.judge_both_orders)


def as_trained(args: EvalArguments, takes_loss: bool) -> dict[str, Any]:
    """What isn't said of the loss and the chat template, as the record of the model's training has it."""
    from strop.cli.score import settings_of_run

    record = settings_of_run(args.model)
    names = ["chat_template_kwargs", *(RECORDED if takes_loss else ())]
    found = {name: record[name] for name in names if getattr(args, name) is None and record.get(name) is not None}
    if args.assistant_only_loss is False or found.get("train_on_turns") == "expand":  # which trains all turns, too
        found.pop("train_on_turns", None)
    return found


def load(args: EvalArguments) -> list[dict[str, Any]]:
    """The rows to evaluate on, the first `limit`."""
    from strop.data.sources import load_rows, renamed

    if args.data is None:
        return []
    splits: Any = load_rows(args.data, args.split, args.dataset_config)
    if args.split is None:
        name = next((name for name in SPLITS if name in splits), None)
        if name is None:
            raise ValueError(f"{args.data} has the splits {', '.join(splits)}; say which with --split.")
        splits = splits[name]
    if args.dataset_columns:
        splits = renamed(splits, args.dataset_columns, args.data)
    rows = [dict(row) for row in islice(splits, args.limit)]
    return [as_chat(row) for row in rows] if args.dataset_as_chat else rows


def as_chat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with plain prompts and answers as messages."""
    roles = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
    if "prompt" not in row:
        raise ValueError(
            f"dataset_as_chat needs a column prompt, but rows have {', '.join(row)}.{suggestion('prompt', row)} Rename "
            'yours, e.g. --dataset_columns \'{"question": "prompt"}\'.'
        )
    return {
        name: [{"role": roles[name], "content": value}] if name in roles and isinstance(value, str) else value
        for name, value in row.items()
    }


def show(args: EvalArguments, results: "EvalResults") -> None:
    """Print the results, and where they are on disk."""
    from rich.console import Console

    from strop.evals.results import WIDTH

    if args.json:
        print(json.dumps(results.to_dict()))
        return
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(results.table())
    for note in results.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    if args.output_dir:
        console.print(f"results and answers are in {args.output_dir}", markup=False, highlight=False)
