"""`evaluate`: what a model is worth on rows, alone or against another one on the same rows."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from strop.data.formats import CHECKED_ROWS, Row, detect, format_of
from strop.data.preference_rows import PreferenceRecipe
from strop.data.recipe import Recipe
from strop.evals import harness
from strop.evals.answers import Answer, answers, asked, columns_of
from strop.evals.compare import Comparison, Measured
from strop.evals.held_out import NAME, pair_margins, row_losses
from strop.evals.options import GIVEN_ANSWERS, LOSS, PAIRS, EvalOptions
from strop.evals.results import ANSWERS_FILE, BASELINE_FILE, EvalResults, append_answers
from strop.models.forward import base_model as unwrapped
from strop.models.load import load_to_use, task_of
from strop.rewards.from_model import RewardModel
from strop.rewards.function import name_of as name_of_reward
from strop.rewards.scoring import RewardFunctions
from strop.rollout.types import Sampling

Model = str | Path | nn.Module
OWN_NAMES = (*GIVEN_ANSWERS, "perplexity", "answer_tokens", "answer_ended")
"""Names of metrics that no reward may have."""


def evaluate(
    model: Model,
    rows: Iterable[Row] = (),
    metrics: Any = (),
    *,
    baseline: Model | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    baseline_tokenizer: PreTrainedTokenizerBase | None = None,
    judge: Any = None,
    output_dir: str | Path | None = None,
    dtype: str | None = None,
    base_model: str | None = None,
    **options: Any,
) -> EvalResults:
    """What `model` is worth on `rows`: losses and preferences of their answers, rewards of its own.

    `metrics` is one or several of "loss", "pairs", and rewards: names, functions or reward models. `baseline` is a
    second model that is measured on the same rows; every metric then comes with the difference, its interval and
    p-value, rewards other than 0 and 1 with a win rate, and `judge`, of `strop.rewards.verdicts`, says whose answer is
    better. A model is a name, a
    folder (adapters too) or an object with its tokenizer. `options` are the fields of `EvalOptions`, e.g.
    `num_samples=8, k=[1, 8]`. With `output_dir`, results.json, rows.jsonl and every answer are
    written there.

    Raises ValueError for rows that lack what a metric needs, and for options that no metric reads.
    """
    named = [metrics] if isinstance(metrics, (str, Path)) or callable(metrics) else list(metrics)
    wanted = EvalOptions(metrics=[one for i, one in enumerate(named) if one not in named[:i]], **options)
    plan = Plan(list(islice(rows, wanted.limit)), wanted, judge, baseline is not None, output_dir)
    for one in (model, baseline):
        plan.refuse_kind(one)
    ours, theirs = plan.measure(*loaded(model, tokenizer, dtype, base_model), ANSWERS_FILE), None
    if baseline is not None:
        theirs = plan.measure(*loaded(baseline, baseline_tokenizer, dtype, None), BASELINE_FILE)
    comparison = Comparison(wanted, ours, theirs)
    if judge is not None and theirs is not None:
        comparison.add_judgements(judge)
    results = EvalResults(
        name_of(model),
        comparison.metrics,
        None if baseline is None else name_of(baseline),
        plan.settings,
        comparison.notes,
        ours.answers,
        theirs.answers if theirs is not None else [],
        comparison.rows,
    )
    if output_dir is not None:
        results.save(output_dir)
    return results


def name_of(model: Model) -> str:
    """What a table calls the model."""
    if not isinstance(model, nn.Module):
        return str(model)
    return getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__


def loaded(
    model: Model, tokenizer: PreTrainedTokenizerBase | None, dtype: str | None, base_model: str | None
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """The model and its tokenizer; an object as it is. Raises ValueError for one without its tokenizer."""
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise ValueError(f"{name_of(model)} is an object, so its tokenizer must be given too: tokenizer=...")
        return model, tokenizer
    scores = {"auto_class": AutoModelForSequenceClassification, "num_labels": 1} if gives_scores(model) else {}
    ready, own = load_to_use(str(model), dtype, base_model, **scores)
    return ready, own if tokenizer is None else tokenizer


def gives_scores(model: Model) -> bool:
    """Whether it is a reward model. Raises ValueError for a name that is no model's, and for judges of steps."""
    if isinstance(model, nn.Module):
        return type(unwrapped(model)).__name__.endswith("ForSequenceClassification")
    task = task_of(str(model))
    if task == "TOKEN_CLS":
        raise ValueError(f"{model} judges steps of solutions; ask it with: strop score {model}")
    return task == "SEQ_CLS"


