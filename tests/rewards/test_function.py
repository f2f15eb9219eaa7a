"""What a reward function is given, and what it may give back."""

import functools
import math

import numpy as np
import pytest
import torch

from strop.rewards.function import RewardFunction, name_of, unique

GIVEN = {"prompts": ["p"], "completions": ["c"], "completion_ids": [[1]], "answer": ["a"], "log_extra": print}


def nothing(completions, **kwargs):
    return [0.0] * len(completions)


class Scorer:
    def __call__(self, completions, answer):
        return [1.0]


class AsyncScorer:
    async def __call__(self, completions, **kwargs):
        return [1.0]


def test_a_function_gets_what_it_names_and_everything_if_it_takes_keywords():
    assert RewardFunction(nothing).arguments(GIVEN) == GIVEN
    assert RewardFunction(lambda completions: [0]).arguments(GIVEN).keys() == {"completions"}
    assert RewardFunction(Scorer()).arguments(GIVEN).keys() == {"completions", "answer"}
    assert RewardFunction(functools.partial(Scorer(), answer="b")).arguments(GIVEN).keys() == {"completions", "answer"}


@pytest.mark.parametrize(
    ("function", "is_async"),
    [(nothing, False), (Scorer(), False), (AsyncScorer(), True), (functools.partial(AsyncScorer()), True)],
)
def test_asynchronous_ones_are_known(function, is_async):
    assert RewardFunction(function).is_async is is_async


def test_names():
    assert [name_of(f) for f in (nothing, functools.partial(nothing, a=1), Scorer())] == [
        "nothing",
        "nothing",
        "Scorer",
    ]
    assert unique(["f", "g", "f", "f", "f_2"]) == ["f", "g", "f_2", "f_3", "f_2_2"]


@pytest.mark.parametrize(
    "returned",
    [
        [1, None],
        (True, None),
        (value for value in (1.0, None)),
        [torch.tensor(1.0), None],
        [torch.tensor([1.0]), None],
        [np.float32(1), None],
        np.array([[1], [None]]),
    ],
)
def test_numbers_in_any_container_and_none_where_it_does_not_apply(returned):
    found = RewardFunction(nothing).rewards(returned, 2)
    assert found.dtype == torch.float32
    assert found[0] == 1
    assert math.isnan(found[1])


@pytest.mark.parametrize(
    "returned",
    [
        torch.tensor([[1.0], [2.0]], requires_grad=True),
        torch.tensor([1, 2]),
        np.array([1, 2]),
        torch.tensor([1.0, 2.0]).bfloat16(),
    ],
)
def test_tensors_and_arrays_of_one_or_two_dimensions(returned):
    assert RewardFunction(nothing).rewards(returned, 2).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "nothing returned None"),
        (1.0, "nothing returned float '1.0'"),
        (torch.tensor(1.0), "nothing returned float"),
        ({"a": 1, "b": 2}, "nothing returned dict"),
        ("ab", "nothing returned str 'ab'"),
        ([1.0], "nothing returned 1 values for 2 completions"),
        ([1.0, 2.0, 3.0], "nothing returned 3 values for 2 completions"),
        ([0.0, "1.0"], "nothing returned '1.0' for row 1"),
        ([0.0, math.nan], "nothing returned 'nan' for row 1"),
        ([math.inf, 0.0], "nothing returned 'inf' for row 0"),
        ([0.0, 10**400], "nothing returned '1000"),
        ([0.0, 1e39], "nothing returned '1e[+]39' for row 1"),
        ([0.0, -math.inf], "nothing returned '-inf' for row 1"),
        (torch.tensor([0.0, math.nan]), "nothing returned 'nan' for row 1"),
        ([[1.0, 2.0], 0.0], r"nothing returned '\[1.0, 2.0\]' for row 0"),
    ],
)
def test_what_is_no_list_of_rewards_is_refused_with_the_function_and_the_row(returned, message):
    with pytest.raises(ValueError, match=message):
        RewardFunction(nothing).rewards(returned, 2)


def test_a_column_that_the_rows_lack_is_known_before_the_first_call():
    function = RewardFunction(Scorer())
    function.check(["answer", "level"])
    with pytest.raises(ValueError, match=r"Scorer needs 'answer', which the rows lack.*Did you mean 'answers'\?"):
        function.check(["answers"])
    ids = RewardFunction(lambda completion_ids: [], "ids")
    ids.check([])
    with pytest.raises(
        ValueError, match=r"ids needs 'completion_ids', which the rows lack .there is no tokenizer here"
    ):
        ids.check([], has_ids=False)


def test_a_function_that_says_it_cannot_work_is_believed():
    def checked(completions):
        return []

    def refuse():
        raise ValueError("no engine")

    checked.check = refuse
    with pytest.raises(ValueError, match="no engine"):
        RewardFunction(functools.partial(checked)).check([])


def test_what_cannot_be_called_by_name_is_refused():
    with pytest.raises(ValueError, match="can't be called"):
        RewardFunction("accuracy")
    with pytest.raises(ValueError, match="takes texts by position"):
        RewardFunction(lambda texts, /: [])
