"""`strop inspect`: rows as a trainer will see them, with the options of its command and without loading weights."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from strop.cli.args import Options
from strop.cli.arguments import CommandArguments, RewardFunctionArguments
from strop.cli.train import METHODS, Method, all_options, check, format_of, method_of, rows
from strop.cli.yaml_config import Setting, apply_environment, read_config

PROG = "strop inspect"


@dataclass
class InspectArguments:
    """Which rows are shown, and how. All options of the training command say what becomes of them."""

    n: int = 3
    """How many rows are shown, from the first on."""

    row: int | None = None
    """Show this one row of the data set (with packing: of the packed one)."""

    tokens: bool = False
    """One line a token: mark, position, id, text."""

    color: bool | None = None
    """Mark tokens by colour; on a terminal if not set."""

    json: bool = False
    """Print JSON: for each row aligned `tokens`, `input_ids`, `trained` and `labels`."""

    html: str | None = None
    """Write a self-contained page to this file."""

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"n={self.n} shows nothing; it must be at least 1.")
        if self.json and (self.tokens or self.color):
            raise ValueError("json prints every token with its mark already; drop tokens and color.")
        if self.tokens and self.color:
            raise ValueError("tokens is a plain listing; drop color.")

    @property
    def indices(self) -> range:
        """The rows asked for."""
        return range(self.n) if self.row is None else range(self.row, self.row + 1)

    def of(self, dataset: Any) -> range:
        """The rows asked for, those of the first `n` that `dataset` has."""
        return self.indices if self.row is not None else range(min(self.n, len(dataset)))


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    usage = f"{PROG} [METHOD] [--n N | --row K] [--json | --html FILE] [options of strop METHOD; the rows tell which]"
    own = Options(PROG, [InspectArguments], usage)
    name, words = method_of(argv)
    method, is_named = METHODS[name], len(words) < len(argv)
    shown, words = own.split(words)
    if {"-h", "--help"} & set(shown):
        own.parser.print_help()
        print("\nand how the rows are made:\n")
        all_options(PROG, method).parser.print_help()
        return 0
    (how,) = own.build(own.read(shown))
    instances = built(method, words)
    raw = raw_rows(*instances)
    if not is_named:
        other = method_for(raw)
        if other != name:
            print(f"{PROG}: the rows are shown as `strop {other}` reads them, with its options", file=sys.stderr)
            method, instances = METHODS[other], built(METHODS[other], words)
    explained, report, tokenizer_name = explained_rows(how, method, raw, *instances)
    show(how, explained, report, tokenizer_name)
    return 0


def built(method: Method, words: Sequence[str]) -> list[Any]:
    """The instances that the words, and the file that they name, make of the method's options."""
    options = all_options(PROG, method)
    settings = options.read(words, config_file(words))
    _, _, *instances = options.build(settings)
    check(settings, *(part for part in instances if not isinstance(part, RewardFunctionArguments)))  # none is asked
    return instances


def raw_rows(script: Any, mixture: Any, *_: Any) -> Any:
    """The rows as they are written."""
    from strop.data.prepare import as_dataset

    return as_dataset(rows(script, mixture, False)[0])


KNOWN_BY = {
    "prm": {"prompt", "completions", "labels"},
    "reward": {"completions"},
    "tpo": {"chosen", "rejected", "reference"},
    "dpo": {"chosen", "rejected"},
    "kto": {"prompt", "completion", "label"},
}
"""Method -> columns that tell rows for it; the first one counts."""


def method_for(raw: Any) -> str:
    """The method that reads rows like these; "sft" for texts."""
    columns = raw.column_names or list(next(iter(raw), {}))
    plain = {column.removesuffix("_input_ids").removesuffix("_ids") for column in columns}
    return next((method for method, needed in KNOWN_BY.items() if needed <= plain), "sft")


def config_file(words: Sequence[str]) -> dict[str, Setting]:
    """The settings of the file that --config names."""
    options = Options(PROG, [CommandArguments])
    said = options.read(options.split(words)[0])
    return apply_environment(read_config(said["config"].value)) if "config" in said else {}


def explained_rows(how: InspectArguments, method: Method, raw: Any, *instances: Any):
    """(rows, preparation report, name of the tokenizer). Packed and streamed rows come without the raw row."""
    from strop.models.model_config import init_kwargs
    from strop.trainer.setup import ready_tokenizer

    model_args, args = instances[2], instances[-1]
    args.model_init_kwargs = init_kwargs(model_args, args.model_init_kwargs)
    tokenizer = ready_tokenizer(None, model_args.model_name_or_path, args)
    if method.rows == "prompts":
        return *prompts(how, raw, tokenizer, args), tokenizer.name_or_path
    if method.rows == "texts":
        return *texts(how, raw, tokenizer, args), tokenizer.name_or_path
    return *answers(how, raw, tokenizer, args, format_of(method, args, raw)), tokenizer.name_or_path


