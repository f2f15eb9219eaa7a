"""Numbers of samples with their uncertainty: shares, means, pass@k, and paired differences of two models.

All is about prompts, since several samples of one prompt aren't independent: what they say is first added up to a total
s_i and a weight w_i (samples, or tokens). A number is the ratio sum s_i / sum w_i, and its variance that of the
residuals r_i = s_i - ratio w_i (clustered standard errors, arXiv:2411.00640 section 2.2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

CONFIDENCE = 0.95
ALMOST_NORMAL = 10_000
"""Degrees of freedom from which Student's distribution is taken for the normal one."""
ALIKE = 1e-12
"""Spread, of numbers of size 1, that is put down to rounding."""


class Total(NamedTuple):
    """What the samples of one prompt add up to, and how many they are. Without weight the prompt doesn't count."""

    total: float
    weight: float = 1.0

    @property
    def is_single(self) -> bool:
        """One sample that is 0 or 1."""
        return self.weight == 1 and self.total in (0, 1)


@dataclass(frozen=True)
class Estimate:
    """A number and the interval that holds it with the confidence asked for; None where one prompt is all there is."""

    value: float
    low: float | None
    high: float | None
    num_prompts: int


@dataclass(frozen=True)
class Difference:
    """One model's number minus another's on the same prompts, its interval, and the p-value (two-sided): how likely
    so much of a difference is if there is none."""

    value: float
    low: float | None
    high: float | None
    p_value: float | None
    num_prompts: int


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that one of k samples is correct, drawn without replacement from n of which c are:
    1 - C(n - c, k) / C(n, k), without bias for the chance that one of k new ones is (arXiv:2107.03374 eq. 1).

    In whole numbers up to the last division. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    n, c = num_samples, num_correct
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(
            f"pass@{k} of {n} samples with {c} correct ones is not defined: k must be from 1 to the number of samples, "
            "of which no more can be correct than there are."
        )
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def mean(totals: Sequence[Total], confidence: float = CONFIDENCE) -> Estimate:
    """The ratio with Student's interval of N - 1 degrees of freedom. Raises ValueError where no prompt has weight."""
    counted = _counted(totals)
    value, residuals = _linearised(counted)
    reach = _reach(residuals, confidence)
    low, high = (None, None) if reach is None else (value - reach, value + reach)
    return Estimate(value, low, high, len(counted))


def proportion(totals: Sequence[Total], confidence: float = CONFIDENCE) -> Estimate:
    """The ratio of totals from 0 to their weight with Wilson's interval (J. Am. Stat. Assoc. 22:209, 1927).

    One sample of 0 or 1 a prompt: as it stands there. Else with the number of independent samples of 0 or 1 that would
    have the same variance, at most the weight there is, and Student's quantile. Where all prompts say 0, or 1, that is
    the number of prompts. Raises ValueError where no prompt has weight.
    """
    counted = _counted(totals)
    value, residuals = _linearised(counted)
    size, variance = float(len(counted)), math.fsum(r * r for r in residuals)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    if math.sqrt(variance) > ALIKE:
        size = min(value * (1 - value) / variance, max(math.fsum(one.weight for one in counted), size))
        if not all(one.is_single for one in counted):
            z = student_quantile(confidence, len(counted) - 1)
    centre = (value + z * z / (2 * size)) / (1 + z * z / size)
    half = z * math.sqrt(max(value * (1 - value), 0.0) / size + (z / (2 * size)) ** 2) / (1 + z * z / size)
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Estimate(value, min(low, value), max(high, value), len(counted))


def mean_difference(totals: Sequence[Total], others: Sequence[Total], confidence: float = CONFIDENCE) -> Difference:
    """The difference of two `mean`s on the prompts that count for both, by Student's paired test.

    Raises ValueError where there is none such.
    """
    value, apart = _paired(totals, others)
    reach = _reach(apart, confidence)
    low, high = (None, None) if reach is None else (value - reach, value + reach)
    return Difference(value, low, high, _student_test(value, apart), len(apart))


