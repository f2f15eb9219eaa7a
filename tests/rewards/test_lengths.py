"""Rewards that look at token ids: TRL's numbers, and numbers on paper."""

import json
import pickle
from pathlib import Path

import pytest

from strop.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "rewards.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["soft_overlong_punishment"])
def test_overlong_completions_are_punished_as_in_trl(case):
    reward = get_soft_overlong_punishment(case["max_completion_len"], case["soft_punish_cache"])
    assert reward(completion_ids=[[0] * case["length"]]) == pytest.approx([case["reward"]], abs=1e-12)


@pytest.mark.parametrize("case", GOLDEN["repetition_penalty"])
def test_repetition_is_punished_as_in_trl(case):
    reward = get_repetition_penalty_reward(case["ngram_size"], case["max_penalty"])
    assert reward(completion_ids=[case["ids"]]) == pytest.approx([case["reward"]], abs=1e-12)


def test_repetition_on_paper():
    """1 2 1 2 1 has the pairs 12 21 12 21: half of them were there before."""
    assert get_repetition_penalty_reward(2, -3.0)(completion_ids=[[1, 2, 1, 2, 1]]) == [-1.5]


def test_they_keep_their_names_and_travel_to_other_processes():
    for reward, name in (
        (get_soft_overlong_punishment(8, 2), "soft_overlong_punishment_reward"),
        (get_repetition_penalty_reward(), "repetition_penalty_reward"),
    ):
        copy = pickle.loads(pickle.dumps(reward))
        assert copy.__name__ == name
        assert copy(completion_ids=[[1] * 7]) == reward(completion_ids=[[1] * 7])


def test_what_would_reward_the_wrong_thing_is_refused():
    with pytest.raises(ValueError, match=r"max_penalty=0\.5 would reward repetition"):
        get_repetition_penalty_reward(max_penalty=0.5)
    with pytest.raises(ValueError, match="ngram_size=0"):
        get_repetition_penalty_reward(0)
    with pytest.raises(ValueError, match="soft_punish_cache=-1"):
        get_soft_overlong_punishment(10, -1)
