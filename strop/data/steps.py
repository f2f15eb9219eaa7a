"""Solutions whose steps are judged one by one: rows to `input_ids` and `labels`, counted and cached.

A row is {"prompt", "completions": [step, ...], "labels": [bool, ...]}, its prompt a text or a list of messages. Behind
each step stands the separator, whose last token is labelled 1 for a good step and 0 for a bad one; all other tokens
have -100. No token ends the row.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from strop.data.chat import ChatTemplate
from strop.data.collate import IGNORE, Batch, Example, TokenRow, collate
from strop.data.formats import CHECKED_ROWS, Row, at_row, messages_of, refuse_images
from strop.data.overlong import without_untrainable
from strop.data.preference_rows import PreferenceRecipe, as_label, check_effect, is_overlong
from strop.data.prepare import AnyRows, as_dataset, counts_as_prepared, map_rows, map_stream, try_out
from strop.data.recipe import as_table
from strop.data.report import Fate, PreparationReport
from strop.data.tokenize import NOTHING, Prepared, encoded
from strop.models.segments import Layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecipe(PreferenceRecipe):
    """The settings that decide what a row of steps becomes."""

    step_separator: str = "\n"
    last_only: bool = False
    """Only the last step has a label."""


def prepare_steps(
    dataset: AnyRows, tokenizer: PreTrainedTokenizerBase, args: Any, name: str = "train"
) -> tuple[Dataset | IterableDataset, PreparationReport]:
    """The data set as columns input_ids and labels (1, 0, -100), and what was done to it; prepared rows stay as they
    are.

    `args` has the fields of PreferenceArguments and StepArguments; train_on_last_step_only is for the data set that is
    called "train". A stream is prepared as it is read, and its report fills up meanwhile. Raises ValueError for rows it
    can't read (with their number), and when no row is left.
    """
    dataset = as_dataset(dataset, name)
    report = PreparationReport(name)
    recipe = StepRecipe.of(args, step_separator=args.step_separator, last_only=_is_last_only(args, name))
    maker = StepMaker(tokenizer, recipe, name)
    first_rows = list(islice(dataset, CHECKED_ROWS))
    if not first_rows:
        raise ValueError(f"the {name} data set has no rows")
    check_effect(recipe, "messages" if isinstance(first_rows[0].get("prompt"), list | tuple) else "plain text")
    try_out(maker, first_rows)
    if isinstance(dataset, IterableDataset):
        return map_stream(dataset, maker, report), report
    if recipe.last_only or not counts_as_prepared(dataset, recipe, report):
        dataset = map_rows(dataset, maker, report, args)
    logger.info("%s", report)
    return dataset, report


def _is_last_only(args: Any, name: str) -> bool:
    return args.train_on_last_step_only and name == "train"


@dataclass
class StepMaker:
    """Follows a recipe: batches of rows, as columns, to a table of input_ids, labels and the counts of `RowMaker`.

    A row that is dropped stays in the table, without tokens, to be counted. Raises ValueError naming the row that can't
    be prepared.
    """

    tokenizer: PreTrainedTokenizerBase
    recipe: StepRecipe
    name: str = "train"

    def __call__(self, batch: Mapping[str, Sequence], indices: Sequence[int]) -> pa.Table:
        columns = list(batch)
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*(batch[c] for c in columns), strict=True)]
        written = [at_row(i, self.name, self._written, row) for i, row in zip(indices, rows, strict=True)]
        ids = iter(self._tokenised([text for texts in written for text in texts]))
        made = []
        for index, row, texts in zip(indices, rows, written, strict=True):
            made.append(at_row(index, self.name, self._made, row, [next(ids) for _ in texts]))
        return as_table(made, [0 if row.input_ids else row.length for row in made])

    @property
    def key(self) -> tuple[str, ...]:
        """What the rows it makes depend on, beside its tokenizer."""
        return (repr(self.recipe),)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.recipe.template_options)

    @cached_property
    def separator(self) -> list[int]:
        """The ids of the separator. Raises ValueError if there are none."""
        (ids,) = self._tokenised([self.recipe.step_separator])
        if not ids:
            raise ValueError(
                f"step_separator={self.recipe.step_separator!r} has no tokens, but the judgement of a step is read at "
                "its last one; choose one that the tokenizer keeps, e.g. a special token of its vocabulary"
            )
        return ids

    def _tokenised(self, texts: list[str]) -> list[list[int]]:
        return [list(ids) for ids, _ in encoded(self.tokenizer, texts)]

    def _written(self, row: Row) -> list[str]:
        """The texts of the prompt and of each step; none for a row of tokens."""
        if row.get("input_ids") is not None:
            return []
        refuse_images(row, "training on steps")
        missing = [column for column in ("prompt", "completions", "labels") if row.get(column) is None]
        if missing:
            raise ValueError(
                f"steps need prompt, completions and labels, but {' and '.join(missing)} is not among "
                f"{sorted(name for name, value in row.items() if value is not None)}"
            )
        steps, prompt = list(row["completions"]), row["prompt"]
        if isinstance(row["completions"], str) or not all(isinstance(step, str) for step in steps):
            raise ValueError("its completions are no list of texts; write each step as one")
        if not steps or len(steps) != len(row["labels"]):
            raise ValueError(
                f"it has {len(steps)} completions and {len(row['labels'])} labels; each step needs one label"
            )
        if not isinstance(prompt, str):
            messages = messages_of(prompt, self.template.roles)
            prompt = self.template.conversation(row).render(messages, generation_prompt=True)
        return [prompt, *steps]

    def _made(self, row: Row, ids: list[list[int]]) -> Prepared:
        if row.get("input_ids") is not None:
            return self._fitted([], *_own_tokens(row, self.recipe.last_only))
        prompt, steps = ids[0], ids[1:]
        bos = self.tokenizer.bos_token_id
        if bos is not None and isinstance(row["prompt"], str) and prompt[:1] != [bos]:
            prompt = [bos, *prompt]
        solution: list[int] = []
        labels: list[int] = []
        for step, label in zip(steps, row["labels"], strict=True):
            solution += step + self.separator
            labels += [IGNORE] * (len(step) + len(self.separator) - 1) + [int(as_label(label))]
        return self._fitted(prompt, solution, last_label(labels) if self.recipe.last_only else labels)

    def _fitted(self, prompt: list[int], solution: list[int], labels: list[int]) -> Prepared:
        """The row within the recipe's limits; emptied where it is to be dropped or has no label."""
        recipe, length = self.recipe, len(prompt) + len(solution)
        if is_overlong(recipe, len(prompt), len(solution)):
            return Prepared([], [], Fate.DROPPED, length, lost=length)
        kept, room = recipe.rooms(len(prompt), len(solution))
        cut = Prepared(
            prompt[len(prompt) - kept :] + solution[:room],
            [IGNORE] * kept + labels[:room],
            Fate.TRUNCATED if kept + room < length else NOTHING,
            length,
            max(0, length - kept - room),
        )
        return without_untrainable(cut)


