"""What judges of any kind say of pairs: one scale, whichever way they are asked."""

import math

import pytest

from strop.rewards import BasePairwiseJudge, RewardFunctions
from strop.rewards.verdicts import (
    AllTrueJudge,
    BaseBinaryJudge,
    BaseRankJudge,
    RandomPairwiseJudge,
    RandomRankJudge,
    RewardJudge,
    preference,
    verdicts,
)

PAIRS = [("aa", "b"), ("a", "bb"), ("a", "b"), ("?", "a")]
PROMPTS = ["p"] * len(PAIRS)


class Longer(BasePairwiseJudge):
    """Remembers in which order it was shown the pairs."""

    def compare(self, prompts, pairs, flipped):
        self.flipped = flipped
        return [float(len(a) > len(b)) for a, b in pairs]


class LongerByIndex:
    """As judges of TRL are: the index of the better one, -1 for none."""

    def judge(self, prompts, completions, shuffle_order=True):
        assert not shuffle_order
        self.shown = completions
        return [-1 if "?" in pair else int(len(pair[1]) > len(pair[0])) for pair in completions]


class LongerByRank(BaseRankJudge):
    def judge(self, prompts, completions, shuffle_order=True):
        return [[] if "?" in c else sorted(range(len(c)), key=lambda i: -len(c[i])) for c in completions]


class Says(BaseBinaryJudge):
    def __init__(self, *texts):
        self.texts = texts

    def judge(self, prompts, completions, gold_completions=None, shuffle_order=True):
        return [-1 if c == "?" else int(c in self.texts) for c in completions]


class ByIndex(LongerByIndex, BasePairwiseJudge):
    """A subclass that writes `judge` alone."""


@pytest.mark.parametrize("judge", [LongerByIndex(), ByIndex()], ids=["foreign", "subclass"])
@pytest.mark.parametrize("seed", range(4))
def test_an_index_is_turned_back_where_the_pair_was(judge, seed):
    """And no verdict stays none, which TRL makes a 2."""
    assert verdicts(judge, PROMPTS, PAIRS, seed) == [1.0, 0.0, judge.shown[2] == ["a", "b"], None]


def test_half_of_the_pairs_are_shown_the_other_way_round():
    judge = Longer()
    pairs = [(str(i), "x") for i in range(400)]
    verdicts(judge, ["p"] * 400, pairs)
    assert 160 < sum(judge.flipped) < 240
    whole = judge.flipped
    verdicts(judge, ["p"] * 100, pairs[300:])  # the order follows from the texts
    assert judge.flipped == whole[300:]
    verdicts(judge, ["p"] * 400, pairs, shuffle_order=False)
    assert not any(judge.flipped)


def test_ranks_and_passing_are_verdicts_too():
    assert verdicts(LongerByRank(), PROMPTS, PAIRS) == [1.0, 0.0, 1.0, None]
    assert verdicts(Says("aa", "b"), PROMPTS, PAIRS) == [0.5, 0.5, 0.0, None]


def test_all_must_pass():
    judge = AllTrueJudge([Says("a", "b"), Says("a", "c")])
    assert judge.judge(["p"] * 4, ["a", "b", "c", "?"]) == [1, 0, 0, -1]
    assert RewardFunctions(judge).score(["p"] * 3, ["a", "b", "?"]).values.nan_to_num(7).tolist() == [[1], [0], [7]]
    for wrong in ([], [Longer()]):
        with pytest.raises(ValueError, match="BaseBinaryJudge"):
            AllTrueJudge(wrong)


def test_rewards_judge_as_bradley_and_terry():
    def length(completions, **_):
        return [None if c == "?" else float(len(c)) for c in completions]

    def first_letter(completions, **_):
        return [float(c < "b") for c in completions]

    judge = RewardJudge([length, first_letter], [1.0, 0.5])
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    found = verdicts(judge, PROMPTS, PAIRS)
    assert found == pytest.approx([sigmoid(1.5), sigmoid(-0.5), sigmoid(0.5), sigmoid(0.5 - 1.5)])
    assert verdicts(RewardJudge(length), PROMPTS, PAIRS)[3] is None


def test_preferences_of_rewards():
    assert preference(1.0, 1.0) == 0.5
    assert preference(1000.0, 0.0) == 1.0
    assert preference(0.0, 1000.0) == 0.0
    assert preference(0.0, 30.0) == pytest.approx(math.exp(-30), rel=1e-9)
    assert preference(math.nan, 0.0) is None


def test_chance_is_no_preference_and_repeats_itself():
    prompts, pairs = [f"p{i}" for i in range(400)], [("a", "b")] * 400
    found = verdicts(RandomPairwiseJudge(), prompts, pairs)
    assert 160 < sum(found) < 240
    assert verdicts(RandomPairwiseJudge(), prompts[7:], pairs[7:]) == found[7:]
    assert verdicts(RandomPairwiseJudge(1), prompts, pairs) != found
    ranks = RandomRankJudge().judge(prompts, [["a", "b", "c"]] * 400)
    assert all(sorted(rank) == [0, 1, 2] for rank in ranks)
    assert 90 < sum(rank[0] == 2 for rank in ranks) < 180
    assert 160 < sum(verdicts(RandomRankJudge(), prompts, pairs)) < 240


class Returns(BasePairwiseJudge):
    def __init__(self, found):
        self.found = found

    def compare(self, prompts, pairs, flipped):
        return self.found


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (Returns([1.0]), "1 verdicts for 4 pairs"),
        (Returns([1.0, 0.0, 0.5, 1.5]), r"returned 1\.5"),
        (Returns([1.0, 0.0, 0.5, math.nan]), "returned nan"),
        (print, "no method `judge`"),
    ],
    ids=["too few", "too large", "nan", "no judge"],
)
def test_what_is_no_verdict_is_refused(judge, message):
    with pytest.raises(ValueError, match=message):
        verdicts(judge, PROMPTS, PAIRS)


def test_a_judge_without_a_method_says_which_it_lacks():
    with pytest.raises(TypeError, match="must define `compare`"):
        verdicts(type("Empty", (BasePairwiseJudge,), {})(), PROMPTS, PAIRS)
