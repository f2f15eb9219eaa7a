"""Direct preference optimisation: a pair's two completions, one forward pass, one line of `PREFERENCE_LOSSES`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.callbacks.sync_ref import SyncRefModelCallback
from strop.compat import accepts_old_names
from strop.data.collate import Batch
from strop.data.pairs import COLUMNS, PairCollator, prepare_pairs
from strop.losses.preference import PREFERENCE_LOSSES, Pairs
from strop.losses.reduce import StepCounts, masked_sum
from strop.models.arguments import ModelInitArguments
from strop.models.load import load_model
from strop.models.logps import logps
from strop.models.reference import FrozenModel, reference_for

from . import checks
from .base import BaseTrainer
from .config import BaseConfig, config_for
from .layout import settle_layout
from .meter import Metrics
from .setup import check_datasets, ready_model, ready_tokenizer, show_logs


@accepts_old_names
@dataclass
class DPOConfig(ModelInitArguments, BaseConfig):
    """Settings of direct preference optimisation."""

    learning_rate: float = 1e-6
    """Peak learning rate of the optimizer."""

    loss_type: str = "sigmoid"
    """Loss of a pair: a key of `strop.losses.preference.PREFERENCE_LOSSES`."""

    beta: float = 0.1
    """Scale of the implicit reward log pi/ref, in 1/nat; larger keeps the policy closer to the reference."""

    label_smoothing: float = 0.0
    """Chance that a preference label is flipped, in [0, 0.5); only with loss_type="sigmoid"."""

    max_length: int | None = 1024
    """Longest prompt with completion in tokens; completions are cut. None for no limit."""

    layout: str = "auto"
    """"packed" holds a pair's prompt once, "padded" twice; "auto" packs wherever the model allows it."""

    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO, arXiv:2404.09656)."""

    ref_model_sync_steps: int = 512
    """Optimizer steps between two updates of the reference."""

    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in the updated reference, in (0, 1]."""

    chat_template_path: str | None = None
    """A .jinja file with a chat template, or a model or folder whose tokenizer's template to adopt."""

    def __post_init__(self):
        checks.one_of("loss_type", self.loss_type, PREFERENCE_LOSSES)
        checks.one_of("layout", self.layout, ("auto", "packed", "padded"))
        checks.within("label_smoothing", self.label_smoothing, 0, 0.5)
        checks.at_least("max_length", self.max_length, 1)
        checks.at_least("ref_model_sync_steps", self.ref_model_sync_steps, 1)
        checks.step_counts(self)
        self.model_init_kwargs = checks.mapping("model_init_kwargs", self.model_init_kwargs)
        if not 0 < self.ref_model_mixup_alpha <= 1:
            raise ValueError(
                f"ref_model_mixup_alpha={self.ref_model_mixup_alpha} is out of range; a share is in (0, 1]."
            )
        for name in ("router_aux_loss_coef", "label_smoothing_factor", "neftune_noise_alpha"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} would have no effect: this loss doesn't use it. Remove it."
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
class DPOTrainer(BaseTrainer):
    """Trains a policy on pairs of a preferred and a dispreferred completion, relative to a reference policy.

    Rows have `prompt`, `chosen` and `rejected`, as texts or lists of messages; the prompt may be part of both sides
    instead. Without `ref_model` the reference is the model as it is now. Metrics: `rewards/chosen`, `rewards/rejected`
    (beta log pi/ref), `rewards/margins`, `rewards/accuracies` (ties count half), `logps/chosen`, `logps/rejected`.
    """

    eval_weight = "sequences"

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: str | PreTrainedModel | None = None,
        args: DPOConfig | TrainingArguments | None = None,
        data_collator: Callable[[list[dict]], Batch] | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        args = config_for(DPOConfig, args, model, "DPO")
        if compute_metrics is not None:
            raise ValueError("compute_metrics would get no predictions: pairs are scored, not predicted. Remove it.")
        show_logs(args)
        check_datasets(train_dataset, eval_dataset, args)
        tokenizer = ready_tokenizer(processing_class, model, args)
        with args.main_process_first(desc="data preparation"):
            train_dataset = self._prepared(train_dataset, tokenizer, args, "train")
            eval_dataset = self._prepared(eval_dataset, tokenizer, args, "eval")
        model = ready_model(model, args, tokenizer, quantization_config, peft_config)
        layout = settle_layout(model, args.layout)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or PairCollator(tokenizer.pad_token_id, layout),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.reference = self._settled_reference(ref_model)
        self.pair_loss = PREFERENCE_LOSSES[args.loss_type]

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

    def _prepared(self, rows, tokenizer, args: DPOConfig, name: str):
        if rows is None:
            return None
        if isinstance(rows, dict):
            return {key: self._prepared(part, tokenizer, args, f"{name}_{key}") for key, part in rows.items()}
        if not isinstance(rows, Dataset):
            raise ValueError(f"the {name} data set is a {type(rows).__name__}; pairs come as a datasets.Dataset so far")
        return prepare_pairs(rows, tokenizer, args.max_length, name)

    def _set_signature_columns_if_needed(self):
        self._signature_columns = list(COLUMNS)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """As in transformers, and `eval_dataset` may be raw rows."""
        if eval_dataset is not None and not isinstance(eval_dataset, str | dict):
            eval_dataset = self._prepared(eval_dataset, self.processing_class, self.args, metric_key_prefix)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def loss(self, model: Module, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
        mask = batch["completion_mask"]
        policy = masked_sum(logps(model, batch).logps, mask, -1)
        log_ratio = policy - masked_sum(self.reference.logps(batch), mask, -1)
        lengths = mask.sum(-1)
        kept = (lengths[0::2] > 0).repeat_interleave(2)  # pairs that only fill up a batch have no loss
        policy, log_ratio, lengths = policy[kept], log_ratio[kept], lengths[kept]
        pairs = Pairs(log_ratio[0::2], log_ratio[1::2], lengths[0::2], lengths[1::2])
        smoothing = {"smoothing": self.args.label_smoothing} if self.args.label_smoothing else {}
        losses = self.pair_loss(pairs, self.args.beta, **smoothing)
        return losses.sum() / max(counts.sequences / 2, 1), self._metrics(pairs, policy)

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
        return {name: (value.detach().sum(), len(margin)) for name, value in values.items()}
