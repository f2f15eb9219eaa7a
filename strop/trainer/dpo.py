"""Direct preference optimisation: a pair's two completions, one forward pass, one line of `PREFERENCE_LOSSES`.

log pi of both  -  log ref of both  =  log-ratios  -->  losses of the pair, weighted and added up
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.compat import accepts_old_names
from strop.data.collate import Batch
from strop.losses.preference import F_DIVERGENCES, Pairs, ld_sum, wpo_weight
from strop.losses.reduce import masked_sum
from strop.models.logps import TokenScores, logps

from . import whole_step
from .dpo_config import WHOLE_STEP, DPOConfig
from .meter import Metrics
from .preference import Parts, Rows, means_of
from .referenced import ReferencedTrainer

__all__ = ["DPOConfig", "DPOTrainer"]


@accepts_old_names
class DPOTrainer(ReferencedTrainer):
    """Trains a policy on pairs of a preferred and a dispreferred completion, relative to a reference policy.

    Rows have `prompt`, `chosen` and `rejected`, as texts or lists of messages; the prompt may be part of both sides
    instead. Without `ref_model` the reference is the model as it is now. `predict` returns, and `compute_metrics`
    reads, the implicit rewards (rows, 2) of chosen and rejected; labels are 0, the chosen's column.

    Metrics: `rewards/chosen`, `rewards/rejected` (beta log pi/ref), `rewards/margins`, `rewards/accuracies` (ties count
    half), `logps/chosen`, `logps/rejected`, `entropy` (nats) of all completions' tokens, `mean_token_accuracy` of the
    chosen's, `nll_loss` of these where the loss has such a term, `aux_loss` for mixtures of experts, `num_tokens`.
    """

    config_class = DPOConfig
    method = "DPO"

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: str | PreTrainedModel | None = None,
        args: DPOConfig | TrainingArguments | None = None,
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

    # Loss

    @property
    def needs_whole_step(self) -> bool:
        return not set(WHOLE_STEP).isdisjoint(self.args.loss_type)

    def row_losses(self, pairs: Pairs) -> Tensor:
        """(n,): the weighted sum of the losses of each pair."""
        total = torch.zeros_like(pairs.chosen)
        for weight, loss in self.args.pair_losses:
            losses = loss(pairs, self.args.beta, **self.args.loss_options(loss))
            if losses.shape != total.shape:
                raise ValueError(
                    f"the function given as loss_type returned {tuple(losses.shape)} for {len(total)} pairs; it must "
                    "return the loss of each pair (their mean is taken afterwards)"
                )
            total = total + weight * losses
        return total

    def parts(self, model: Module, batch: Batch) -> tuple[Parts, Metrics]:
        mask = batch["completion_mask"]
        reference = self.reference_logps(batch)  # first, as its weights may stand in for the model's
        scores = logps(model, batch, entropy=True, top1=True, collision=self.args.use_weighting)
        kept = mask[::2].any(-1)  # pairs that only fill up a batch have no loss
        pairs = self.pairs(scores.logps, reference, mask, kept)
        if self.args.use_weighting:
            chosen, rejected = halves(wpo_weight(scores.logps, scores.log_collision, mask), kept)
            loss = (self.row_losses(pairs) * chosen * rejected).sum()
        else:
            loss = whole_step.total(self.row_losses, pairs, batch)
        balancing, metrics = self.balancing(scores.aux_loss, len(pairs.chosen))
        nll = -masked_sum(scores.logps[::2], mask[::2])
        parts = Parts(loss + balancing, self.args.nll_weight * nll)
        return parts, {**metrics, **self.pair_metrics(scores, reference, mask, kept)}

    def pairs(self, policy: Tensor, reference: Tensor, mask: Tensor, kept: Tensor) -> Pairs:
        """What the losses compare: log-ratios (n,) of completions, or what a divergence or LD-DPO make of them."""
        lengths = mask.sum(-1)
        if self.args.ld_alpha is None:
            policy, reference = masked_sum(policy, mask, -1), masked_sum(reference, mask, -1)
        else:
            shorter = lengths.view(-1, 2).amin(-1).repeat_interleave(2)
            policy, reference = (ld_sum(x, mask, shorter, self.args.ld_alpha) for x in (policy, reference))
        is_alpha = self.args.f_divergence_type == "alpha_divergence"
        options = {"alpha": self.args.f_alpha_divergence_coef} if is_alpha else {}
        rewards = F_DIVERGENCES[self.args.f_divergence_type](policy - reference, **options)
        ref_chosen, ref_rejected = halves(reference, kept)
        return Pairs(*halves(rewards, kept), *halves(lengths, kept), ref_chosen - ref_rejected)

    def pair_metrics(self, scores: TokenScores, reference: Tensor, mask: Tensor, kept: Tensor) -> Metrics:
        policy = masked_sum(scores.logps.detach(), mask, -1)
        chosen, rejected = halves(self.args.beta * (policy - masked_sum(reference, mask, -1)), kept)
        logps_chosen, logps_rejected = halves(policy, kept)
        values = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": ((chosen - rejected).sign() + 1) / 2,
            "logps/chosen": logps_chosen,
            "logps/rejected": logps_rejected,
        }
        num_chosen = mask[::2].sum()
        tokens = {
            "entropy": (scores.entropy.sum(), mask.sum()),
            "mean_token_accuracy": (scores.is_top1[::2].sum(), num_chosen),
        }
        if self.args.nll_weight:
            tokens["nll_loss"] = (-logps_chosen.sum(), num_chosen)
        return {**means_of(values, len(chosen)), **tokens}

    def predictions(self, model: Module, batch: Batch) -> tuple[Tensor, Tensor]:
        mask = batch["completion_mask"]
        log_ratio = masked_sum(logps(model, batch).logps - self.reference_logps(batch), mask, -1)
        rewards = self.args.beta * log_ratio.view(-1, 2)
        return rewards, torch.zeros(len(rewards), dtype=torch.int64, device=rewards.device)


def halves(values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """`values` (B,) of completions as those of the chosen and of the rejected, (n,) each, of the kept pairs."""
    return values[0::2][kept], values[1::2][kept]
