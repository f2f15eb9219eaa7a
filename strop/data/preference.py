"""Completions of one prompt, compared or labelled: rows to tokens, and to batches that hold the prompt once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from strop.data.collate import IGNORE, Batch, Example, TokenRow, collate
from strop.data.formats import detect
from strop.data.prepare import AnyRows
from strop.data.recipe import Recipe, RowMaker
from strop.data.report import PreparationReport
from strop.models.segments import Layout


@dataclass(frozen=True)
class PreferenceFormat:
    """What a row holds besides its prompt."""

    sides: tuple[str, ...]
    """Columns with a completion each; tokenised, they are called <side>_ids."""
    extras: tuple[str, ...] = ()
    """Columns with a number a row, which reach the batch as tensors (E,), e.g. label; absent ones are left out."""

    @property
    def columns(self) -> tuple[str, ...]:
        return ("prompt_ids", *(f"{side}_ids" for side in self.sides))


PAIRS = PreferenceFormat(("chosen", "rejected"))
PAIRS_WITH_MARGIN = PreferenceFormat(("chosen", "rejected"), ("margin",))
TRIPLES = PreferenceFormat(("chosen", "rejected", "reference"))
LABELLED = PreferenceFormat(("completion",), ("label",))

SIDES, COLUMNS = PAIRS.sides, PAIRS.columns


def prepare_preference(
    dataset: AnyRows,
    tokenizer: PreTrainedTokenizerBase,
    args: Any,
    wanted: PreferenceFormat = PAIRS,
    name: str = "train",
) -> tuple[Dataset | IterableDataset, PreparationReport]:
    """`dataset` as the columns of `wanted`, and what was done to it; one that has them comes back as it is.

    `args` has the fields of PreferenceArguments. Rows have `prompt` and the sides as texts or lists of messages, or
    only the sides, which then begin alike. Raises ValueError for other rows.
    """
    report = PreparationReport(name)
    max_length = args.max_length
    if set(COLUMNS) <= set(dataset.column_names):
        return dataset, report
    if not set(SIDES) <= set(dataset.column_names):
        raise ValueError(
            f"the {name} data set has the columns {dataset.column_names}, but pairs need 'chosen' and 'rejected'"
        )

    def tokenise(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        rows = [row if "prompt" in row else _with_prompt(row) for row in rows]
        sides = [_tokenised(rows, side, tokenizer, indices, name) for side in SIDES]
        pairs = [_pair(*both, max_length, index, name) for index, *both in zip(indices, *sides, strict=True)]
        return {column: [pair[i] for pair in pairs] for i, column in enumerate(COLUMNS)}

    prepared = dataset.map(
        tokenise, batched=True, with_indices=True, remove_columns=dataset.column_names, desc=f"Preparing {name}"
    )
    return prepared, report


def _with_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """`row` with what both sides begin with as its prompt; a side keeps at least its last message or character."""
    chosen, rejected = row["chosen"], row["rejected"]
    length = min(_shared(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if isinstance(chosen, str) and chosen[:length].endswith(" "):
        length -= 1  # the space belongs to the word after it
    return {**row, "prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


def _shared(a: Sequence, b: Sequence) -> int:
    """How many elements `a` and `b` begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _tokenised(
    rows: list[dict], side: str, tokenizer, indices: Sequence[int], name: str
) -> list[tuple[list[int], int]]:
    """For each row, prompt and `side` as one list of ids, and where the completion starts in it."""
    columns = {"prompt": [row["prompt"] for row in rows], "completion": [row[side] for row in rows]}
    extra = {k: [row[k] for row in rows] for k in ("tools", "chat_template_kwargs") if k in rows[0]}
    found = detect([{"prompt": rows[0]["prompt"], "completion": rows[0][side]}], "text", name)
    table = RowMaker(tokenizer, Recipe(max_length=None), found, name)(columns | extra, indices)
    ids, labels = table.column("input_ids").to_pylist(), table.column("labels").to_pylist()
    starts = (next((i for i, label in enumerate(row) if label != IGNORE), len(row)) for row in labels)
    return list(zip(ids, starts, strict=True))


def _pair(chosen: tuple, rejected: tuple, max_length: int | None, index: int, name: str) -> tuple[list[int], ...]:
    (chosen_ids, chosen_start), (rejected_ids, rejected_start) = chosen, rejected
    prompt = chosen_ids[: min(_shared(chosen_ids, rejected_ids), chosen_start, rejected_start)]
    completions = [ids[len(prompt) : max_length] for ids in (chosen_ids, rejected_ids)]
    for side, completion in zip(SIDES, completions, strict=True):
        if not completion:
            raise ValueError(
                f"row {index} of the {name} data set: its prompt of {len(prompt)} tokens leaves nothing of the {side} "
                f"completion within max_length={max_length}, so there is nothing to compare. Raise max_length or "
                "shorten the prompt"
            )
    return prompt, *completions


@dataclass
class PreferenceCollator:
    """Examples of a format to a batch with one row a side: chosen, rejected, chosen, rejected, ...

    The prompt is the parent of its sides. `ref_<side>_logps`, one number a token, become the stream ref_logps.
    """

    pad_token_id: int
    layout: Layout = "packed"
    wanted: PreferenceFormat = PAIRS
    multiple_of: int = 1

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        rows: list[TokenRow] = []
        for example in examples:
            prompt = len(rows) if example["prompt_ids"] else -1
            if example["prompt_ids"]:
                rows.append(TokenRow(example["prompt_ids"], None))
            for side in self.wanted.sides:
                ids, logps = example[f"{side}_ids"], example.get(f"ref_{side}_logps")
                rows.append(TokenRow(ids, ids, prompt, {} if logps is None else {"ref_logps": logps}))
        sizes = [
            Example(len(self.wanted.sides), sum(len(example[column]) for column in self.wanted.columns))
            for example in examples
        ]
        batch = collate(rows, self.layout, self.pad_token_id, self.multiple_of)
        extras = {
            name: torch.tensor([example[name] for example in examples])
            for name in self.wanted.extras
            if examples[0].get(name) is not None
        }
        return batch | extras | {"examples": sizes}
