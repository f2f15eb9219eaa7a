"""`strop score`: what a reward model thinks of answers, one JSON line a row."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from strop.cli.chat import LoadArguments, load, read

PROG = "strop score"
COLUMNS = ("tools", "chat_template_kwargs")
"""What else of a row the chat template reads."""

Row = dict[str, Any]


@dataclass
class ScoreArguments(LoadArguments):
    """What is scored, and how many at a time."""

    data: str | None = None
    """A .jsonl, .json, .csv or .parquet file of rows with `prompt` and `completion`, `chosen` and `rejected`, or a list
    of `completions` (for a model of steps: the steps of one solution)."""

    step_separator: str | None = None
    """What stood behind each step in the training of a model of steps: if not set, as its run's record says, or else a
    line break."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template: if not set, those of the training, as its run's record says. Those in a row's
    own chat_template_kwargs column come on top."""

    batch_size: int = 8
    """Rows read at a time."""

    def __post_init__(self):
        if self.data is None:
            raise ValueError("there is nothing to score; name a file with --data, e.g. --data answers.jsonl.")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} reads no row; it must be at least 1.")
        trained = settings_of_run(self.model)
        if self.step_separator is None:
            self.step_separator = trained.get("step_separator") or "\n"
        if self.chat_template_kwargs is None:
            self.chat_template_kwargs = trained.get("chat_template_kwargs") or {}


def settings_of_run(folder: str) -> dict[str, Any]:
    """The settings of the run that left its record in `folder`; none where there is no record."""
    from strop.runs.record import load_run

    return load_run(folder)["config"] if Path(folder, "run.json").is_file() else {}


def main(argv: list[str]) -> int:
    """`strop score MODEL --data FILE`: print each row with its `score`, or with one a completion. The exit code."""
    instances = read(PROG, [ScoreArguments], argv)
    if instances is None:
        return 0
    (args,) = instances
    right, compared = 0.0, 0
    for row in scored(args):
        print(json.dumps(row, ensure_ascii=False, default=str), flush=True)
        if "score_chosen" in row:
            margin = row["score_chosen"] - row["score_rejected"]
            right, compared = right + (margin > 0) + (margin == 0) / 2, compared + 1
    if compared:
        print(f"{right / compared:.1%} of {compared} pairs have the chosen answer above the other", file=sys.stderr)
    return 0


def scored(args: ScoreArguments) -> Iterator[Row]:
    """The rows of the file with what the model scores them."""
    from transformers.utils.logging import disable_progress_bar

    from strop.data.sources import load_rows
    from strop.models.load import SCORING, task_of

    rows: Iterator[Row] = iter(load_rows(args.data or "", "train"))  # type: ignore[arg-type]
    task = task_of(args.model)
    if task not in SCORING:
        raise ValueError(
            f"{args.model} is a language model, which writes answers and scores none. Train a reward model with "
            "`strop reward`, or talk to this one with `strop chat`."
        )
    disable_progress_bar()
    model, tokenizer = load(args, **loading_of(task))
    while part := list(islice(rows, args.batch_size)):
        yield from (
            with_steps(model, tokenizer, part, args)
            if task == "TOKEN_CLS"
            else with_scores(model, tokenizer, part, args)
        )


def loading_of(task: str) -> dict[str, Any]:
    """Keyword arguments of `load` for a model of this task, in peft's words."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    kinds: dict[str, dict[str, Any]] = {
        "SEQ_CLS": {"auto_class": AutoModelForSequenceClassification, "num_labels": 1},
        "TOKEN_CLS": {"auto_class": AutoModelForTokenClassification, "num_labels": 2},
    }
    return kinds.get(task, {})


def with_scores(model: Any, tokenizer: Any, rows: list[Row], args: ScoreArguments) -> Iterator[Row]:
    """The rows with the score of each of their answers."""
    from strop.rewards.reward_model import WHOLE, score

    recipe = replace(WHOLE, template_options=args.chat_template_kwargs)
    answers = [answers_of(row) for row in rows]
    owners = [i for i, own in enumerate(answers) for _ in own]
    columns: dict[str, Any] = {name: [rows[i][name] for i in owners] for name in COLUMNS if name in rows[0]}
    prompts = None if rows[0].get("prompt") is None else [rows[i]["prompt"] for i in owners]
    words = [answer for own in answers for answer in own]
    found = score(model, tokenizer, prompts, words, batch_size=args.batch_size, recipe=recipe, **columns)
    values = iter(found.tolist())
    for row, own in zip(rows, answers, strict=True):
        its = list(islice(values, len(own)))
        if "completions" in row:
            yield row | {"scores": its}
        elif "chosen" in row:
            yield row | {"score_chosen": its[0], "score_rejected": its[1]}
        else:
            yield row | {"score": its[0]}


def with_steps(model: Any, tokenizer: Any, rows: list[Row], args: ScoreArguments) -> Iterator[Row]:
    """The rows with the probability that each of their steps is good."""
    from strop.rewards.reward_model import score_steps

    missing = next((name for name in ("prompt", "completions") if name not in rows[0]), None)
    if missing:
        raise ValueError(f"a model of steps needs rows with prompt and completions, but there is no {missing!r}.")
    prompts, steps = ([row[name] for row in rows] for name in ("prompt", "completions"))
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in COLUMNS if name in rows[0]}
    values = score_steps(
        model,
        tokenizer,
        prompts,
        steps,
        separator=args.step_separator or "",
        batch_size=args.batch_size,
        template_options=args.chat_template_kwargs,
        **columns,
    )
    for row, found in zip(rows, values, strict=True):
        yield row | {"scores": found.tolist()}


def answers_of(row: Row) -> list[Any]:
    """The answers of a row. Raises ValueError for a row without any."""
    if "completions" in row:
        return list(row["completions"])
    names = ["chosen", "rejected"] if "chosen" in row else ["completion"]
    if not all(name in row for name in names):
        raise ValueError(
            f"rows have the columns {', '.join(row)}, but what is scored is called completion, chosen and rejected, or "
            "completions."
        )
    return [row[name] for name in names]
