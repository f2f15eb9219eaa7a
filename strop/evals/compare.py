"""Metrics of what was measured on each prompt, of one model or of two on the same prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.evals.answers import Answer
from strop.evals.harness import TaskScore, compared
from strop.evals.options import LOSS, PAIRS, EvalOptions
from strop.evals.results import Metric
from strop.evals.statistics import (
    Estimate,
    Total,
    mean,
    mean_difference,
    pass_at_k,
    proportion,
    proportion_difference,
    sign_test,
)
from strop.rewards.verdicts import verdicts

Values = Sequence[Sequence[float]]
"""Of each prompt, what its samples say; none of a sample to which a reward doesn't apply."""


def metric(
    totals: Sequence[Total], others: Sequence[Total] | None, confidence: float, is_share: bool = False
) -> Metric:
    """A mean, or with `is_share` a share, of one model and, with `others`, of a second one. Raises ValueError where no
    prompt counts."""
    estimate, differ = (proportion, proportion_difference) if is_share else (mean, mean_difference)
    if others is None:
        return Metric(estimate(totals, confidence))
    difference = differ(totals, others, confidence)
    return Metric(estimate(totals, confidence), estimate(others, confidence), difference, difference.p_value)


def transformed(found: Metric, function: Callable[[float], float]) -> Metric:
    """The metric of an increasing `function` of another one's number; the difference is no function of the other."""

    def estimate(of: Estimate | None) -> Estimate | None:
        if of is None:
            return None
        low, high = (None if end is None else function(end) for end in (of.low, of.high))
        return Estimate(function(of.value), low, high, of.num_prompts)

    model, baseline = estimate(found.model), estimate(found.baseline)
    assert model is not None
    return Metric(model, baseline, None, found.p_value)


def rewards_of(answers: Sequence[Sequence[Answer]], name: str) -> list[list[float]]:
    """The reward of each prompt's samples, without those to which it doesn't apply."""
    values = [[answer.rewards.get(name) for answer in several] for several in answers]
    return [[value for value in several if value is not None] for several in values]


def is_binary(*values: Values) -> bool:
    """All are 0 or 1."""
    return all(value in (0, 1) for some in values for several in some for value in several)


def totals_of(values: Values) -> list[Total]:
    return [Total(math.fsum(several), len(several)) for several in values]


def passes(values: Values, threshold: float, k: int) -> list[Total]:
    """pass@k of each prompt; no weight for those with fewer samples."""
    counts = [(len(several), sum(value >= threshold for value in several)) for several in values]
    return [Total(pass_at_k(n, c, k)) if n >= k else Total(0.0, 0.0) for n, c in counts]


def wins(values: Values, others: Values) -> list[Total]:
    """Of each prompt, the share of pairs of a sample of each model in which the first one's reward is higher; ties are
    half of it."""
    totals = []
    for ours, theirs in zip(values, others, strict=True):
        pairs = [(a > b) + (a == b) / 2 for a in ours for b in theirs]
        totals.append(Total(sum(pairs) / len(pairs)) if pairs else Total(0.0, 0.0))
    return totals


def win_rate(totals: Sequence[Total], confidence: float) -> Metric:
    """The share of wins, ties half, with the exact p-value of the sign test over prompts. The interval is Wilson's,
    which for ties, less spread than wins and losses, is wider than it need be."""
    shares = [one.total / one.weight for one in totals if one.weight]
    p_value = sign_test(sum(share > 0.5 for share in shares), sum(share < 0.5 for share in shares))
    return Metric(proportion(totals, confidence), p_value=p_value)


@dataclass
class Measured:
    """What one model did on each row; empty where it wasn't asked."""

    losses: list[Total] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    scores: bool = False
    """Margins are of a reward model's scores."""
    answers: list[list[Answer]] = field(default_factory=list)
    tasks: dict[str, TaskScore] = field(default_factory=dict)


