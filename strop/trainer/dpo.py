"""Direct preference optimisation: a pair's two completions, one forward pass, one line of `PREFERENCE_LOSSES`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.callbacks.sync_ref import SyncRefModelCallback
from strop.compat import accepts_old_names
from strop.data.collate import Batch
from strop.losses.preference import PREFERENCE_LOSSES, Pairs
from strop.losses.reduce import masked_sum
from strop.models.load import load_model
from strop.models.logps import logps
from strop.models.reference import FrozenModel, reference_for

from . import checks
from .layout import settle_layout
from .meter import Metrics
from .preference import Parts, PreferenceConfig, PreferenceTrainer, Rows, means_of


@accepts_old_names
@dataclass
class DPOConfig(PreferenceConfig):
    """Settings of direct preference optimisation."""

    learning_rate: float = 1e-6
    """Peak learning rate of the optimizer."""

    loss_type: str = "sigmoid"
    """Loss of a pair: a key of `strop.losses.preference.PREFERENCE_LOSSES`."""

    beta: float = 0.1
    """Scale of the implicit reward log pi/ref, in 1/nat; larger keeps the policy closer to the reference."""

    label_smoothing: float = 0.0
    """Chance that a preference label is flipped, in [0, 0.5); only with loss_type="sigmoid"."""

    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO, arXiv:2404.09656)."""

    ref_model_sync_steps: int = 512
    """Optimizer steps between two updates of the reference."""

    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in the updated reference, in (0, 1]."""

    def __post_init__(self):
        checks.one_of("loss_type", self.loss_type, PREFERENCE_LOSSES)
        checks.within("label_smoothing", self.label_smoothing, 0, 0.5)
        checks.at_least("ref_model_sync_steps", self.ref_model_sync_steps, 1)
        if not 0 < self.ref_model_mixup_alpha <= 1:
            raise ValueError(
                f"ref_model_mixup_alpha={self.ref_model_mixup_alpha} is out of range; a share is in (0, 1]."
            )
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(
                f"label_smoothing={self.label_smoothing} would have no effect with loss_type={self.loss_type!r}; use "
                'loss_type="sigmoid" or label_smoothing=0'
            )
        if self.beta <= 0:
            raise ValueError(f"beta={self.beta} is out of range; the scale of the implicit reward must be positive")
        super().__post_init__()


@accepts_old_names
class DPOTrainer(PreferenceTrainer):
    """Trains a policy on pairs of a preferred and a dispreferred completion, relative to a reference policy.

    Rows have `prompt`, `chosen` and `rejected`, as texts or lists of messages; the prompt may be part of both sides
    instead. Without `ref_model` the reference is the model as it is now. Metrics: `rewards/chosen`, `rewards/rejected`
    (beta log pi/ref), `rewards/margins`, `rewards/accuracies` (ties count half), `logps/chosen`, `logps/rejected`.
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
    ):
        if compute_metrics is not None:
            raise ValueError("compute_metrics would get no predictions: pairs are scored, not predicted. Remove it.")
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            quantization_config=quantization_config,
            peft_config=peft_config,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.reference = self._settled_reference(ref_model)
        self.pair_loss = PREFERENCE_LOSSES[self.args.loss_type]

    def _settled_reference(self, ref_model: str | Module | None):
        if isinstance(ref_model, str):
            ref_model = load_model(ref_model, self.args)
        if ref_model is not None:
            settle_layout(ref_model, self.args.layout)
        reference = reference_for(self.model, ref_model)
        if isinstance(reference, FrozenModel):
            reference.model.to(self.args.device)
        if self.args.sync_ref_model:
            if not isinstance(reference, FrozenModel):
                raise ValueError(
                    "sync_ref_model=True needs a reference with weights of its own; pass ref_model beside the adapter"
                )
            self.add_callback(SyncRefModelCallback(reference.model))
        return reference

    def parts(self, model: Module, batch: Batch) -> tuple[Parts, Metrics]:
        mask = batch["completion_mask"]
        policy = masked_sum(logps(model, batch).logps, mask, -1)
        log_ratio = policy - masked_sum(self.reference.logps(batch), mask, -1)
        lengths = mask.sum(-1)
        kept = (lengths[0::2] > 0).repeat_interleave(2)  # pairs that only fill up a batch have no loss
        policy, log_ratio, lengths = policy[kept], log_ratio[kept], lengths[kept]
        pairs = Pairs(log_ratio[0::2], log_ratio[1::2], lengths[0::2], lengths[1::2])
        smoothing = {"smoothing": self.args.label_smoothing} if self.args.label_smoothing else {}
        losses = self.pair_loss(pairs, self.args.beta, **smoothing)
        return Parts(sequences=losses.sum()), self._metrics(pairs, policy)

    def _metrics(self, pairs: Pairs, policy: Tensor) -> Metrics:
        margin = pairs.margin.detach()
        values = {
            "rewards/chosen": self.args.beta * pairs.chosen,
            "rewards/rejected": self.args.beta * pairs.rejected,
            "rewards/margins": self.args.beta * margin,
            "rewards/accuracies": (margin.sign() + 1) / 2,
            "logps/chosen": policy[0::2],
            "logps/rejected": policy[1::2],
        }
        return means_of(values, len(margin))
