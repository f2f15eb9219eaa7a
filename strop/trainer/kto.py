"""Kahneman-Tversky optimisation: completions with a thumb up or down.

The baseline of a step is the mean log-ratio of its mismatched completions, each another row's, under its own prompt.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import Module

from strop.compat import accepts_old_names
from strop.data.collate import Batch, some_rows
from strop.data.preference import LABELLED, LABELLED_MISMATCHED, PreferenceFormat
from strop.losses.unpaired import UNPAIRED_LOSSES, kto_baseline, weighted
from strop.models.arguments import ReferenceArguments
from strop.models.logps import logps

from . import checks, whole_step
from .labelled import Labelled, LabelledTrainer
from .meter import Metrics
from .preference import PreferenceConfig, means_of
from .referenced import check_reference

logger = logging.getLogger(__name__)

FAIR = (1.0, 1.33)
"""Range of the ratio of both classes' weighted counts that the paper recommends (arXiv:2402.01306 eq. 9)."""


@accepts_old_names
@dataclass
class KTOConfig(ReferenceArguments, PreferenceConfig):
    """Settings of Kahneman-Tversky optimisation."""

    learning_rate: float = 1e-6
    """Peak learning rate of the optimizer."""

    loss_type: str = "kto"
    """Loss of a row: "kto", or "apo_zero_unpaired", which is anchored at 0 and needs no mismatched completions."""

    beta: float = 0.1
    """Scale of the implicit reward log pi/ref, in 1/nat; larger keeps the policy closer to the reference."""

    desirable_weight: float = 1.0
    """Weight of the losses of desirable rows."""

    undesirable_weight: float = 1.0
    """Weight of the losses of undesirable rows."""

    def __post_init__(self):
        checks.one_of("loss_type", self.loss_type, ("kto", "apo_zero_unpaired"))
        checks.positive("beta", self.beta)
        for name in ("desirable_weight", "undesirable_weight"):
            checks.at_least(name, getattr(self, name), 0)
        check_reference(self)
        super().__post_init__()


@accepts_old_names
class KTOTrainer(LabelledTrainer):
    """Trains a policy on completions that are labelled desirable or not, relative to a reference policy.

    Rows have `prompt`, `completion` and `label` (true or false); pairs are taken as two rows each. Batches may have any
    size, order and share of the classes. Without `ref_model` the reference is the model as it is now. `predict`
    returns the implicit rewards (rows,), with the labels.

    Metrics: `rewards/chosen`, `rewards/rejected` (beta log pi/ref of desirable and of undesirable rows),
    `rewards/margins` (their difference), `logps/chosen`, `logps/rejected`, `kl` (the baseline, in nats), `entropy`
    (nats) of the completions' tokens, `num_tokens`. A class that had no row is absent.
    """

    config_class = KTOConfig
    method = "KTO"

    def rows_wanted(self, args: Any) -> PreferenceFormat:
        return LABELLED_MISMATCHED if args.loss_type == "kto" else LABELLED

    def prepared(self, rows: Any, name: str, tokenizer: Any, args: KTOConfig) -> Any:
        rows = super().prepared(rows, name, tokenizer, args)
        if name == "train" and isinstance(rows, Dataset):
            tell_imbalance(rows["label"][:], args.desirable_weight, args.undesirable_weight)
        return rows

    # Loss

    @property
    def needs_whole_step(self) -> bool:
        return self.args.loss_type == "kto"

    def row_losses(self, rows: Labelled) -> Tensor:
        """(n,): the loss of each row, around a baseline that all of them give."""
        baseline = self.baseline(rows)
        losses = UNPAIRED_LOSSES[self.args.loss_type](rows.log_ratio, rows.desirable, baseline, self.args.beta)
        return weighted(losses, rows.desirable, self.args.desirable_weight, self.args.undesirable_weight)

    def baseline(self, rows: Labelled) -> Tensor:
        """The log ratio, (), that counts as neither good nor bad."""
        if rows.mismatched is None:
            return torch.zeros((), device=rows.log_ratio.device)
        return kto_baseline(rows.mismatched.sum(), len(rows.mismatched))

    def ahead(self, model: Module, batch: Batch) -> None:
        """Only what the baseline reads: the mismatched completions, which then need no gradient and no second pass."""
        self.reference_logps(batch)
        part, kept = some_rows(batch, slice(1, None, 2)), batch["completion_mask"][::2].any(-1)
        mismatched = self.log_ratios(logps(model, part), part)[kept]
        rows = Labelled(torch.zeros_like(mismatched), batch["label"][kept].bool(), mismatched)
        whole_step.total(self.row_losses, rows, batch)

    def baseline_metrics(self, rows: Labelled, batch: Batch) -> Metrics:
        """`kl`: in training the baseline of the step, in evaluation the mean that becomes one (`measured`)."""
        if rows.mismatched is None:
            return {}
        step, num_rows = batch.get(whole_step.KEY), len(rows.mismatched)
        if isinstance(step, whole_step.Collected):
            return means_of({"kl": rows.mismatched}, num_rows)
        return {"kl": (self.baseline(rows if step is None else step.scores) * num_rows, num_rows)}

    def measured(self, metrics: dict[str, float]) -> dict[str, float]:
        measured = super().measured(metrics)
        return measured | {"kl": max(0.0, measured["kl"])} if "kl" in measured else measured


def tell_imbalance(labels: Sequence[bool], desirable_weight: float, undesirable_weight: float) -> None:
    """Warn where one class outweighs the other by more than the paper recommends."""
    good = sum(map(bool, labels))
    bad = len(labels) - good
    shares = good * desirable_weight, bad * undesirable_weight
    if not all(shares) or FAIR[0] <= round(shares[0] / shares[1], 2) <= FAIR[1]:
        return
    low, high = (round(bound * shares[1] / good, 2) for bound in FAIR)
    logger.warning(
        "train: %d desirable rows of weight %g and %d undesirable ones of weight %g; the paper recommends 1 to 1.33 "
        "times as much weight on the desirable ones in all, e.g. desirable_weight between %g and %g",
        good, desirable_weight, bad, undesirable_weight, low, high,
    )  # fmt: skip
