"""Tasks of the package lm-eval, run on a model that is loaded. The only module to import it."""

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from strop.evals.options import EvalOptions
from strop.evals.results import Metric
from strop.evals.statistics import Difference, Estimate, Total, mean_difference, proportion, proportion_difference

ALIKE = 1e-9


@dataclass(frozen=True)
class TaskScore:
    """A metric of a task: what lm-eval says of it, and what each question adds where it is their mean."""

    value: float
    standard_error: float | None
    num_questions: int
    by_question: Mapping[Any, float] = field(default_factory=dict)

    def estimate(self, confidence: float) -> Estimate:
        """With lm-eval's standard error; Wilson's interval for questions that are right or wrong, as elsewhere."""
        totals = [Total(value) for value in self.by_question.values()]
        if totals and all(one.is_single for one in totals):
            return proportion(totals, confidence)
        reach = None if self.standard_error is None else quantile(confidence) * self.standard_error
        low, high = (None, None) if reach is None else (self.value - reach, self.value + reach)
        return Estimate(self.value, low, high, self.num_questions)


def check() -> None:
    """Raises ValueError where lm-eval isn't installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            "tasks are run by the package lm-eval, which isn't installed. Install it with: pip install 'lm-eval>=0.4.9'"
        )


def run(model: nn.Module, tokenizer: PreTrainedTokenizerBase, options: EvalOptions) -> dict[str, TaskScore]:
    """ "task/metric" -> what lm-eval says of `model`. Raises ValueError, with its words, for tasks it can't."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    chats = tokenizer.chat_template is not None
    try:
        found: Any = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size),
            tasks=options.tasks,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            apply_chat_template=chats,
            log_samples=True,
        )
    except (KeyError, ValueError) as error:
        raise ValueError(f"lm-eval can't run {', '.join(options.tasks)}: {error}") from error
    samples = found.get("samples") or {}
    scores: dict[str, TaskScore] = {}
    for task, values in found["results"].items():
        size = (found.get("n-samples") or {}).get(task, {}).get("effective") or len(samples.get(task, ()))
        for key, value in values.items():
            name, _, kind = key.partition(",")
            if not isinstance(value, (int, float)) or not math.isfinite(value) or name.endswith("_stderr") or not kind:
                continue
            error = values.get(f"{name}_stderr,{kind}")
            scores[f"{task}/{name}" + ("" if kind == "none" else f",{kind}")] = TaskScore(
                float(value),
                float(error) if isinstance(error, (int, float)) else None,
                int(size),
                by_question(samples.get(task, ()), name, kind, float(value)),
            )
    return scores


def by_question(samples: Any, name: str, kind: str, value: float) -> dict[Any, float]:
    """The metric of each question by its number; empty where the value is not their mean."""
    found = {
        sample["doc_id"]: float(sample[name])
        for sample in samples
        if sample.get("filter", "none") == kind and isinstance(sample.get(name), (int, float))
    }
    is_mean = bool(found) and abs(math.fsum(found.values()) / len(found) - value) <= ALIKE * max(1.0, abs(value))
    return found if is_mean else {}


def compared(ours: TaskScore, theirs: TaskScore | None, confidence: float) -> Metric:
    """The metric of one model or of two: on the same questions where those are known, else by both standard errors as
    if they had nothing to do with each other."""
    if theirs is None:
        return Metric(ours.estimate(confidence))
    model, baseline = ours.estimate(confidence), theirs.estimate(confidence)
    shared = [number for number in ours.by_question if number in theirs.by_question]
    if shared:
        pairs = [(Total(ours.by_question[number]), Total(theirs.by_question[number])) for number in shared]
        ours_by, theirs_by = [a for a, _ in pairs], [b for _, b in pairs]
        differ = proportion_difference if all(one.is_single for one in (*ours_by, *theirs_by)) else mean_difference
        difference = differ(ours_by, theirs_by, confidence)
        return Metric(model, baseline, difference, difference.p_value)
    value = ours.value - theirs.value
    if ours.standard_error is None or theirs.standard_error is None:
        return Metric(model, baseline, Difference(value, None, None, None, ours.num_questions))
    error = math.hypot(ours.standard_error, theirs.standard_error)
    reach = quantile(confidence) * error
    p_value = 2 * NormalDist().cdf(-abs(value) / error) if error else None
    return Metric(
        model, baseline, Difference(value, value - reach, value + reach, p_value, ours.num_questions), p_value
    )


def quantile(confidence: float) -> float:
    """The normal distribution's, two-sided."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)