def default_metrics(rows: Sequence[Row], judges: bool = False, text_field: str | None = None) -> list[str]:
    """What the rows have answers for. Raises ValueError where that is nothing, and nothing else is measured."""
    if judges or not rows:
        return []
    if {"chosen", "rejected"} <= set(rows[0]):
        return [PAIRS]
    try:
        format_of(rows[0], text_field or "text")
    except ValueError as error:
        raise ValueError(
            f"rows have {sorted(rows[0])}, with no answer to take the loss of. Say what is measured by metrics: "
            'rewards like "accuracy" or a function of yours, "loss", "pairs".'
        ) from error
    return [LOSS]


class Plan:
    """What is measured of each model, and what becomes of it. Raises ValueError where that can't be."""

    def __init__(
        self,
        rows: Sequence[Row],
        options: EvalOptions,
        judge: Any,
        compares: bool,
        output_dir: str | Path | None,
    ):
        self.rows, self.options = rows, options
        self.folder = None if output_dir is None else Path(output_dir)
        if not self.rows and not options.tasks:
            raise ValueError("there is nothing to evaluate on: no rows, and no tasks of lm-eval.")
        if options.tasks:
            harness.check()
        self.metrics = options.metrics or default_metrics(rows, judge is not None, options.dataset_text_field)
        rewards = [one for one in self.metrics if one not in GIVEN_ANSWERS]
        self.generates = bool(rewards or judge)
        if self.metrics and not self.rows:
            raise ValueError(f"metrics={self.metrics} are of rows, but there are none.")
        if judge is not None and not compares:
            raise ValueError("a judge compares two models, but there is one; name the other as baseline.")
        if judge is not None and not callable(getattr(judge, "judge", None)):
            raise ValueError(f"judge={judge!r} has no method `judge`; pass e.g. PairwiseJudge(model, base_url).")
        options.refuse_unused(self.generates, bool(rewards), self.metrics)
        self.check_rows()
        self.rewards = RewardFunctions(rewards) if rewards else None
        if self.rewards is not None:
            for function in self.rewards.functions:
                if isinstance(function.function, RewardModel):
                    function.function.batch_size = options.batch_size
            taken = [name for name in self.rewards.names if name in OWN_NAMES]
            if taken:
                raise ValueError(
                    f"the reward {taken[0]!r} has the name of another metric, and one would hide the other; rename it."
                )
            self.rewards.check([*columns_of([asked(row, i) for i, row in enumerate(self.rows[:CHECKED_ROWS])])])

    def refuse_kind(self, model: Model | None) -> None:
        """Raises ValueError for no model, and for a reward model that would have to write, before any is measured."""
        if model is not None and gives_scores(model) and (self.generates or LOSS in self.metrics or self.options.tasks):
            raise ValueError(
                f"{name_of(model)} is a reward model, which scores answers and writes none: pairs is what it can be "
                "measured by. As a measure of another model it goes among the metrics, or --reward_model."
            )

    def check_rows(self) -> None:
        """Raises ValueError if rows lack what is measured, as far as the first ones show."""
        first = self.rows[:CHECKED_ROWS]
        if LOSS in self.metrics:
            detect(first, self.recipe.text_field, NAME)
        for index, row in enumerate(first if self.generates else ()):
            asked(row, index)

    @property
    def settings(self) -> dict[str, Any]:
        """What was asked, in JSON's types."""
        names = [one if isinstance(one, str) else name_of_reward(one) for one in self.metrics]
        return {**asdict(replace(self.options, metrics=names)), "num_rows": len(self.rows)}

    @property
    def recipe(self) -> Recipe:
        options = self.options
        return Recipe(
            text_field=options.dataset_text_field or "text",
            max_length=options.max_length,
            completion_only=options.completion_only_loss,
            assistant_only=bool(options.assistant_only_loss),
            turns=options.train_on_turns or "all",
            template_options=options.chat_template_kwargs or {},
        )

    def measure(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, file: str) -> Measured:
        """What `model` does on each row; its answers go into `file` as they come."""
        options, found = self.options, Measured()
        found.scores = gives_scores(model)
        if LOSS in self.metrics:
            found.losses = row_losses(model, tokenizer, self.rows, self.recipe, options.batch_size)
        if PAIRS in self.metrics:
            recipe = PreferenceRecipe(max_length=None, template_options=options.chat_template_kwargs or {})
            found.margins = pair_margins(model, tokenizer, self.rows, recipe, options.batch_size, found.scores)
        if self.generates:
            found.answers = self.answers(model, tokenizer, file)
        if options.tasks:
            found.tasks = harness.run(model, tokenizer, options)
        return found

    def answers(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, file: str) -> list[list[Answer]]:
        options = self.options
        sampling = Sampling(
            max_tokens=options.max_new_tokens, temperature=options.drawn_at, top_p=options.top_p, seed=options.seed
        )
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / file).unlink(missing_ok=True)
        return answers(
            model,
            tokenizer,
            self.rows,
            self.rewards,
            sampling,
            options.num_samples,
            options.chat_template_kwargs,
            options.max_rows,
            keep=lambda some: None if self.folder is None else append_answers(self.folder / file, some),
        )
