"""What trainers on labelled completions share: one row a completion, its log-ratio, metrics of both classes.

log pi - log ref  =  log-ratio of a completion  -->  loss of the row, around a baseline that the whole step gives
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.data.collate import Batch, some_rows
from strop.data.preference import LABELLED, PreferenceFormat
from strop.losses.reduce import masked_sum
from strop.models.logps import TokenScores, logps

from . import whole_step
from .config import config_for
from .meter import Metrics
from .preference import Parts, PreferenceConfig, Rows
from .referenced import ReferencedTrainer


@dataclass(frozen=True)
class Labelled:
    """Rows as a loss reads them, (n,) each."""

    log_ratio: Tensor
    """log pi/ref of the completion."""
    desirable: Tensor
    """Its label."""
    mismatched: Tensor | None = None
    """log pi/ref of another row's completion in its place, where the loss reads it."""
    weight: Tensor | None = None
    """Factor of the row's loss, where the method has one."""


class LabelledTrainer(ReferencedTrainer):
    """A `ReferencedTrainer` on rows of a prompt, a completion and a label, whose subclasses write `row_losses`."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: str | PreTrainedModel | None = None,
        args: PreferenceConfig | TrainingArguments | None = None,
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
        args = config_for(self.config_class, args, model, self.method)
        self.wanted = self.rows_wanted(args)
        super().__init__(
            model,
            ref_model,
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

    def rows_wanted(self, args: Any) -> PreferenceFormat:
        """What the loss that `args` ask for reads of a row."""
        return LABELLED

    # Loss

    def parts(self, model: Module, batch: Batch) -> tuple[Parts, Metrics]:
        rows, scores, mask = self.labelled(model, batch)
        balancing, metrics = self.balancing(scores.aux_loss, len(rows.log_ratio))
        parts = Parts(whole_step.total(self.row_losses, rows, batch) + balancing)
        policy = masked_sum(scores.logps.detach(), mask, -1)[mask.any(-1)]
        tokens = {"entropy": (masked_sum(scores.entropy, mask), mask.sum())}
        return parts, {**metrics, **tokens, **self.class_metrics(rows, policy), **self.baseline_metrics(rows, batch)}

    def labelled(self, model: Module, batch: Batch) -> tuple[Labelled, TokenScores, Tensor]:
        """A batch's rows without those that only fill it up, and scores and mask (E, T) of their completions."""
        reference = self.reference_logps(batch)  # first, as its weights may stand in for the model's
        num_sides = len(self.wanted.sides)
        mismatched, step = None, batch.get(whole_step.KEY)
        if num_sides == 2 and isinstance(step, whole_step.WholeStep):  # they are known
            mismatched = step.scores.mismatched[step.own].to(reference)
            batch, num_sides = some_rows(batch, slice(0, None, 2)), 1
        scores = logps(model, batch, entropy=True)
        log_ratios, mask = self.log_ratios(scores, batch), batch["completion_mask"][::num_sides]
        kept = mask.any(-1)
        if num_sides == 2:
            mismatched = log_ratios[1::2][kept].detach()
        weight = batch["weight"][kept] if "weight" in batch else None
        rows = Labelled(log_ratios[::num_sides][kept], batch["label"][kept].bool(), mismatched, weight)
        own = TokenScores(scores.logps[::num_sides], scores.entropy[::num_sides], aux_loss=scores.aux_loss)
        return rows, own, mask

    def log_ratios(self, scores: TokenScores, batch: Batch) -> Tensor:
        """log pi/ref of each row with a loss, (B,)."""
        return masked_sum(scores.logps - self.reference_logps(batch), batch["completion_mask"], -1)

    # Metrics

    def class_metrics(self, rows: Labelled, policy: Tensor) -> Metrics:
        """Means over the rows of each class."""
        values = {"rewards": self.args.beta * rows.log_ratio, "logps": policy}
        classes = {"chosen": rows.desirable, "rejected": ~rows.desirable}
        return {
            f"{kind}/{name}": (masked_sum(value, members), members.sum())
            for kind, value in values.items()
            for name, members in classes.items()
        }

    def baseline_metrics(self, rows: Labelled, batch: Batch) -> Metrics:
        """What is logged of the baseline."""
        return {}

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        if not {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
            return metrics
        return metrics | {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}

    def predictions(self, model: Module, batch: Batch) -> tuple[Tensor, Tensor]:
        log_ratios = self.log_ratios(logps(model, batch), batch)
        return self.args.beta * log_ratios[:: len(self.wanted.sides)], batch["label"].bool()
