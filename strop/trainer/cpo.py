"""Contrastive preference optimisation, SimPO, AlphaPO, SLiC: pairs without a reference policy.

loss of a pair (a line of `REFERENCE_FREE_LOSSES`)  +  weight * likelihood of the chosen completion's tokens
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.compat import accepts_old_names
from strop.data.collate import Batch
from strop.losses.preference import Pairs, options_of
from strop.losses.reduce import masked_sum
from strop.losses.reference_free import PER_TOKEN_MEAN, REFERENCE_FREE_LOSSES, alphapo_pairs
from strop.models.logps import TokenScores, logps

from . import checks
from .meter import Metrics
from .preference import Parts, PreferenceConfig, PreferenceTrainer, Rows, means_of

SIMPO_LIKE = ("simpo", "alphapo")
"""Losses that the papers use without a likelihood term."""


@accepts_old_names
@dataclass
class CPOConfig(PreferenceConfig):
    """Settings of contrastive preference optimisation."""

    learning_rate: float = 1e-6
    """Peak learning rate of the optimizer."""

    loss_type: str = "sigmoid"
    """Loss of a pair: "sigmoid" (CPO), "hinge" (SLiC), "ipo", "simpo", or "alphapo" (SimPO with `alpha`)."""

    beta: float = 0.1
    """Scale of the difference of log-probabilities, in 1/nat; of per-token averages with ipo, simpo and alphapo."""

    label_smoothing: float = 0.0
    """Chance that a preference label is flipped, in [0, 0.5); with sigmoid, simpo and alphapo."""

    cpo_alpha: float | None = None
    """Weight of the likelihood of the chosen completions, a mean over the step's tokens. If not set, 1, but 0 for
    simpo and alphapo, which have no such term."""

    simpo_gamma: float = 0.5
    """Margin by which the chosen should win, before the logistic function; with simpo and alphapo."""

    alpha: float = 0.0
    """Shape of AlphaPO's reward (1 - p^-alpha) / alpha (arXiv:2501.03884); at 0 it is log p. With any loss."""

    def __post_init__(self):
        checks.one_of("loss_type", self.loss_type, ("sigmoid", "hinge", "ipo", *SIMPO_LIKE))
        checks.positive("beta", self.beta)
        checks.within("label_smoothing", self.label_smoothing, 0, 0.5)
        checks.at_least("cpo_alpha", self.cpo_alpha, 0)
        neutral = {"label_smoothing": 0.0} if self.loss_type in ("hinge", "ipo") else {}
        neutral |= {} if self.loss_type in SIMPO_LIKE else {"simpo_gamma": 0.5}
        checks.no_effect(self, neutral, f"loss_type={self.loss_type!r}")
        super().__post_init__()


