"""Reward models: a score for each answer to a prompt, trained by which answer is preferred."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from strop.compat import accepts_old_names
from strop.data.collate import IGNORE, Batch
from strop.data.preference import PAIRS_WITH_MARGIN, RANKED, PreferenceCollator, PreferenceFormat
from strop.data.preference_rows import PreferenceRecipe
from strop.losses.reduce import StepCounts
from strop.losses.reward import bradley_terry, centring, plackett_luce
from strop.models.scores import checked_head, classification_head, end_states, scores
from strop.models.segments import Layout
from strop.models.tokenizers import pad_apart_from_end
from strop.rewards.reward_model import Words, score

from . import checks
from .config import config_for
from .meter import Metrics
from .preference import Parts, PreferenceConfig, PreferenceTrainer, Rows
from .setup import ready_model

logger = logging.getLogger(__name__)

REWARD_LOSSES: dict[str, PreferenceFormat] = {"bradley_terry": PAIRS_WITH_MARGIN, "plackett_luce": RANKED}
"""Name -> the rows that the loss reads."""


@accepts_old_names
@dataclass
class RewardConfig(PreferenceConfig):
    """Settings of reward modelling."""

    learning_rate: float = 1e-4
    """Peak learning rate of the optimizer."""

    overlong: str = "drop"
    """What happens to rows above max_length: "drop", as an answer without its end would be scored for being cut, or
    "truncate", or "error"."""

    loss_type: str = "auto"
    """"bradley_terry" for pairs, "plackett_luce" for ranked completions; "auto": the one that fits the rows."""

    center_rewards_coefficient: float | None = None
    """Weight of the squared sum of a pair's scores, which keeps scores around 0, e.g. 0.01; with pairs only."""

    def __post_init__(self):
        checks.one_of("loss_type", self.loss_type, ("auto", *REWARD_LOSSES))
        checks.at_least("center_rewards_coefficient", self.center_rewards_coefficient, 0)
        if self.center_rewards_coefficient and self.loss_type == "plackett_luce":
            _refuse_centring(self.center_rewards_coefficient)
        if self.max_length is None and self.overlong == "drop":
            self.overlong = "truncate"  # nothing is too long
        checks.no_balancing(self)
        super().__post_init__()