def last_label(labels: list[int]) -> list[int]:
    """`labels` without all but the last."""
    last = max((i for i, label in enumerate(labels) if label != IGNORE), default=0)
    return [IGNORE] * last + labels[last:]


def _own_tokens(row: Row, last_only: bool) -> tuple[list[int], list[int]]:
    """The row's input_ids and labels. Raises ValueError for labels that judge no step."""
    ids, labels = list(row["input_ids"]), row.get("labels")
    if labels is None or len(labels) != len(ids):
        raise ValueError(
            f"it has {len(ids)} input_ids and {'no' if labels is None else len(labels)} labels; each token needs one: "
            "1 or 0 where a step ends, else -100"
        )
    unknown = sorted(set(labels) - {0, 1, IGNORE})
    if unknown:
        raise ValueError(f"it has the labels {unknown}; a step is good (1) or bad (0), and other tokens have -100")
    return ids, last_label(list(labels)) if last_only else list(labels)


@dataclass
class StepCollator:
    """Examples {"input_ids", "labels"} to a batch whose targets are judgements, 1 or 0.

    `predictors` names the hidden state of the labelled token itself: there a step is over and can be judged.
    """

    pad_token_id: int
    layout: Layout = "packed"
    multiple_of: int = 1

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        rows = [TokenRow(example["input_ids"], example["labels"]) for example in examples]
        batch = collate(rows, self.layout, self.pad_token_id, self.multiple_of)
        judged = batch["completion_mask"]
        sizes = [Example(1, len(row.input_ids)) for row in rows]
        return batch | {"predictors": (batch["predictors"] + 1) * judged, "examples": sizes}
