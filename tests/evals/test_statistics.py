"""Intervals hold what they say they hold, exact tests are exact, and pass@k is what choosing k of n samples gives."""

import itertools
import math
import random
from fractions import Fraction

import pytest

from strop.evals.statistics import (
    Difference,
    Total,
    mean,
    mean_difference,
    pass_at_k,
    proportion,
    proportion_difference,
    sign_test,
    student_inside,
    student_quantile,
)


def singles(values):
    return [Total(float(value)) for value in values]


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (7, 3), (8, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n, c):
    correct = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(correct, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)
    values = [pass_at_k(n, c, k) for k in range(1, n + 1)]
    assert values[0] == c / n
    assert values == sorted(values)


def test_pass_at_k_of_many_samples_loses_nothing_to_rounding():
    n, c, k = 10_000, 1, 3
    assert pass_at_k(n, c, k) == float(Fraction(k, n))
    assert pass_at_k(2000, 1999, 1) == 1999 / 2000
    assert pass_at_k(n, 5000, 5001) == 1.0


def test_pass_at_k_is_unbiased():
    """Its mean over n samples of a coin with chance p is 1 - (1 - p)^k, which 1 - (1 - c/n)^k overshoots or misses."""
    n, k, p = 6, 4, 0.3
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    plugged_in = sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
    assert abs(plugged_in - (1 - (1 - p) ** k)) > 0.02


@pytest.mark.parametrize("wrong", [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_refuses_what_is_not_defined(wrong):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(*wrong)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062047), (2, 4.30265273), (3, 3.18244631), (10, 2.22813885), (29, 2.04522964), (1000, 1.96233908)],
)
def test_students_quantiles_are_those_of_the_tables(freedom, quantile):
    assert student_quantile(0.95, freedom) == pytest.approx(quantile, rel=1e-8)
    assert student_inside(quantile, freedom) == pytest.approx(0.95, abs=1e-8)


def test_student_becomes_normal_without_a_step():
    assert student_quantile(0.95, 10_000) == pytest.approx(student_quantile(0.95, 9_999), rel=2e-4)


def test_wilson_of_eight_in_ten():
    found = proportion(singles([1] * 8 + [0] * 2))
    z2 = 1.959963984540054**2
    centre, half = (0.8 + z2 / 20) / (1 + z2 / 10), math.sqrt(z2) / (1 + z2 / 10) * math.sqrt(0.016 + z2 / 400)
    assert (found.value, found.num_prompts) == (0.8, 10)
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half), abs=1e-12)
    assert (found.low, found.high) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("samples", [1, 4])
def test_a_share_that_is_all_or_nothing_is_not_certain(value, samples):
    found = proportion([Total(value * samples, samples)] * 10)
    certain, doubtful = (found.low, found.high) if value == 0 else (1 - found.high, 1 - found.low)
    assert certain == 0
    assert doubtful == pytest.approx(0.2775, abs=1e-4)


def test_copies_of_a_sample_say_nothing_new():
    """Four equal samples a prompt are one sample: with the quantile that Student has for it, the same interval."""
    values = [1, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1] * 20
    one, four = proportion(singles(values)), proportion([Total(4.0 * v, 4.0) for v in values])
    assert four.value == one.value
    assert (four.low, four.high) == pytest.approx((one.low, one.high), abs=1e-3)
    assert mean([Total(4.0 * v, 4.0) for v in values]) == mean(singles(values))


def test_a_mean_by_hand():
    found = mean(singles([1.0, 2.0, 4.0, 5.0]))
    half = student_quantile(0.95, 3) * math.sqrt(10 / 3) / 2
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 3 - half, 3 + half))
    assert mean(singles([2.0])).low is None


def test_a_mean_weighs_by_tokens_and_ignores_what_has_none():
    rows = [Total(6.0, 3.0), Total(4.0, 1.0), Total(0.0, 0.0)]
    found = mean(rows)
    assert (found.value, found.num_prompts) == (2.5, 2)
    residuals = [6 - 2.5 * 3, 4 - 2.5]
    error = math.sqrt(2 * sum(r * r for r in residuals)) / 4
    assert found.high == pytest.approx(2.5 + student_quantile(0.95, 1) * error)
    with pytest.raises(ValueError, match="none of 2 prompts"):
        mean([Total(0.0, 0.0)] * 2)


def test_the_sign_test_counts_every_outcome():
    for n in range(1, 9):
        for wins in range(n + 1):
            extreme = sum(
                max(sum(flips), n - sum(flips)) >= max(wins, n - wins) for flips in itertools.product((0, 1), repeat=n)
            )
            assert sign_test(wins, n - wins) == pytest.approx(extreme / 2**n)
    assert sign_test(0, 0) == 1.0