@accepts_old_names
class CPOTrainer(PreferenceTrainer):
    """Trains a policy on pairs of a preferred and a dispreferred completion, without a reference policy.

    Rows are those of DPO: `prompt`, `chosen` and `rejected`. `predict` returns, and `compute_metrics` reads, the
    rewards (rows, 2) of chosen and rejected; labels are 0, the chosen's column.

    Metrics: `rewards/chosen`, `rewards/rejected` (beta log pi of completions, summed or averaged over tokens as the
    loss reads them), `rewards/margins`, `rewards/accuracies` (ties count half), `logps/chosen`, `logps/rejected`,
    `nll_loss` of the chosen tokens, `entropy` (nats) of all completions' tokens, `num_tokens`.
    """

    config_class = CPOConfig
    method = "CPO"

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: CPOConfig | TrainingArguments | None = None,
        data_collator: Callable[[list[dict]], Batch] | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | dict[str, Rows] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
    ):
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
        )

    # Loss: trainers with another one override the first four

    @property
    def loss_name(self) -> str:
        """The loss of a pair: a key of `REFERENCE_FREE_LOSSES`."""
        return "simpo" if self.args.loss_type == "alphapo" else self.args.loss_type

    @property
    def loss_options(self) -> dict[str, float]:
        """Options that the loss may have besides beta."""
        return {"gamma": self.args.simpo_gamma, "smoothing": self.args.label_smoothing}

    @property
    def nll_weight(self) -> float:
        """Weight of the likelihood term."""
        if self.args.cpo_alpha is None:
            return 0.0 if self.args.loss_type in SIMPO_LIKE else 1.0
        return self.args.cpo_alpha

    def rewards(self, pairs: Pairs) -> Pairs:
        """What the loss compares, before beta: log-probabilities or what becomes of them."""
        alpha = self.args.alpha
        return alphapo_pairs(pairs, alpha, self.loss_name in PER_TOKEN_MEAN) if alpha else pairs

    def pair_losses(self, rewards: Pairs) -> Tensor:
        """The loss of each pair, (n,)."""
        row = REFERENCE_FREE_LOSSES[self.loss_name]
        options = {name: value for name, value in self.loss_options.items() if name in options_of(row)}
        return row(rewards, self.args.beta, **options)

    def parts(self, model: Module, batch: Batch) -> tuple[Parts, Metrics]:
        mask, num_sides = batch["completion_mask"], len(self.wanted.sides)
        target = slice(self.nll_side, None, num_sides)
        scores = logps(model, batch, entropy=True)
        nll, num_tokens = -masked_sum(scores.logps[target], mask[target]), mask[target].sum()
        pairs = self.pairs(scores, mask, mask[::num_sides].any(-1))  # examples that only fill up a batch have no loss
        rewards = self.rewards(pairs)
        aux, aux_metrics = self.balancing(scores.aux_loss, len(pairs.chosen))
        parts = Parts(self.pair_losses(rewards).sum() + aux, self.nll_weight * nll)
        tokens = {"nll_loss": (nll, num_tokens), "entropy": (scores.entropy.sum(), mask.sum())}
        return parts, {**self.pair_metrics(pairs, rewards), **tokens, **aux_metrics}

    def pairs(self, scores: TokenScores, mask: Tensor, kept: Tensor | slice = slice(None)) -> Pairs:
        """log pi of both completions of the examples that are `kept`."""
        num_sides, lengths, policy = len(self.wanted.sides), mask.sum(-1), masked_sum(scores.logps, mask, -1)
        return Pairs(*(values[side::num_sides][kept] for values in (policy, lengths) for side in (0, 1)))

    def sums_or_means(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """The numbers (n,) of both completions that the loss subtracts: sums, or averages over tokens."""
        return pairs.means if self.loss_name in PER_TOKEN_MEAN else (pairs.chosen, pairs.rejected)

    def pair_metrics(self, pairs: Pairs, rewards: Pairs) -> Metrics:
        policy, scores = self.sums_or_means(pairs), self.sums_or_means(rewards)
        margin = self.args.beta * (scores[0] - scores[1])
        values = {
            "rewards/chosen": self.args.beta * scores[0],
            "rewards/rejected": self.args.beta * scores[1],
            "rewards/margins": margin,
            "rewards/accuracies": (margin.sign() + 1) / 2,
            "logps/chosen": policy[0],
            "logps/rejected": policy[1],
        }
        return means_of(values, len(margin))

    def predictions(self, model: Module, batch: Batch) -> tuple[Tensor, Tensor]:
        scores = self.sums_or_means(self.rewards(self.pairs(logps(model, batch), batch["completion_mask"])))
        rewards = self.args.beta * torch.stack(scores, -1)
        return rewards, torch.zeros(len(rewards), dtype=torch.int64, device=rewards.device)


@accepts_old_names
@dataclass
class SimPOConfig(CPOConfig):
    """Settings of SimPO (arXiv:2405.14734), by default those of the paper for a base model."""

    learning_rate: float = 6e-7
    """Peak learning rate of the optimizer."""

    loss_type: str = "simpo"
    """Loss of a pair: "simpo", or "alphapo" for SimPO with `alpha`."""

    beta: float = 2.0
    """Scale of the difference of per-token averages, in 1/nat."""

    simpo_gamma: float = 1.0
    """Margin by which the chosen should win, before the logistic function; the paper's gamma."""

    def __post_init__(self):
        checks.one_of("loss_type", self.loss_type, SIMPO_LIKE)
        super().__post_init__()


@accepts_old_names
class SimPOTrainer(CPOTrainer):
    """A `CPOTrainer` with SimPO's loss and settings: per-token averages, a target margin, no likelihood term."""

    config_class = SimPOConfig
    method = "SimPO"