def proportion_difference(
    totals: Sequence[Total], others: Sequence[Total], confidence: float = CONFIDENCE
) -> Difference:
    """The difference of two `proportion`s on the prompts that count for both.

    With one sample of 0 or 1 a prompt the interval is Bonett and Price's (J. Educ. Behav. Stat. 37:479, 2012), that of
    the mean difference with one more prompt of each extreme, and the p-value McNemar's exact one. Else both are
    Student's, but for prompts that all differ alike, where he has no spread to measure by and the interval is the other
    one. Raises ValueError where no prompt is left.
    """
    value, apart = _paired(totals, others)
    both = [(a, b) for a, b in zip(totals, others, strict=True) if a.weight and b.weight]
    single = all(a.is_single and b.is_single for a, b in both)
    num = len(both)
    if not single and num > 1 and _standard_error(apart) > ALIKE:
        return mean_difference(totals, others, confidence)
    size = num + 2
    centre = num * value / size
    spread = (math.fsum((value + num * residual) ** 2 for residual in apart) + 2) / size - centre**2
    reach = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(spread / size)
    low, high = min(max(-1.0, centre - reach), value), max(min(1.0, centre + reach), value)
    better, worse = (sum(sign * (a.total - b.total) > 0 for a, b in both) for sign in (1, -1))
    return Difference(value, low, high, sign_test(better, worse) if single else _student_test(value, apart), num)


def sign_test(num_above: int, num_below: int) -> float:
    """The two-sided exact p-value of so many wins and losses, of which each is as likely; ties say nothing. For the
    prompts that only one of two models answers right it is McNemar's test."""
    num, fewer = num_above + num_below, min(num_above, num_below)
    ways, total = 1, 1
    for i in range(fewer):
        ways = ways * (num - i) // (i + 1)
        total += ways
    return min(1.0, 2 * total / 2**num)


def _counted(totals: Sequence[Total]) -> list[Total]:
    counted = [one for one in totals if one.weight]
    if not counted:
        raise ValueError(f"none of {len(totals)} prompts has a sample that counts, so there is nothing to average.")
    return counted


def _linearised(totals: Sequence[Total]) -> tuple[float, list[float]]:
    """The ratio, and each prompt's residual over the sum of weights: the ratio's variance is that of their sum."""
    weight = math.fsum(one.weight for one in totals)
    ratio = math.fsum(one.total for one in totals) / weight
    return ratio, [(one.total - ratio * one.weight) / weight for one in totals]


def _paired(totals: Sequence[Total], others: Sequence[Total]) -> tuple[float, list[float]]:
    """The difference of the ratios over prompts that count for both, and its residuals."""
    if len(totals) != len(others):
        raise ValueError(f"two models are compared on the same prompts, not on {len(totals)} and {len(others)}.")
    both = [(a, b) for a, b in zip(totals, others, strict=True) if a.weight and b.weight]
    if not both:
        raise ValueError("no prompt has a sample of both models that counts, so they can't be compared.")
    value, residuals = _linearised([a for a, _ in both])
    other, other_residuals = _linearised([b for _, b in both])
    return value - other, [a - b for a, b in zip(residuals, other_residuals, strict=True)]


def _standard_error(residuals: Sequence[float]) -> float:
    num = len(residuals)
    return math.sqrt(num / (num - 1) * math.fsum(r * r for r in residuals))


def _reach(residuals: Sequence[float], confidence: float) -> float | None:
    """Half of Student's interval; None for one prompt, which tells no spread."""
    if len(residuals) < 2:
        return None
    return student_quantile(confidence, len(residuals) - 1) * _standard_error(residuals)


def _student_test(value: float, residuals: Sequence[float]) -> float | None:
    """The p-value of a difference of `value`. Where all prompts differ alike there is no spread to measure by, and it
    is the sign test's."""
    if len(residuals) < 2:
        return None
    error = _standard_error(residuals)
    if error <= ALIKE * max(1.0, abs(value)):
        return 1.0 if abs(value) <= ALIKE else sign_test(len(residuals), 0)
    return 1 - student_inside(abs(value) / error, len(residuals) - 1)


def student_inside(t: float, freedom: int) -> float:
    """P(-t < T < t) of Student's distribution (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    if freedom >= ALMOST_NORMAL:
        return 2 * NormalDist().cdf(t) - 1
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    series = 0.0
    for i in range(1 + odd, freedom, 2):  # of powers 1, 3, ... freedom - 2, or 0, 2, ... freedom - 2
        series += term
        term *= cosine**2 * i / (i + 1)
    inside = (angle + math.sin(angle) * series) * 2 / math.pi if odd else math.sin(angle) * series
    return min(inside, 1.0)


@cache
def student_quantile(confidence: float, freedom: int) -> float:
    """t with P(-t < T < t) = confidence. Raises ValueError for a confidence that isn't between 0 and 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} is the chance that an interval holds the truth: between 0 and 1.")
    low, high = 0.0, 1.0
    while student_inside(high, freedom) < confidence:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_inside(middle, freedom) < confidence else (low, middle)
    return high