class Comparison:
    """The metrics of what was measured, of one model or two, by name; `notes` say what is missing, and why."""

    def __init__(self, options: EvalOptions, ours: Measured, theirs: Measured | None = None):
        self.options, self.ours, self.theirs = options, ours, theirs
        self.metrics: dict[str, Metric] = {}
        self.notes: list[str] = []
        self.verdicts: list[list[float | None]] = []
        """Of each row, the judge's chance that the model's answer is better, sample by sample."""
        self.add_losses()
        self.add_pairs()
        names = dict.fromkeys(name for several in ours.answers for answer in several for name in answer.rewards)
        for name in names:
            self.add_reward(name)
        self.add_lengths()
        for name, score in ours.tasks.items():
            self.metrics[name] = compared(score, theirs and theirs.tasks.get(name), options.confidence)

    def add(self, name: str, totals: Sequence[Total], others: Sequence[Total] | None, is_share: bool = False) -> None:
        """The metric `name`, or a note that there is nothing to average."""
        if not any(one.weight for one in totals) or (others is not None and not any(one.weight for one in others)):
            self.notes.append(f"{name} applies to no row")
            return
        try:
            self.metrics[name] = metric(totals, others, self.options.confidence, is_share)
        except ValueError as error:
            self.notes.append(f"{name} is not compared: {error}")

    def add_losses(self) -> None:
        ours, theirs = self.ours.losses, None if self.theirs is None else self.theirs.losses
        if not ours:
            return
        if theirs is not None and [one.weight for one in ours] != [one.weight for one in theirs]:
            self.notes.append(
                "the losses are not compared: the tokenizers cut the rows into other tokens, so nats a token aren't "
                "the same for both models"
            )
            theirs = None
        if empty := sum(not one.weight for one in ours):
            self.notes.append(f"{empty} of {len(ours)} rows have no token to take the loss of")
        self.add(LOSS, ours, theirs)
        if LOSS not in self.metrics:
            return
        try:
            self.metrics["perplexity"] = transformed(self.metrics[LOSS], math.exp)
        except OverflowError:
            self.notes.append("perplexity is left out: e to the loss is beyond what numbers hold")

    def add_pairs(self) -> None:
        ours, theirs = self.ours.margins, None if self.theirs is None else self.theirs.margins
        if not ours:
            return
        self.add(PAIRS, signs(ours), None if theirs is None else signs(theirs), is_share=True)
        if theirs is not None and self.theirs is not None and not (self.ours.scores or self.theirs.scores):
            moved = signs([a - b for a, b in zip(ours, theirs, strict=True)])
            self.metrics[f"{PAIRS}/implicit"] = win_rate(moved, self.options.confidence)

    def add_reward(self, name: str) -> None:
        ours = rewards_of(self.ours.answers, name)
        theirs = None if self.theirs is None else rewards_of(self.theirs.answers, name)
        binary = is_binary(ours, theirs or [])
        self.add(name, totals_of(ours), None if theirs is None else totals_of(theirs), is_share=binary)
        threshold = self.options.threshold
        if binary or threshold is not None:
            least = 1.0 if threshold is None else threshold
            for k in self.options.pass_ks:
                others = None if theirs is None else passes(theirs, least, k)
                self.add(f"pass@{k}/{name}", passes(ours, least, k), others, is_share=True)
        elif self.options.k:
            self.notes.append(f"{name} has values other than 0 and 1, so pass@k of it needs a threshold")
        if theirs is not None and not binary:
            self.add_wins(f"win_rate/{name}", wins(ours, theirs))

    def add_wins(self, name: str, totals: Sequence[Total]) -> None:
        if any(one.weight for one in totals):
            self.metrics[name] = win_rate(totals, self.options.confidence)

    def add_lengths(self) -> None:
        both = [measured for measured in (self.ours, self.theirs) if measured is not None and measured.answers]
        if not both:
            return
        lengths = [totals_of([[one.num_tokens for one in some] for some in each.answers]) for each in both]
        ended = [totals_of([[one.finish_reason == "stop" for one in some] for some in each.answers]) for each in both]
        self.add("answer_tokens", lengths[0], lengths[1] if len(both) > 1 else None)
        self.add("answer_ended", ended[0], ended[1] if len(both) > 1 else None, is_share=True)

    def add_judgements(self, judge: Any) -> None:
        """Whose answer `judge`, of any kind, finds better, sample by sample."""
        assert self.theirs is not None
        pairs = [
            pair
            for ours, theirs in zip(self.ours.answers, self.theirs.answers, strict=True)
            for pair in zip(ours, theirs, strict=True)
        ]
        prompts, texts = [ours.prompt for ours, _ in pairs], [(a.completion, b.completion) for a, b in pairs]
        found = verdicts(judge, prompts, texts, self.options.seed)
        self.verdicts = [[] for _ in self.ours.answers]
        for (ours, _), chance in zip(pairs, found, strict=True):
            self.verdicts[ours.row].append(chance)
        if missing := found.count(None):
            self.notes.append(f"the judge gave no verdict on {missing} of {len(found)} pairs of answers")
        known = [[chance for chance in several if chance is not None] for several in self.verdicts]
        self.add_wins("win_rate/judge", totals_of(known))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of each row what was measured of it and no answer holds."""
        columns: dict[str, Sequence[Any]] = {}
        for prefix, of in (("", self.ours), ("baseline_", self.theirs)):
            if of is not None and of.losses:
                columns[f"{prefix}loss"] = [one.total / one.weight if one.weight else None for one in of.losses]
                columns[f"{prefix}num_tokens"] = [int(one.weight) for one in of.losses]
            if of is not None and of.margins:
                columns[f"{prefix}margin"] = of.margins
        if self.verdicts:
            columns["verdicts"] = self.verdicts
        size = len(next(iter(columns.values()), ()))
        return [{"row": i} | {name: values[i] for name, values in columns.items()} for i in range(size)]


def signs(margins: Sequence[float]) -> list[Total]:
    """1 for a margin above 0, 1/2 for one of 0."""
    return [Total((margin > 0) + (margin == 0) / 2) for margin in margins]
