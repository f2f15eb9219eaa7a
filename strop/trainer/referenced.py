"""What trainers share that compare the policy with a reference: which it is, when it is asked, how it moves."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from strop.callbacks.alarms import PreferenceAlarm
from strop.callbacks.bema import BEMACallback
from strop.callbacks.state import refuse_shards
from strop.callbacks.sync_ref import SyncRefModelCallback
from strop.data.collate import Batch
from strop.data.preference import PreferenceCollator
from strop.models.adapters import is_peft
from strop.models.arguments import ReferenceArguments
from strop.models.forward import base_model
from strop.models.load import load_model
from strop.models.quantize import is_quantized
from strop.models.reference import (
    Computed,
    FrozenModel,
    FrozenWeights,
    ModelNow,
    Precomputed,
    Reference,
    fingerprint,
    reference_for,
)
from strop.models.segments import Layout
from strop.models.tokenizers import check_vocabulary

from . import checks
from .layout import LayoutGuard, settle_layout
from .precompute import ReferenceColumns
from .preference import PreferenceConfig, PreferenceTrainer, Rows, disable_dropout
from .setup import ITERABLE

SAMPLE = 256
"""Numbers of each tensor by which a resumed run knows its reference."""


class ReferencedTrainer(PreferenceTrainer):
    """A `PreferenceTrainer` with a reference policy, which `reference_logps` asks.

    It is `ref_model` if given, else the model as it is now, adapters included. Raises ValueError for a `ref_model` that
    is trained along, and for options that contradict what the reference is.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: str | PreTrainedModel | None,
        args: PreferenceConfig | TrainingArguments | None,
        data_collator: Callable[[list[dict]], Batch] | None,
        train_dataset: Rows | None,
        eval_dataset: Rows | dict[str, Rows] | None,
        processing_class: PreTrainedTokenizerBase | None,
        **options: Any,
    ):
        self._ref_model = ref_model
        self._columns: ReferenceColumns | None = None
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, processing_class, **options)
        self._asked: Computed | None = self._settled_reference()
        """Who computes log-probabilities; None if no one can any more."""
        self.reference: Reference = self._asked
        self._ref_guard = LayoutGuard()
        self.add_callback(PreferenceAlarm())
        if self.args.precompute_ref_log_probs:
            self._precompute()

    def ready_model(self, model, args, tokenizer, quantization_config, peft_config) -> Module:
        """As for every trainer, and `ref_model`, if one was given, beside it."""
        model = super().ready_model(model, args, tokenizer, quantization_config, peft_config)
        self._ref_model = ready_ref_model(self._ref_model, model, args, tokenizer)
        return model

    def settled_layout(self, model, args) -> Layout:
        """One layout for policy and reference."""
        layout = super().settled_layout(model, args)
        if self._ref_model is None:
            return layout
        return layout if settle_layout(self._ref_model, args.layout, args.padding_free) == layout else "padded"

    def _settled_reference(self) -> Computed:
        averages = [c for c in self.callback_handler.callbacks if isinstance(c, BEMACallback) and c.update_ref_model]
        movers = [*averages, *(["sync_ref_model=True"] if self.args.sync_ref_model else [])]
        if len(movers) > 1 or (movers and self.args.precompute_ref_log_probs):
            raise ValueError(
                "BEMACallback(update_ref_model=True) moves the reference, and so would a second one or "
                "sync_ref_model=True, while precompute_ref_log_probs=True asks it only once; keep one of them."
            )
        copied = not self.args.precompute_ref_log_probs
        reference = placed_reference(self.model, self._ref_model, self.args, moving=bool(movers), copied=copied)
        for callback in averages:
            callback.reference = reference
        if self.args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(reference))
        if not movers:  # one that moves is in the checkpoints
            self.add_callback(SameReference(fingerprint(reference, SAMPLE)))
        return reference

    @property
    def ref_model(self) -> Module | None:
        """The second model in memory, if the reference is one."""
        return self.reference.model if isinstance(self.reference, FrozenModel) else None

    def reference_logps(self, batch: Batch) -> Tensor:
        """(B, T): what the reference says of a batch, asked once."""
        if "reference" not in batch:
            with self.accelerator.autocast():  # as the policy's own forward runs
                batch["reference"] = self.reference.logps(batch)
        return batch["reference"]

    def read(self, inputs: Batch) -> Batch:
        batch = super().read(inputs)
        if self._ref_model is None or self._asked is None:  # a copy computes as its original does
            return batch
        with self.accelerator.autocast():
            return self._ref_guard(self._asked.model, batch)

    def _precompute(self) -> None:
        """Let the data sets carry what the reference says, and keep no model for it."""
        if not isinstance(self.data_collator, PreferenceCollator):
            raise ValueError(
                "precompute_ref_log_probs=True hands the reference's log-probabilities on in columns, which a "
                "data_collator of your own need not heed; remove one of the two"
            )
        size = self.args.precompute_ref_batch_size or self.args.per_device_eval_batch_size
        num, index = self.accelerator.num_processes, self.accelerator.process_index
        key = f"{fingerprint(self.reference)} {self.accelerator.mixed_precision}"
        self._columns = ReferenceColumns(self._asked_logps, key, self.wanted.sides, size, num, index)
        self.train_dataset = self._with_reference(self.train_dataset, "train")
        self.eval_dataset = self._with_reference(self.eval_dataset, "eval")
        self.reference = Precomputed()
        if isinstance(self._asked, FrozenModel):
            self._asked = self._ref_model = None

    def _asked_logps(self, examples: list[dict[str, Any]]) -> Tensor:
        batch = self.read(self._prepare_inputs(self.data_collator(examples)))
        with self.accelerator.autocast():
            return self._asked.logps(batch)

    def prepared(self, rows: Any, name: str, tokenizer: PreTrainedTokenizerBase, args: Any) -> Any:
        if args.precompute_ref_log_probs and isinstance(rows, ITERABLE):
            raise ValueError(
                f"precompute_ref_log_probs=True goes through the {name} data set before training, but an "
                "IterableDataset is read only once. Pass a datasets.Dataset, or remove it"
            )
        rows = super().prepared(rows, name, tokenizer, args)
        return self._with_reference(rows, name) if self._columns is not None and isinstance(rows, Dataset) else rows

    def _with_reference(self, rows: Any, name: str) -> Any:
        if rows is None:
            return None
        if isinstance(rows, dict):
            return {key: self._with_reference(part, f"{name}_{key}") for key, part in rows.items()}
        is_gone = self._asked is None or (isinstance(self._asked, ModelNow) and self.state.global_step > 0)
        if is_gone and not self._columns.are_in(rows):
            raise ValueError(
                f"{name}: the reference was asked before training and is not in memory any more "
                "(precompute_ref_log_probs=True), so new rows can't be compared with it. Give them to the constructor "
                "as an eval_dataset, or leave precompute_ref_log_probs out"
            )
        return self._columns(rows, name)


