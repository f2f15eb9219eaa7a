"""The data that comes with the package: sums are right, splits are disjoint, checks tell right from wrong."""

import random
import re

import pytest

from strop.data.samples.arithmetic import (
    TEMPLATES,
    answer_is_well_formed,
    arithmetic_problems,
    arithmetic_rows,
    is_correct,
    stated_answer,
)
from strop.data.samples.chat import chat_rows

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.__name__)
def test_every_step_is_true_and_follows_from_what_is_known(template):
    for seed in range(200):
        problem = template(random.Random(seed))
        known = {int(number) for number in re.findall(r"\d+", problem.question)}
        for step in problem.steps:
            left, sign, right, result = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step).groups()
            left, right, result = int(left), int(right), int(result)
            assert {left, right} <= known
            assert OPERATIONS[sign](left, right) == result
            assert sign != "/" or left % right == 0
            known.add(result)
        assert problem.answer == result > 0
        assert is_correct(problem.completion, problem.answer)


def test_a_seed_is_a_data_set_and_splits_never_meet():
    assert arithmetic_rows(50, seed=3) == arithmetic_rows(50, seed=3)
    assert arithmetic_rows(50, seed=3) != arithmetic_rows(50, seed=4)
    train = {p.question for seed in range(5) for p in arithmetic_problems(400, "train", seed)}
    heldout = {p.question for seed in range(5) for p in arithmetic_problems(400, "heldout", seed)}
    assert not train & heldout
    assert len({p.question for p in arithmetic_problems(400)}) == 400


def test_small_numbers_are_a_part_of_the_problems():
    small = arithmetic_problems(100, "train", largest=30)
    assert max(int(number) for p in small for step in p.steps for number in re.findall(r"\d+", step)) == 30
    assert {p.question for p in small[:20]} <= {p.question for p in arithmetic_problems(400)}  # no other stream
    with pytest.raises(ValueError, match=r"largest=2 leaves 0 problems, not 1"):
        arithmetic_problems(1, largest=2)


def test_the_answer_is_a_line_of_its_own_at_the_end():
    assert stated_answer("3 * 4 = 12\nAnswer: 12\n") == 12
    assert stated_answer("Answer: -3") == -3
    for wrong in ("", "12", "Answer: 12.", "Answer: twelve", "The Answer: 12", "Answer: 12\nIs that right?"):
        assert not answer_is_well_formed(wrong)
    assert answer_is_well_formed("Answer: 11")
    assert not is_correct("Answer: 11", 12)


def test_conversations_alternate_and_splits_never_meet():
    train, heldout = chat_rows("train"), chat_rows("heldout")
    for row in train + heldout:
        roles = [message["role"] for message in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert all(message["content"].strip() for message in row["messages"])
    prompts = [{str(row["messages"][:-1]) for row in split} for split in (train, heldout)]
    assert not prompts[0] & prompts[1]
    assert len(prompts[0] | prompts[1]) == len(train) + len(heldout)


def test_unknown_splits_are_refused():
    for rows in (lambda: arithmetic_rows(1, "test"), lambda: chat_rows("test")):
        with pytest.raises(ValueError, match=r"no split 'test'.*train, heldout"):
            rows()
