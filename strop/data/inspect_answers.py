"""Rows with answers or steps as the trainer sees them: what stands after the prompt explained token by token."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.data.collate import IGNORE
from strop.data.inspect import NOTES, ExplainedRow, checked, dropped, explain_row
from strop.data.preference import maker_for
from strop.data.preference_rows import PreferenceRecipe
from strop.data.report import GONE, Fate
from strop.data.sides import PreferenceFormat
from strop.data.steps import StepMaker, StepRecipe
from strop.data.turns import stop_token_ids

ANSWER_NOTES = NOTES | {
    Fate.PROMPT_CUT: "the prompt lost its start",
    Fate.EQUAL: "the answers have the same tokens, so there is nothing to prefer",
    Fate.EMPTY: "one of the answers says nothing",
}
"""What is worth saying about the fate of a row with answers."""


def explain_answers(
    dataset: Any, tokenizer: PreTrainedTokenizerBase, args: Any, indices: Iterable[int], wanted: PreferenceFormat
) -> list[ExplainedRow]:
    """What becomes of the rows at `indices` of an unprepared `dataset`: one explained row an answer.

    `args` has the fields of PreferenceArguments. A row that preparation drops comes once, without tokens, and says why.
    Raises ValueError for an index beyond the data set and for rows that can't be prepared.
    """
    maker = maker_for(dataset, tokenizer, PreferenceRecipe.of(args), wanted, "train")
    stop_ids = set(stop_token_ids(tokenizer))
    explained = []
    for index in checked(indices, len(dataset)):
        raw = dataset[index]
        for made in maker({name: [value] for name, value in raw.items()}, [index]).to_pylist():
            notes = list(notes_on(made))
            for side, row in _answers(index, made, tokenizer, stop_ids, wanted):
                explained.append(replace(row, side=side, raw=raw, warnings=[*notes, *row.warnings]))
                raw = None  # once is enough
    return explained


def explain_steps(
    dataset: Any, tokenizer: PreTrainedTokenizerBase, args: Any, indices: Iterable[int]
) -> list[ExplainedRow]:
    """What becomes of the rows of steps at `indices` of an unprepared `dataset`; `side` has + or - for each judgement.

    `args` has the fields of PreferenceArguments and StepArguments. Raises ValueError as `explain_answers` does.
    """
    recipe = StepRecipe.of(args, step_separator=args.step_separator, last_only=args.train_on_last_step_only)
    maker, explained = StepMaker(tokenizer, recipe, "train"), []
    for index in checked(indices, len(dataset)):
        raw = dataset[index]
        (made,) = maker({name: [value] for name, value in raw.items()}, [index]).to_pylist()
        fate = Fate(made["fate"])
        row = dropped(index) if fate & GONE else explain_row(index, made, tokenizer, set())
        judgements = "".join("+" if label else "-" for label in made["labels"] if label != IGNORE)
        notes = [text for flag, text in ANSWER_NOTES.items() if fate & flag]
        stops = ["nothing trained"] * len(row.stops)  # steps don't end in one
        explained.append(
            replace(row, side=judgements, raw=raw, stops=stops, num_cut=made["lost"], warnings=[*notes, *row.warnings])
        )
    return explained


def notes_on(made: Mapping[str, Any]) -> Iterator[str]:
    """What is worth saying about a prepared row as a whole."""
    fate = Fate(made["fate"])
    yield from (text for flag, text in ANSWER_NOTES.items() if fate & flag)
    if made["lost"] and not fate & GONE:
        yield f"truncated: prompt and answers lost {made['lost']} tokens, {made['ends']} answers the end of them"


def _answers(
    index: int, made: Mapping[str, Any], tokenizer, stop_ids: set[int], wanted: PreferenceFormat
) -> Iterator[tuple[str, ExplainedRow]]:
    """The name of each answer of a prepared row, and the answer after its prompt."""
    if Fate(made["fate"]) & GONE:
        yield "", dropped(index)
        return
    numbers = "".join(f", {name} {made[name]}" for name in wanted.extras if made.get(name) is not None)
    for side in wanted.written:
        several = made[f"{side}_ids"] if wanted.ranked else [made[f"{side}_ids"]]
        for place, ids in enumerate(several, 1):
            row = {"input_ids": made["prompt_ids"] + ids, "labels": [IGNORE] * len(made["prompt_ids"]) + ids}
            name = f"{side} {place}" if wanted.ranked else f"{side}{numbers}"
            yield name, explain_row(index, row, tokenizer, stop_ids)