@accepts_old_names
class RewardTrainer(PreferenceTrainer):
    """Trains a model with one output to score preferred answers above others.

    Rows are pairs: `prompt`, `chosen` and `rejected`, as texts or lists of messages (the prompt may be part of both
    sides instead), optionally with a number `margin`; or `prompt` and `completions`, best first. A language model's
    name is loaded with a new head of one output. Metrics: `accuracy` (the share of pairs in the right order, ties count
    half), `margin` (their mean difference), `min_reward`, `mean_reward`, `max_reward`.
    """

    config_class = RewardConfig
    method = "Reward"
    compared = end_states

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: RewardConfig | TrainingArguments | None = None,
        data_collator: Callable[[list[dict]], Batch] | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | dict[str, Rows] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        if isinstance(model, Module):
            checked_head(model, num_labels=1)
        args = config_for(self.config_class, args, model, self.method)
        self.wanted = format_of(args, train_dataset if train_dataset is not None else eval_dataset)
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            quantization_config=quantization_config,
            peft_config=peft_config,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )

    def ready_model(self, model, args, tokenizer, quantization_config, peft_config) -> Module:
        if args.pad_token is None:
            pad_apart_from_end(tokenizer)
        loading = {"auto_class": AutoModelForSequenceClassification, "num_labels": 1}
        model = ready_model(model, args, tokenizer, quantization_config, peft_config, **loading)
        check_head(model, num_labels=1)
        return model

    def collator(self, tokenizer, layout, args) -> Callable[[list[dict]], Batch]:
        return RewardCollator(tokenizer.pad_token_id, layout, self.wanted, args.pad_to_multiple_of or 1)

    # Loss

    def parts(self, model: Module, batch: Batch) -> tuple[Parts, Metrics]:
        groups, mask = self._grouped(scores(model, batch), batch)
        kept = batch["completion_mask"].any(-1)[_firsts(mask)]  # groups that only fill up a batch have no loss
        groups, mask = groups[kept], mask[kept]
        if self.wanted.ranked:
            losses = plackett_luce(groups, mask)
        else:
            chosen, rejected = groups.unbind(-1)
            losses = bradley_terry(chosen, rejected, batch["margin"][kept] if "margin" in batch else 0.0)
            if self.args.center_rewards_coefficient:
                losses = losses + self.args.center_rewards_coefficient * centring(chosen, rejected)
        return Parts(sequences=losses.sum()), _metrics(groups.detach(), mask)

    def _grouped(self, values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Scores (G, K) with the answers to a prompt in a line, best first, and 1 where there is an answer."""
        if not self.wanted.ranked:
            groups = values.view(-1, 2)
            return groups, torch.ones_like(groups, dtype=torch.int64)
        lines = values.split([example.num_rows for example in batch["examples"]])
        mask = [torch.ones_like(line, dtype=torch.int64) for line in lines]
        return pad_sequence(lines, batch_first=True), pad_sequence(mask, batch_first=True)

    def count(self, batch: Batch) -> StepCounts:
        mask = batch["completion_mask"].any(-1)
        sizes = [example.num_rows for example in batch["examples"]] if self.wanted.ranked else [2] * (len(mask) // 2)
        return StepCounts(int(mask.sum()), sum(bool(rows[0]) for rows in mask.split(sizes)))

    # Reading

    def predictions(self, model: Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Scores (E, K) of the answers, best first, and their ranks; -100 where a group has fewer than K."""
        groups, mask = self._grouped(scores(model, batch), batch)
        ranks = torch.arange(groups.shape[1], device=groups.device).expand_as(groups)
        return groups.masked_fill(mask == 0, IGNORE), ranks.masked_fill(mask == 0, IGNORE)

    def score(self, prompts: Sequence[Words] | None, completions: Sequence[Words], **columns: Any) -> Tensor:
        """(N,): the scores of completions, one a prompt, prepared as training rows are; see `strop.rewards`.

        Rows longer than max_length are cut only where training cut them (overlong="truncate").
        """
        recipe = PreferenceRecipe.of(self.args)
        if recipe.overlong != "truncate":
            recipe = replace(recipe, max_length=None, overlong="truncate")
        with self.compute_loss_context_manager():
            return score(
                self.model,
                self.processing_class,
                prompts,
                completions,
                batch_size=self.args.per_device_eval_batch_size,
                recipe=recipe,
                layout=scoring_layout(self),
                **columns,
            )


@dataclass
class RewardCollator(PreferenceCollator):
    """Examples of a format to a batch whose rows are scored as wholes: one target a row, at its last token."""

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        return one_target_a_row(super().__call__(examples))


def one_target_a_row(batch: Batch) -> Batch:
    """`batch` with a completion mask (B, 1): whether the row's score counts."""
    ends = batch["ends"][:, None]
    return batch | {"predictors": ends, "targets": torch.zeros_like(ends), "completion_mask": torch.ones_like(ends)}


def scoring_layout(trainer: PreferenceTrainer) -> Layout | None:
    """The layout to score in: padded where training pads, else what the model is ready for."""
    return "padded" if trainer.args.layout == "padded" or trainer.layout_guard.is_trusted is False else None


def check_head(model: Module, num_labels: int) -> None:
    """Raise ValueError for a head with other outputs, or that would stay as it is, random if it is new."""
    base = checked_head(model, num_labels)
    config = base.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
        logger.warning("the experts of %s aren't balanced: classifiers return no loss for that", type(base).__name__)
    if not any(parameter.requires_grad for parameter in classification_head(base).parameters()):
        raise ValueError(
            f"the head of {type(base).__name__} is frozen, so scores would stay those of its first weights. Unfreeze "
            "it with requires_grad_(True); an adapter trains it with task_type='SEQ_CLS' ('TOKEN_CLS' for steps)"
        )


def _firsts(mask: Tensor) -> Tensor:
    """(G,): the index of each group's first row, from its mask (G, K)."""
    sizes = mask.sum(-1)
    return sizes.cumsum(0) - sizes


def _metrics(groups: Tensor, mask: Tensor) -> Metrics:
    """From scores (G, K), best first: of all rows, and of all pairs of a group."""
    values = groups[mask.bool()]
    if not len(values):
        return {}
    above = groups[:, :, None] - groups[:, None, :]
    is_pair = (mask[:, :, None] * mask[:, None, :]).triu(1)
    num_pairs = is_pair.sum()
    return {
        "min_reward": (values.min(), 1),
        "mean_reward": (values.sum(), len(values)),
        "max_reward": (values.max(), 1),
        "accuracy": (((above.sign() + 1) / 2 * is_pair).sum(), num_pairs),
        "margin": ((above * is_pair).sum(), num_pairs),
    }


def format_of(args: RewardConfig, rows: Any) -> PreferenceFormat:
    """The rows that the loss wants; by their columns if args.loss_type leaves it open."""
    if args.loss_type != "auto":
        return REWARD_LOSSES[args.loss_type]
    while isinstance(rows, dict):
        rows = next(iter(rows.values()))
    columns = getattr(rows, "column_names", None) or (list(next(iter(rows), {})) if rows is not None else [])
    wanted = RANKED if {"completions", "completions_ids"} & set(columns) else PAIRS_WITH_MARGIN
    if wanted.ranked and args.center_rewards_coefficient:
        _refuse_centring(args.center_rewards_coefficient)
    return wanted


def _refuse_centring(coefficient: float) -> None:
    raise ValueError(
        f"center_rewards_coefficient={coefficient} would have no effect on ranked completions, as centring is defined "
        "for pairs (arXiv:2312.09244). Remove it"
    )
