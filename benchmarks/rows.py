"""Rows for the benchmarks: seeded word problems with worked answers, and documents with the lengths of real ones.

In the tokens of SmolLM2 a problem takes 55 to 105 (77 in the mean), its answer 73 to 197 (124 in the mean).
"""

import random
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

NAMES = ["Nora", "Idris", "Maren", "Tomas", "Aiko", "Bela", "Chidi", "Dalia", "Emre", "Freya"]
GOODS = [("jars", "honey"), ("bags", "flour"), ("boxes", "tea"), ("bundles", "firewood"), ("baskets", "plums")]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]


def sold(rng, have, unit):
    n = rng.randint(2, have // 2)
    left = have - n
    return left, f"sells {n} {unit} to a neighbour", f"{n} {unit} are sold, so {have} - {n} = {left} {unit} are left"


def delivered(rng, have, unit):
    crates, each = rng.randint(2, 9), rng.randint(3, 15)
    more, total = crates * each, have + crates * each
    return (
        total,
        f"picks up {crates} crates with {each} {unit} in each",
        f"{crates} crates of {each} are {crates} * {each} = {more}, so there are {have} + {more} = {total} {unit}",
    )


def shared(rng, have, unit):
    friends = rng.randint(2, 4)
    each = rng.randint(1, have // (2 * friends))
    given, left = friends * each, have - friends * each
    return (
        left,
        f"gives {each} {unit} to each of {friends} friends",
        f"{friends} friends get {friends} * {each} = {given}, so {have} - {given} = {left} {unit} are left",
    )


def word_problems(count: int, seed: int = 0) -> list[dict[str, str]]:
    """`count` rows with the texts "question" and "answer"; the answer ends in "#### number"."""
    rng = random.Random(seed)
    return [word_problem(rng) for _ in range(count)]


def word_problem(rng: random.Random) -> dict[str, str]:
    name, (unit, goods), have = rng.choice(NAMES), rng.choice(GOODS), rng.randint(20, 90)
    question = [f"{name} has a market stall and starts the week with {have} {unit} of {goods}."]
    answer = [f"{name} starts with {have} {unit} of {goods}."]
    for day in DAYS[: rng.choice([2, 3, 3, 4])]:
        have, event, worked = rng.choice([sold, delivered, shared] if have >= 8 else [delivered])(rng, have, unit)
        question.append(f"On {day} {name} {event}.")
        answer.append(f"On {day} {worked}.")
    question.append(f"How many {unit} of {goods} does {name} have in the end?")
    answer.append(f"So in the end {name} has {have} {unit} of {goods}.\n#### {have}")
    return {"question": " ".join(question), "answer": " ".join(answer)}


def prompt_completion(count: int) -> Dataset:
    """Conversations as prompt and completion."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["question"]}],
                "completion": [{"role": "assistant", "content": row["answer"]}],
            }
            for row in word_problems(count)
        ]
    )


def messages(count: int) -> Dataset:
    """The same conversations as lists of messages."""
    return prompt_completion(count).map(
        lambda row: {"messages": row["prompt"] + row["completion"]}, remove_columns=["prompt", "completion"]
    )


def pairs(tokenizer: Any, count: int, prompt: int, answer: int) -> Dataset:
    """Pairs of two answers to a prompt, of so many tokens each (but one or two at the seams)."""
    rng = random.Random(0)
    words = [word for row in word_problems(200) for word in row["question"].split()]

    def text(num_tokens: int) -> str:
        ids = tokenizer(" ".join(rng.choices(words, k=num_tokens + 8))).input_ids
        return tokenizer.decode(ids[:num_tokens])

    return Dataset.from_list(
        [{"prompt": text(prompt), "chosen": " " + text(answer), "rejected": " " + text(answer)} for _ in range(count)]
    )


def documents(count: int) -> Dataset:
    """Tokenised documents of 8 to 6000 tokens, lognormal with a median of 245: most short, a few very long."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 0.9, count), 8, 6000).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = rng.integers(0, 40_000, offsets[-1], dtype=np.int32)
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))})
    # a fingerprint of one's own saves hashing copies of all tokens, which would hide what packing itself takes
    return Dataset(table, fingerprint=f"documents-{count}")
