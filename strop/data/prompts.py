"""Rows with answers to a prompt, as people write them: where the prompt ends, what the answers are, in which order.

    pairs      {"prompt", "chosen", "rejected"}, or only the two sides, which then begin with their prompt
    triples    ... and "reference"
    labelled   {"prompt", "completion", "label"}; a pair is two of them
    ranked     {"prompt", "completions": [...]}, best first, or in the order that "scores" or "ranks" give them

Prompt and answers are texts or lists of messages. Conversations may bring `tools` and `chat_template_kwargs`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import IterableDataset

from strop.data.formats import ROLES, Message, Row, messages_of, refuse_images, silent_turns
from strop.data.sides import PAIRS, TRIPLES, PreferenceFormat

Words = str | list[Message]
"""A prompt or an answer: text, or messages."""


@dataclass(slots=True)
class Answers:
    """A prompt and the answers to it, in the order of a format's sides."""

    prompt: Words
    sides: list[Words]
    row: Row = field(repr=False)
    """As it was written."""
    explicit: bool = True
    """Whether the row says itself where its prompt ends."""

    @property
    def conversational(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def has_empty_side(self) -> bool:
        """Whether an answer says nothing."""
        return any(not side.strip() if isinstance(side, str) else bool(silent_turns(side)) for side in self.sides)


def answers_of(row: Row, wanted: PreferenceFormat, roles: frozenset[str] = frozenset(ROLES)) -> Answers:
    """The prompt and the answers of `row`; of a pair where labelled rows are wanted, both sides.

    Raises ValueError for answers that are missing, of different kinds, or don't fit the prompt.
    """
    refuse_images(row, "preference training")
    columns = PAIRS.sides if is_pair_of_labelled(row, wanted) else wanted.written
    missing = [column for column in columns if row.get(column) is None]
    if missing:
        raise ValueError(_missing(row, columns, missing))
    given = _ranked(row) if wanted.ranked else [row[column] for column in columns]
    prompt = row.get("prompt")
    if all(map(_is_messages, given)):
        if all(isinstance(side, Mapping) for side in given):
            prompt = row.get("conversations") if prompt is None else prompt
            given = [[side] for side in given]
        given = [messages_of(side, roles) for side in given]
        prompt = messages_of(prompt, roles) if prompt and not isinstance(prompt, str) else prompt
    elif not all(isinstance(side, str) for side in given):
        kinds = ", ".join(type(side).__name__ for side in given)
        raise ValueError(
            f"its answers are of the kinds {kinds}; write all of them as texts or all as lists of messages"
        )
    explicit = bool(prompt) or isinstance(prompt, str)
    return Answers(*separated(prompt, given), row, explicit)


def is_pair_of_labelled(row: Row, wanted: PreferenceFormat) -> bool:
    """Whether labelled rows are wanted and `row` is two of them."""
    return "label" in wanted.extras and row.get("completion") is None and set(PAIRS.sides) <= set(row)


def separated(prompt: Words | None, sides: Sequence[Words]) -> tuple[Words, list[Words]]:
    """The prompt and the sides without it, whether it stands by itself, at the start of every side, or both.

    Without a prompt it is what all sides begin with: whole messages, or characters, where one space at the seam goes to
    the sides. Prompt and side always make the whole. A prompt as text beside sides as messages is what a user said.
    Raises ValueError where it can't be told what the sides answer.
    """
    if prompt is None or prompt == []:
        length = _shared_length(sides)
        return sides[0][:length], [side[length:] for side in sides]
    if isinstance(prompt, str):
        return (prompt, list(sides)) if isinstance(sides[0], str) else _after_question(prompt, sides)
    if isinstance(sides[0], str):
        raise ValueError(
            f"its prompt is a {type(prompt).__name__} but its answers are texts: how they would be written after it "
            'could not be told. Write both as texts, or both as messages, e.g. [{"role": "assistant", "content": ...}]'
        )
    repeats = [side[: len(prompt)] == prompt for side in sides]
    if not any(repeats):
        return prompt, list(sides)
    if not all(repeats):
        raise ValueError("some of its answers begin with the prompt and others don't; write all of them alike")
    if any(len(side) == len(prompt) for side in sides):
        raise ValueError("one of its answers is the prompt and nothing more. Drop the row, or add the answer")
    return prompt, [side[len(prompt) :] for side in sides]


def _after_question(question: str, sides: Sequence[list[Message]]) -> tuple[Words, list[Words]]:
    """The messages before the answers to `question`, and the answers."""
    if all(side[0]["role"] == "assistant" for side in sides):
        return [{"role": "user", "content": question}], list(sides)
    length = _shared_length(sides)
    said = [message.get("content") for message in sides[0][:length]]
    if not any(isinstance(words, str) and question.strip() in words for words in said):
        raise ValueError(
            f"its prompt {question[:60]!r} is none of the messages that its answers begin with, so what they answer "
            "could not be told. Remove the prompt column if they are whole conversations"
        )
    return sides[0][:length], [side[length:] for side in sides]


def _shared_length(sides: Sequence[Words]) -> int:
    """How much all `sides` begin with. A conversation keeps its last message, for it is the answer."""
    first, last = sides[0], min(map(len, sides))
    if isinstance(first, str):
        if len(sides) == 1:
            raise ValueError('where its prompt ends could not be told from one text; add a "prompt" column')
        length = min(common_length(first, side) for side in sides[1:])
        return length - first[:length].endswith(" ")
    return min([last - 1, *(common_length(first, side) for side in sides[1:])])


def common_length(a: Sequence, b: Sequence) -> int:
    """How many elements `a` and `b` begin with in common."""
    bound = min(len(a), len(b))
    if a[:bound] == b[:bound]:
        return bound
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def _is_messages(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and all(isinstance(m, Mapping) for m in value)
    )


def _missing(row: Row, columns: Sequence[str], missing: Sequence[str]) -> str:
    found = sorted(name for name, value in row.items() if value is not None)
    needed, absent = (" and ".join(map(repr, names)) for names in (columns, missing))
    return f"it needs {needed}, but there is no {absent} among its columns {found}"


def _ranked(row: Row) -> list[Any]:
    """The row's completions, best first. Raises ValueError for fewer than two, for steps, and for scores that are
    equal."""
    if isinstance(row["completions"], str):
        raise ValueError("its completions are one text; write them as a list, the best first")
    completions = list(row["completions"])
    if len(completions) < 2:
        raise ValueError(f"it has {len(completions)} completions, but a ranking compares two or more. Drop the row")
    if row.get("labels") is not None:
        raise ValueError(
            "it has labels, so its completions are the steps of one solution and no ranking. Train a process reward "
            "model on it (PRMTrainer, `strop prm`), or remove the column"
        )
    given = [name for name in ("scores", "ranks") if row.get(name) is not None]
    if len(given) == 2:
        raise ValueError("it has scores and ranks, which may contradict each other; leave one of the columns out")
    if not given:
        return completions
    numbers = list(row[given[0]])
    if len(numbers) != len(completions) or not all(isinstance(n, int | float) and n == n for n in numbers):
        raise ValueError(f"its {given[0]} are {numbers}, but each of its {len(completions)} completions needs a number")
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"its {given[0]} {numbers} tie, but a ranking needs an order; drop the row, or all but one of equals"
        )
    order = sorted(range(len(numbers)), key=lambda i: numbers[i], reverse=given[0] == "scores")
    return [completions[i] for i in order]