class SameReference(TrainerCallback, ExportableState):
    """Refuses to resume with another reference than the run began with."""

    def __init__(self, found: str):
        self.found = found

    def state(self) -> dict[str, Any]:
        return {"args": {"found": self.found}, "attributes": {}}

    def on_train_begin(self, args, state, control, **kwargs):
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        if saved and saved["args"]["found"] != self.found:
            raise ValueError(
                f"the run resumes at step {state.global_step} with another reference than it began with, so its "
                "log-ratios would be others. Pass the model (and ref_model) that it began with, not a checkpoint: "
                "resume_from_checkpoint loads the trained weights"
            )


def ready_ref_model(
    given: str | Module | None, model: Module, args: Any, tokenizer: PreTrainedTokenizerBase
) -> Module | None:
    """The reference that was `given` beside `model`, an object or a name; None if none was."""
    if given is None:
        return None
    loaded: Any = load_model(given, args) if isinstance(given, str) else given
    if isinstance(given, str) and "dtype" not in (args.model_init_kwargs or {}) and not is_quantized(base_model(model)):
        loaded.to(base_model(model).dtype)
    check_vocabulary(tokenizer, loaded)
    if args.disable_dropout:
        disable_dropout(loaded)
    return loaded


def placed_reference(
    model: Module, ref_model: Module | None, args: Any, *, moving: bool, copied: bool = True
) -> Computed:
    """`ref_model` or, without one, `model` as it is now (`reference_for`), on the device. Raises ValueError where
    weights lie in parts that can't be put together."""
    refuse_second_model_of_shards(model, ref_model)
    reference = reference_for(model, ref_model, moving=moving, copied=copied)
    if isinstance(reference, FrozenModel) and not is_placed(reference.model):
        reference.model.to(args.device)
    if isinstance(reference, FrozenWeights):
        refuse_shards(args, "an adapter that is its own reference")
    return reference


def refuse_second_model_of_shards(model: Module, ref_model: Module | None) -> None:
    """Refuse, with ZeRO-3, a reference that is a model of its own: no engine would put its weights together."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled() and (ref_model is not None or not is_peft(model)):
        raise ValueError(
            "the reference would be a second model, and ZeRO-3 leaves each process a part of its weights. Train a new "
            "adapter (peft_config), whose reference is the model without it, or run with DDP or ZeRO-2"
        )


def is_placed(model: Module) -> bool:
    """Whether the devices of `model` are settled: it is quantised, or spread over several."""
    return is_quantized(base_model(model)) or getattr(base_model(model), "hf_device_map", None) is not None


def check_reference(args: ReferenceArguments) -> None:
    """Refuse settings of a reference that contradict each other, or that nothing reads."""
    checks.at_least("ref_model_sync_steps", args.ref_model_sync_steps, 1)
    checks.at_least("precompute_ref_batch_size", args.precompute_ref_batch_size, 1)
    if not 0 < args.ref_model_mixup_alpha <= 1:
        raise ValueError(f"ref_model_mixup_alpha={args.ref_model_mixup_alpha} is out of range; a share is in (0, 1].")
    if not args.sync_ref_model:
        checks.no_effect(args, {"ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6}, "sync_ref_model=False")
    if not args.precompute_ref_log_probs:
        checks.no_effect(args, {"precompute_ref_batch_size": None}, "precompute_ref_log_probs=False")
    elif args.sync_ref_model:
        raise ValueError(
            "sync_ref_model=True moves the reference, and precompute_ref_log_probs=True asks it only once, before "
            "training; remove one of the two."
        )
