"""Preference pairs: rows with two completions of one prompt, to tokens and to batches that hold the prompt once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from strop.data.collate import IGNORE, Batch, Example, TokenRow, collate
from strop.data.formats import detect
from strop.data.recipe import Recipe, RowMaker
from strop.models.segments import Layout

SIDES = ("chosen", "rejected")
COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


def prepare_pairs(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None, name: str = "train"
) -> Dataset:
    """`dataset` as columns prompt_ids, chosen_ids and rejected_ids; one that has them comes back as it is.

    Rows have `prompt`, `chosen` and `rejected` as texts or lists of messages, or only the latter two, which then begin
    alike. Completions are cut at `max_length` tokens with their prompt. Raises ValueError for other rows, and where a
    side of a pair is left without a token.
    """
    if set(COLUMNS) <= set(dataset.column_names):
        return dataset
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

    return dataset.map(
        tokenise, batched=True, with_indices=True, remove_columns=dataset.column_names, desc=f"Preparing {name}"
    )


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
class PairCollator:
    """Examples {prompt_ids, chosen_ids, rejected_ids} to a batch whose rows are chosen, rejected, chosen, rejected,
    ..."""

    pad_token_id: int
    layout: Layout = "packed"
    multiple_of: int = 1

    def __call__(self, examples: list[dict[str, list[int]]]) -> Batch:
        rows: list[TokenRow] = []
        for example in examples:
            prompt = len(rows) if example["prompt_ids"] else -1
            if example["prompt_ids"]:
                rows.append(TokenRow(example["prompt_ids"], None))
            rows += [TokenRow(example[f"{side}_ids"], example[f"{side}_ids"], parent=prompt) for side in SIDES]
        sizes = [Example(2, sum(len(example[column]) for column in COLUMNS)) for example in examples]
        return collate(rows, self.layout, self.pad_token_id, self.multiple_of) | {"examples": sizes}