# Public helpers


def extract_prompt(example: Row) -> dict[str, Any]:
    """The row with what its sides begin with alike as `prompt`, and the rest as sides; other columns stay.

    Sides are chosen, rejected and, where there is one, reference: texts or lists of messages. Prompt + side is always
    what the side was.
    """
    sides = [side for side in TRIPLES.sides if example.get(side) is not None]
    prompt, rest = separated(None, [example[side] for side in sides])
    return {**example, "prompt": prompt, **dict(zip(sides, rest, strict=True))}


def maybe_extract_prompt(example: Row) -> dict[str, Any]:
    """`extract_prompt` for a pair whose sides bring their prompt, also beside a prompt column; other rows come back as
    they are."""
    if not {"chosen", "rejected"} <= set(example):
        return dict(example)
    sides = [side for side in TRIPLES.sides if example.get(side) is not None]
    prompt, rest = separated(example.get("prompt"), [example[side] for side in sides])
    return {**example, "prompt": prompt, **dict(zip(sides, rest, strict=True))}


Rows = Any
"""A Dataset or IterableDataset, or a dictionary of them."""


def unpair_preference_dataset(dataset: Rows, **map_kwargs: Any) -> Rows:
    """Each pair as two rows with `completion` and `label`: chosen (True), then rejected (False); other columns twice.

    The order is the same whatever the batch size of the map, and each prefix of the data set is balanced.
    """
    return dataset.map(_unpaired, batched=True, remove_columns=list(PAIRS.sides), **map_kwargs)


def _unpaired(batch: Mapping[str, list]) -> dict[str, list]:
    both = zip(batch["chosen"], batch["rejected"], strict=True)
    rest = {
        name: [value for value in values for _ in PAIRS.sides]
        for name, values in batch.items()
        if name not in PAIRS.sides
    }
    return rest | {
        "completion": [side for pair in both for side in pair],
        "label": [True, False] * len(batch["chosen"]),
    }


def maybe_unpair_preference_dataset(dataset: Rows, num_proc: int | None = None, desc: str | None = None) -> Rows:
    """`unpair_preference_dataset` for a data set of pairs; others come back as they are."""
    first = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    columns = first.column_names or list(next(iter(first)))
    if not set(PAIRS.sides) <= set(columns):
        return dataset
    if not isinstance(first, IterableDataset):
        return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc)
    if num_proc is not None:
        raise ValueError(
            f"num_proc={num_proc} would have no effect on a stream, which is mapped as it is read; remove it"
        )
    return unpair_preference_dataset(dataset)