def texts(how: InspectArguments, raw: Any, tokenizer: Any, args: Any) -> tuple[list[Any], Any]:
    """Rows of which each is a text, explained, and the report."""
    from datasets import Dataset, IterableDataset

    from strop.data.inspect import explain, explain_raw
    from strop.data.prepare import prepare, skips_preparation

    prepared, report = prepare(raw, tokenizer, args, packing=args.packing)
    if isinstance(prepared, IterableDataset):
        prepared = Dataset.from_list(list(islice(prepared, how.indices.stop)))
    if args.packing or isinstance(raw, IterableDataset) or skips_preparation(args):
        return explain(prepared, tokenizer, how.of(prepared)), report
    return explain_raw(raw, tokenizer, args, how.of(raw)), report


def answers(how: InspectArguments, raw: Any, tokenizer: Any, args: Any, wanted: Any) -> tuple[list[Any], Any]:
    """Rows of a prompt with answers, or without a format with steps, explained one by one, and the report."""
    from datasets import IterableDataset

    from strop.data.inspect_answers import explain_answers, explain_steps
    from strop.data.preference import prepare_preference
    from strop.data.prepare import as_dataset
    from strop.data.steps import prepare_steps

    if isinstance(raw, IterableDataset):
        raw = as_dataset(list(islice(raw, how.indices.stop)))
    if wanted:
        wanted = replace(wanted, sides=wanted.written)  # what another row answers isn't shown
        _, report = prepare_preference(raw, tokenizer, args, wanted, refuses=False)
        return explain_answers(raw, tokenizer, args, how.of(raw), wanted), report
    _, report = prepare_steps(raw, tokenizer, args)
    return explain_steps(raw, tokenizer, args, how.of(raw)), report


@dataclass
class PromptLengths:
    """How long prompts are, in tokens."""

    lengths: list[int]

    def to_dict(self) -> dict[str, Any]:
        return {"rows": len(self.lengths), "shortest": min(self.lengths), "longest": max(self.lengths)}

    def __str__(self) -> str:
        rows, shortest, longest = self.to_dict().values()
        return f"{rows} prompts shown, of {shortest} to {longest} tokens; the model answers them while it trains"


def prompts(how: InspectArguments, raw: Any, tokenizer: Any, args: Any) -> tuple[list[Any], Any]:
    """Prompts of rollouts as the model reads them, and their lengths. Nothing of them is trained."""
    from datasets import IterableDataset

    from strop.data.collate import IGNORE
    from strop.data.inspect import NOTES, checked, dropped, explain_row
    from strop.data.prepare import as_dataset
    from strop.data.report import Fate
    from strop.rollout.encode import Encoder

    if isinstance(raw, IterableDataset):
        raw = as_dataset(list(islice(raw, how.indices.stop)))
    encoder = Encoder(tokenizer, args.chat_template_kwargs or {}, args.max_prompt_length, args.overlong)
    explained, lengths = [], []
    for index in checked(how.of(raw), len(raw)):
        whole, ids = encoder.whole_prompt_ids(raw[index]), encoder.prompt_ids(raw[index])
        num_cut = len(whole) - len(ids)
        lengths.append(len(whole))
        if num_cut and args.overlong == "drop":
            note = NOTES[Fate.DROPPED].replace("max_length", "max_prompt_length")
            explained.append(replace(dropped(index), raw=raw[index], warnings=[note]))
            continue
        row = explain_row(index, {"input_ids": ids, "labels": [IGNORE] * len(ids)}, tokenizer, set())
        notes = ["the prompt lost its start"] if num_cut else []
        explained.append(
            replace(row, raw=raw[index], stops=["nothing trained"], num_padding=0, num_cut=num_cut, warnings=notes)
        )
    return explained, PromptLengths(lengths)


def show(how: InspectArguments, explained: list[Any], report: Any, tokenizer_name: str) -> None:
    """Print or write the rows in the form asked for."""
    from strop.data.inspect import as_html, as_json, as_rich, as_text

    if how.html is not None:
        path = Path(how.html).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_html(explained, report.to_dict(), f"rows as {tokenizer_name} reads them"), encoding="utf-8")
        print(f"wrote {path}", file=sys.stderr)
    if how.json:
        print(as_json(explained, report.to_dict()))
    elif how.html is None:
        if how.color or (how.color is None and sys.stdout.isatty() and not how.tokens):
            from rich.console import Console

            Console(force_terminal=True).print(as_rich(explained), soft_wrap=True)
        else:
            print(as_text(explained, show_tokens=how.tokens))
        print(report)
