"""`strop rewards try`: what reward functions say of stored completions, before a run is spent on them."""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.cli.args import Options

if TYPE_CHECKING:
    from strop.rewards.trial import Trial

PROG = "strop rewards try"
COLUMNS = ("reward", "rows", "mean", "std", "lowest", "highest", "ties", "with length", "ms a row")
EXPLAINED = (
    "rows: rewarded, of all. ties: prompts with several completions that are all rewarded alike, so that nothing is "
    "learnt from them. with length: correlation of reward and {unit}."
)


@dataclass
class TryArguments:
    """Which functions are tried on what."""

    reward_funcs: list[str] = field(default_factory=list)
    """Names: accuracy, think_format, cosine_scaled(max_len=256), my_rewards.short, or the folder of a reward model."""

    completions: str | None = None
    """A .jsonl, .json, .csv or .parquet file of rows with `prompt` and `completion`, or a list of `completions`; other
    columns go to the functions."""

    tokenizer: str | None = None
    """The tokenizer that cuts completions into `completion_ids`, by the model's name or folder; lengths are in tokens
    then, else in characters."""

    timeout: float | None = None
    """Seconds for a function at most, of all rows together."""

    limit: int | None = None
    """Completions that are tried at most; all of them if not set."""

    def __post_init__(self):
        if not self.reward_funcs:
            from strop.rewards.resolve import CHOICES

            raise ValueError(f"name the functions to try with --reward_funcs. Choices: {CHOICES}.")
        if self.completions is None:
            raise ValueError(
                "there is nothing to reward; name a file with --completions, e.g. --completions out.jsonl."
            )
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} leaves no completion; it must be at least 1.")


def main(argv: list[str]) -> int:
    """`strop rewards try --reward_funcs NAMES --completions FILE`: print a table. The exit code, 1 if one failed."""
    options = Options(PROG, [TryArguments])
    if not argv or argv[0] != "try":
        if {"-h", "--help"} & set(argv):
            options.parser.print_help()
            return 0
        raise ValueError(f"strop rewards does one thing: {PROG} --reward_funcs NAMES --completions FILE")
    if {"-h", "--help"} & set(argv):
        options.parser.print_help()
        return 0
    (args,) = options.build(options.read(argv[1:]))
    return tried(args)


def tried(args: TryArguments) -> int:
    """Try each function alone, so that the failure of one hides no other; the exit code."""
    from datasets import disable_progress_bars

    from strop.rewards.resolve import resolve_reward
    from strop.rewards.scoring import RewardFunctions
    from strop.rewards.trial import trial

    disable_progress_bars()
    functions = [RewardFunctions(resolve_reward(name), timeout=args.timeout) for name in args.reward_funcs]
    prompts, completions, columns = read_rows(args.completions or "", args.limit)
    ids = token_ids(args.tokenizer, completions) if args.tokenizer else None
    lengths = list(map(len, ids if ids is not None else texts(completions)))
    found: dict[str, Trial | str] = {}
    for name, function in zip(args.reward_funcs, functions, strict=True):
        try:
            scores = function.score(prompts, completions, ids, columns)
            found[name] = trial(scores.values[:, 0], prompts, lengths, sum(scores.seconds.values()))
        except ValueError as error:
            found[name] = str(error)
    show(found, "length in tokens" if ids is not None else "length in characters")
    return int(any(isinstance(result, str) for result in found.values()))


def read_rows(path: str, limit: int | None) -> tuple[list[Any], list[Any], dict[str, list[Any]]]:
    """Prompts, completions and further columns of the file. Raises ValueError for rows without completions."""
    from strop.data.sources import load_rows

    prompts: list[Any] = []
    completions: list[Any] = []
    rows: list[dict[str, Any]] = []
    source: Any = load_rows(path, "train")
    for row in source:
        if row.get("completion") is None and row.get("completions") is None:
            raise ValueError(f"rows have the columns {', '.join(row)}, but none is called completion or completions.")
        for completion in row["completions"] if row.get("completion") is None else [row["completion"]]:
            prompts.append(row.get("prompt") or "")
            completions.append(completion)
            rows.append({name: row[name] for name in row if name not in ("prompt", "completion", "completions")})
    if not rows:
        raise ValueError(f"{path} has no completions.")
    columns = {name: [row[name] for row in rows[:limit]] for name in rows[0]}
    return prompts[:limit], completions[:limit], columns


def texts(completions: list[Any]) -> list[str]:
    from strop.rewards.texts import texts_of

    return texts_of(completions)


def token_ids(name: str, completions: list[Any]) -> list[list[int]]:
    """The tokens of the completions' texts."""
    from strop.models.arguments import ModelInitArguments
    from strop.models.load import load_tokenizer

    tokenizer = load_tokenizer(name, ModelInitArguments())
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts(completions)]


def show(found: "dict[str, Trial | str]", unit: str) -> None:
    """Print a table of what was found, and what went wrong below it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS, box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, result in found.items():
        table.add_row(name, *(["failed", *[""] * 7] if isinstance(result, str) else cells(result)))
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    table.columns[0].overflow = "fold"
    console.print(table)
    console.print(EXPLAINED.format(unit=unit), style="dim", markup=False, highlight=False)
    for result in found.values():
        if isinstance(result, str):
            print(result, file=sys.stderr)


def cells(result: "Trial") -> list[str]:
    numbers = [result.mean, result.std, result.lowest, result.highest]
    return [
        f"{result.num_applicable}/{result.num_rows}",
        *("-" if number is None else f"{number:.3f}" for number in numbers),
        "-" if result.ties is None else f"{result.ties:.0%}",
        "-" if result.length_correlation is None else f"{result.length_correlation:+.2f}",
        f"{result.milliseconds:.2f}",
    ]
