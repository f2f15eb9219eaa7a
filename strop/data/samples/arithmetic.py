"""Worded arithmetic problems with worked steps and a checkable answer, made from a seed.

A completion works the problem one line a step and ends with the line "Answer: N". Problems are dealt to the splits by a
hash of their own text, so no problem is in both, whatever the seeds and numbers asked for.
"""

import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple
from zlib import crc32

SYSTEM_PROMPT = 'Work step by step. Close with a line "Answer: " and the number.'
SPLITS = ("train", "heldout")
HELDOUT_ONE_IN = 5
MOST_MISSES = 100_000
"""Draws in succession without a new problem, after which there is none left."""

NAMES = [
    "Ada",
    "Ben",
    "Clara",
    "Dev",
    "Elif",
    "Femi",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Liam",
    "Mona",
    "Nils",
    "Olga",
    "Pedro",
    "Rosa",
    "Sami",
    "Tara",
    "Yuki",
]
THINGS = [
    "apples",
    "beads",
    "books",
    "buttons",
    "cards",
    "cups",
    "eggs",
    "marbles",
    "pencils",
    "plums",
    "shells",
    "tiles",
]


class Problem(NamedTuple):
    """A question, the lines that work it out, and the number they arrive at."""

    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def completion(self) -> str:
        return "\n".join((*self.steps, f"Answer: {self.answer}"))

    @property
    def largest(self) -> int:
        """The largest number in its steps."""
        return max(int(number) for step in self.steps for number in re.findall(r"\d+", step))


def packs_less_some(rng: random.Random) -> Problem:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    packs, size = rng.randint(2, 9), rng.randint(3, 12)
    total = packs * size
    given = rng.randint(1, total - 1)
    return Problem(
        f"{name} buys {packs} packs of {size} {things} and gives {given} {things} away. How many {things} are left?",
        (f"{packs} * {size} = {total}", f"{total} - {given} = {total - given}"),
        total - given,
    )


def earned_and_spent(rng: random.Random) -> Problem:
    name = rng.choice(NAMES)
    start, earned = rng.randint(5, 60), rng.randint(5, 40)
    total = start + earned
    spent = rng.randint(1, total - 1)
    return Problem(
        f"{name} has {start} euros, earns {earned} euros and spends {spent} euros. How many euros are left?",
        (f"{start} + {earned} = {total}", f"{total} - {spent} = {total - spent}"),
        total - spent,
    )


def pages_read(rng: random.Random) -> Problem:
    name = rng.choice(NAMES)
    pages, days, last = rng.randint(5, 20), rng.randint(2, 7), rng.randint(3, 30)
    total = pages * days
    return Problem(
        f"{name} reads {pages} pages a day for {days} days and {last} pages on the day after. "
        f"How many pages does {name} read in all?",
        (f"{pages} * {days} = {total}", f"{total} + {last} = {total + last}"),
        total + last,
    )


def shared_equally(rng: random.Random) -> Problem:
    things = rng.choice(THINGS)
    bags, size_per_child, children = rng.randint(2, 6), rng.randint(1, 4), rng.randint(2, 8)
    size = size_per_child * children
    total = bags * size
    return Problem(
        f"{bags} bags hold {size} {things} each. {children} children share all of them equally. "
        f"How many {things} does each child get?",
        (f"{bags} * {size} = {total}", f"{total} / {children} = {total // children}"),
        total // children,
    )