def test_mcnemar_looks_at_prompts_that_only_one_gets_right():
    ours, theirs = [1] * 9 + [0] * 1 + [1] * 30 + [0] * 20, [0] * 9 + [1] * 1 + [1] * 30 + [0] * 20
    found = proportion_difference(singles(ours), singles(theirs))
    assert found.value == pytest.approx(8 / 60)
    assert found.p_value == sign_test(9, 1) == pytest.approx(22 / 1024)
    b, c, n = 10 / 62, 2 / 62, 62  # Bonett and Price: one more of each
    half = 1.959963984540054 * math.sqrt((b + c - (b - c) ** 2) / n)
    assert (found.low, found.high) == pytest.approx((b - c - half, b - c + half))


def test_a_paired_difference_is_the_mean_of_differences():
    ours, theirs = [3.0, 5.0, 4.0, 9.0], [1.0, 4.0, 4.0, 7.0]
    found = mean_difference(singles(ours), singles(theirs))
    alone = mean(singles([a - b for a, b in zip(ours, theirs, strict=True)]))
    assert (found.value, found.low, found.high) == pytest.approx((alone.value, alone.low, alone.high))
    t = 1.25 / math.sqrt(11 / 12 / 4)
    assert found.p_value == pytest.approx(1 - student_inside(t, 3))
    swapped = mean_difference(singles(theirs), singles(ours))
    assert swapped == Difference(-found.value, -found.high, -found.low, found.p_value, 4)


def test_what_prompts_have_in_common_cancels():
    rng = random.Random(0)
    hard = [rng.gauss(0, 10) for _ in range(50)]
    ours, theirs = [x + rng.gauss(0.5, 0.5) for x in hard], [x + rng.gauss(0, 0.5) for x in hard]
    found = mean_difference(singles(ours), singles(theirs))
    assert found.p_value < 0.01
    assert found.high - found.low < 0.1 * (mean(singles(ours)).high - mean(singles(ours)).low)


def test_differences_without_spread():
    equal = mean_difference(singles([1.0, 2.0, 3.0]), singles([1.0, 2.0, 3.0]))
    assert (equal.value, equal.p_value) == (0.0, 1.0)
    better = mean_difference(singles([2.0, 3.0, 4.0]), singles([1.0, 2.0, 3.0]))
    assert better.p_value == sign_test(3, 0) == 0.25
    shares = proportion_difference([Total(2.0, 4.0)] * 5, [Total(2.0, 4.0)] * 5)
    assert shares.p_value == 1.0
    assert shares.low < 0 < shares.high


def test_models_are_compared_on_prompts_that_count_for_both():
    nothing = Total(0.0, 0.0)
    found = mean_difference([Total(5.0), nothing, Total(2.0)], [Total(4.0), Total(9.0), nothing])
    assert (found.value, found.num_prompts, found.p_value) == (1.0, 1, None)
    with pytest.raises(ValueError, match="no prompt has a sample of both"):
        mean_difference([Total(5.0), nothing], [nothing, Total(4.0)])
    with pytest.raises(ValueError, match="same prompts"):
        proportion_difference([Total(1.0)], [])


def draws(rng, chances, samples):
    return [Total(float(sum(rng.random() < p for _ in range(samples))), float(samples)) for p in chances]


@pytest.mark.parametrize(("prompts", "samples"), [(40, 1), (25, 6)])
def test_intervals_hold_the_truth_as_often_as_they_say(prompts, samples):
    """Prompts of chances between 0 and 1 (mean 0.25), 400 times over: standard error of a coverage of 0.95 is 0.011."""
    rng = random.Random(0)
    held = {"share": 0, "mean": 0, "difference": 0, "rejected": 0}
    for _ in range(400):
        chances = [rng.betavariate(0.5, 1.5) for _ in range(prompts)]
        ours, theirs = draws(rng, chances, samples), draws(rng, chances, samples)
        share, average, difference = proportion(ours), mean(ours), proportion_difference(ours, theirs)
        held["share"] += share.low <= 0.25 <= share.high
        held["mean"] += average.low <= 0.25 <= average.high
        held["difference"] += difference.low <= 0 <= difference.high
        held["rejected"] += difference.p_value < 0.05
    assert 0.92 <= held["share"] / 400 <= 0.99
    assert 0.90 <= held["mean"] / 400 <= 0.98
    assert 0.92 <= held["difference"] / 400 <= 0.99
    assert held["rejected"] / 400 <= 0.08


def test_samples_taken_for_independent_would_promise_too_much():
    """Of 25 prompts with 20 samples each, whose chances differ, the interval of 500 samples would be too narrow."""
    rng = random.Random(0)
    naive, clustered = 0, 0
    for _ in range(300):
        ours = draws(rng, [rng.betavariate(0.5, 1.5) for _ in range(25)], 20)
        right = int(sum(one.total for one in ours))
        apart = proportion(singles([1] * right + [0] * (500 - right)))
        naive += apart.low <= 0.25 <= apart.high
        found = proportion(ours)
        clustered += found.low <= 0.25 <= found.high
    assert naive / 300 < 0.6
    assert clustered / 300 > 0.9


def test_a_confidence_is_a_chance():
    with pytest.raises(ValueError, match="between 0 and 1"):
        mean(singles([1.0, 2.0]), confidence=95)
