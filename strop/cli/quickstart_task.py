"""What the quickstart trains and measures on: embedded problems of arithmetic, or a user's own rows."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop.data.formats import Row, maybe_convert_to_chatml
from strop.data.prompts import maybe_extract_prompt
from strop.data.samples.arithmetic import answer_is_well_formed, arithmetic_rows, is_correct
from strop.data.samples.chat import chat_rows
from strop.rewards.texts import Words, texts_of

LARGEST_NUMBER = 30
ONE_CHAT_ROW_IN = 8
NUM_ANSWERED = 64
"""Problems to which the model writes answers that `dpo` compares."""
NUM_ASKED = 160
"""Problems that `grpo` asks."""
MOST_OWN_HELDOUT = 24


@dataclass(frozen=True)
class Task:
    """Rows for each stage, rows held out, and what is measured on these (`strop.evaluate`)."""

    stages: tuple[str, ...]
    """What there are rows for."""
    heldout: Sequence[Row]
    metrics: list[Any]
    texts: Sequence[Row]
    """For sft."""
    pairs: Sequence[Row] = ()
    """For dpo; where there are none, answers to `answered` are compared."""
    answered: Sequence[Row] = ()
    asked: Sequence[Row] = ()
    """For grpo."""


def well_formed(completions: Sequence[Words], **columns: Any) -> list[float]:
    """1 for an answer that ends in a line "Answer: N"."""
    return [float(answer_is_well_formed(text)) for text in texts_of(completions)]


def correct(completions: Sequence[Words], answer: Sequence[int], **columns: Any) -> list[float]:
    """1 for an answer that ends in a line "Answer: N" with the right N."""
    return [float(is_correct(text, number)) for text, number in zip(texts_of(completions), answer, strict=True)]


def answered(completions: Sequence[Words], **columns: Any) -> list[float]:
    """1 for an answer that isn't empty: own rows have no check, but their answers are worth seeing."""
    return [float(bool(text.strip())) for text in texts_of(completions)]


def embedded_task(num_texts: int, num_heldout: int, seed: int) -> Task:
    """Worded arithmetic with small numbers; each stage has problems of its own, sft some conversations besides."""
    chats = [last_turn(row["messages"]) for row in chat_rows("train")][: num_texts // ONE_CHAT_ROW_IN]
    num_worked = num_texts - len(chats)
    problems = arithmetic_rows(num_worked + NUM_ANSWERED + NUM_ASKED, "train", seed, LARGEST_NUMBER)
    return Task(
        stages=("sft", "dpo", "grpo"),
        heldout=arithmetic_rows(num_heldout, "heldout", seed, LARGEST_NUMBER),
        metrics=["loss", well_formed, correct],
        texts=problems[:num_worked] + chats,
        answered=problems[num_worked : num_worked + NUM_ANSWERED],
        asked=problems[num_worked + NUM_ANSWERED :],
    )


def own_task(path: str, seed: int) -> Task:
    """A user's rows, shuffled, an eighth (at most 24) held out: texts for sft, or pairs, of which it learns the better.

    Raises ValueError for fewer than two.
    """
    from strop.data.sources import load_rows

    loaded: Any = load_rows(path, "train")
    rows = [maybe_convert_to_chatml(row) for row in loaded]
    if len(rows) < 2:
        raise ValueError(f"{path} has {len(rows)} rows: at least one to train on and one to measure on are needed.")
    random.Random(seed).shuffle(rows)
    has_pairs = {"chosen", "rejected"} <= rows[0].keys()
    if has_pairs:
        rows = [with_completion(maybe_extract_prompt(row)) for row in rows]
    num_heldout = max(1, min(MOST_OWN_HELDOUT, len(rows) // 8))
    heldout, train = rows[:num_heldout], rows[num_heldout:]
    return Task(
        stages=("sft", "dpo") if has_pairs else ("sft",),
        heldout=heldout,
        metrics=["loss", *(["pairs"] if has_pairs else []), *([answered] if has_prompt(heldout[0]) else [])],
        texts=train,
        pairs=train if has_pairs else [],
    )


def last_turn(messages: list[dict]) -> Row:
    """A conversation as a prompt and its last answer."""
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def with_completion(pair: Row) -> Row:
    """A pair that is a row for sft, too: its better answer is the completion."""
    return {**{name: pair[name] for name in ("prompt", "chosen", "rejected")}, "completion": pair["chosen"]}


def has_prompt(row: Row) -> bool:
    """There is something to answer; a row that is one text has nothing."""
    messages = row.get("messages")
    return "prompt" in row or bool(messages and messages[-1]["role"] == "assistant" and len(messages) > 1)


def question_of(prompt: Words) -> str:
    """The last thing said in a prompt."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