def change_from_a_note(rng: random.Random) -> Problem:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    note, price = rng.choice((50, 100)), rng.randint(2, 8)
    num = rng.randint(2, 49 // price)
    cost = num * price
    return Problem(
        f"{name} buys {num} {things} at {price} euros each and pays with {note} euros. How many euros come back?",
        (f"{num} * {price} = {cost}", f"{note} - {cost} = {note - cost}"),
        note - cost,
    )


def on_and_off_the_bus(rng: random.Random) -> Problem:
    start, off_first = rng.randint(12, 40), rng.randint(2, 10)
    on, off_second = rng.randint(3, 15), rng.randint(1, 4)
    after_first = start - off_first
    after_on = after_first + on
    return Problem(
        f"A bus carries {start} people. {off_first} get off, {on} get on, and then {off_second} get off. "
        "How many people are on the bus?",
        (
            f"{start} - {off_first} = {after_first}",
            f"{after_first} + {on} = {after_on}",
            f"{after_on} - {off_second} = {after_on - off_second}",
        ),
        after_on - off_second,
    )


def two_beds(rng: random.Random) -> Problem:
    rows, plants = rng.randint(2, 9), rng.randint(3, 12)
    more_rows, more_plants = rng.randint(2, 9), rng.randint(3, 12)
    first, second = rows * plants, more_rows * more_plants
    return Problem(
        f"One bed has {rows} rows of {plants} plants, another has {more_rows} rows of {more_plants} plants. "
        "How many plants are there?",
        (
            f"{rows} * {plants} = {first}",
            f"{more_rows} * {more_plants} = {second}",
            f"{first} + {second} = {first + second}",
        ),
        first + second,
    )


def times_as_old(rng: random.Random) -> Problem:
    younger, older = rng.sample(NAMES, 2)
    age, factor, years = rng.randint(3, 15), rng.randint(2, 5), rng.randint(2, 12)
    return Problem(
        f"{younger} is {age} years old and {older} is {factor} times as old. How old will {older} be in {years} years?",
        (f"{age} * {factor} = {age * factor}", f"{age * factor} + {years} = {age * factor + years}"),
        age * factor + years,
    )


TEMPLATES: tuple[Callable[[random.Random], Problem], ...] = (
    packs_less_some,
    earned_and_spent,
    pages_read,
    shared_equally,
    change_from_a_note,
    on_and_off_the_bus,
    two_beds,
    times_as_old,
)


def arithmetic_problems(num: int, split: str = "train", seed: int = 0, largest: int | None = None) -> list[Problem]:
    """`num` different problems of a split, the templates in turn, their steps without numbers above `largest`.

    Raises ValueError for an unknown split, and for a `largest` that leaves too few problems.
    """
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r} of the arithmetic problems; choose one of {', '.join(SPLITS)}")
    problems: dict[str, Problem] = {}
    misses, stream = 0, _problems(random.Random(seed))
    while len(problems) < num:
        problem = next(stream)
        is_wanted = split_of(problem.question) == split and (largest is None or problem.largest <= largest)
        misses = 0 if is_wanted and problem.question not in problems else misses + 1
        if misses > MOST_MISSES:
            raise ValueError(f"largest={largest} leaves {len(problems)} problems, not {num}; raise it, or take fewer.")
        if is_wanted:
            problems.setdefault(problem.question, problem)
    return list(problems.values())


def _problems(rng: random.Random) -> Iterator[Problem]:
    while True:
        for template in TEMPLATES:
            yield template(rng)


def split_of(question: str) -> str:
    """The split that a question belongs to, for good."""
    return "heldout" if crc32(question.encode()) % HELDOUT_ONE_IN == 0 else "train"


def arithmetic_rows(num: int, split: str = "train", seed: int = 0, largest: int | None = None) -> list[dict]:
    """`arithmetic_problems` as rows of prompt, completion (both messages) and answer."""
    return [
        {
            "prompt": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": problem.question},
            ],
            "completion": [{"role": "assistant", "content": problem.completion}],
            "answer": problem.answer,
        }
        for problem in arithmetic_problems(num, split, seed, largest)
    ]


def stated_answer(completion: str) -> int | None:
    """The number in a completion's last line if that line is "Answer: N" and nothing else."""
    lines = completion.strip().splitlines()
    match = re.fullmatch(r"Answer: (-?\d+)", lines[-1].strip()) if lines else None
    return int(match[1]) if match else None


def answer_is_well_formed(completion: str) -> bool:
    """The completion ends with a line "Answer: N"."""
    return stated_answer(completion) is not None


def is_correct(completion: str, answer: int) -> bool:
    """The completion ends with a line "Answer: N" and N is `answer`."""
    return stated_answer(completion) == answer
