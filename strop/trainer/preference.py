"""What trainers on completions of one prompt share: rows, model, layout, a loss of parts with units of their own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.data.arguments import PreferenceArguments
from strop.data.collate import Batch
from strop.data.preference import PAIRS, PreferenceCollator, PreferenceFormat, prepare_preference
from strop.data.report import PreparationReport
from strop.losses.reduce import StepCounts
from strop.models.arguments import ModelInitArguments
from strop.models.forward import base_model
from strop.models.segments import Layout

from . import checks, whole_step
from .base import BaseTrainer
from .config import BaseConfig, config_for
from .layout import settle_layout
from .meter import Metrics
from .setup import check_datasets, check_lengths, ready_model, ready_tokenizer, router_aux_loss_coef, show_logs

RATES = ("attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "dropout_p", "dropout_prob")
"""What modules of transformers call a dropout rate that they pass on."""

BY_LENGTH = ("group_by_length", "batch_rebalance")
"""Strategies of sampling that look at how long rows are."""

Rows = Dataset | IterableDataset | torch.utils.data.Dataset


@dataclass
class PreferenceConfig(PreferenceArguments, ModelInitArguments, BaseConfig):
    """Settings that every trainer on completions of one prompt has."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*BaseConfig._VALID_DICT_FIELDS, "model_init_kwargs"]

    def __post_init__(self):
        self.pad_to_multiple_of = checks.multiple(self.pad_to_multiple_of)
        self.model_init_kwargs = checks.mapping("model_init_kwargs", self.model_init_kwargs)
        checks.preference_data(self)
        checks.step_counts(self)
        checks.no_effect(
            self,
            {"label_smoothing_factor": 0.0, "neftune_noise_alpha": None},
            "a loss on whole completions, which doesn't use it",
        )
        checks.offloading(self.activation_offloading, self.device_type)
        super().__post_init__()


class Parts(NamedTuple):
    """A micro-batch's loss before anything is divided: one sum for each unit it is a mean over, ()."""

    sequences: Tensor | float = 0.0
    """Over examples: pairs, triples, labelled rows, groups."""
    tokens: Tensor | float = 0.0
    """Over the tokens of a likelihood term, as `nll_side` says."""

    def share(self, counts: StepCounts) -> Tensor:
        """The micro-batch's share of the step's loss."""
        return self.sequences / max(counts.sequences, 1) + self.tokens / max(counts.tokens, 1)


class PreferenceTrainer(BaseTrainer):
    """A `BaseTrainer` whose subclasses write `parts`: the loss of a micro-batch as sums, and its metrics.

    Rows come as `wanted` says, raw or prepared, in training, `evaluate` and `predict` alike.
    """

    config_class: ClassVar[type[PreferenceConfig]]
    method: ClassVar[str]
    """Its name, in the default output folder's."""
    wanted: ClassVar[PreferenceFormat] = PAIRS
    nll_side: ClassVar[int] = 0
    """Which of the sides a likelihood term reads."""
    needs_whole_step = False
    """Whether a row's loss depends on other rows: `parts` then adds up `row_losses` by `whole_step.total`, in training
    over the rows of the optimizer step, in evaluation over the whole set. May be a property."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: PreferenceConfig | TrainingArguments | None,
        data_collator: Callable[[list[dict]], Batch] | None,
        train_dataset: Rows | None,
        eval_dataset: Rows | dict[str, Rows] | None,
        processing_class: PreTrainedTokenizerBase | None,
        *,
        quantization_config: Any = None,
        peft_config: Any = None,
        **options: Any,
    ):
        args = config_for(self.config_class, args, model, self.method)
        show_logs(args)
        check_datasets(train_dataset, eval_dataset, args)
        tokenizer = ready_tokenizer(processing_class, model, args)
        self.preparation_reports: dict[str, PreparationReport] = {}
        with args.main_process_first(desc="data preparation"):
            train_dataset = self.prepared(train_dataset, "train", tokenizer, args)
            eval_dataset = self.prepared(eval_dataset, "eval", tokenizer, args)
        model = self.ready_model(model, args, tokenizer, quantization_config, peft_config)
        refuse_encoder_decoder(model)
        for report in self.preparation_reports.values():
            check_lengths(model, report, args.max_length)
        if args.disable_dropout:
            disable_dropout(model)
        if data_collator is not None:
            checks.collator(args)
        layout = self.settled_layout(model, args)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or self.collator(tokenizer, layout, args),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            preparation_reports=self.preparation_reports,
            **options,
        )
        self.aux_loss_coef = router_aux_loss_coef(model, args)
        if self.needs_whole_step and "loss" in args.include_for_metrics:
            raise ValueError(
                'include_for_metrics has "loss", but this loss is one of the whole set, in which no batch has one of '
                "its own; remove it, eval_loss tells the whole"
            )

    def ready_model(self, model, args, tokenizer, quantization_config, peft_config) -> Module:
        return ready_model(model, args, tokenizer, quantization_config, peft_config)

    def settled_layout(self, model, args) -> Layout:
        """The layout to collate into; `model` is made ready for it."""
        return settle_layout(model, args.layout, args.padding_free)

    def collator(self, tokenizer, layout, args) -> Callable[[list[dict]], Batch]:
        return PreferenceCollator(tokenizer.pad_token_id, layout, self.wanted, args.pad_to_multiple_of or 1)

    def prepared(self, rows: Any, name: str, tokenizer: PreTrainedTokenizerBase, args: PreferenceConfig) -> Any:
        """`rows`, a data set or a dictionary of them, as tokens. Prepared rows come back as they are."""
        if rows is None:
            return None
        if isinstance(rows, dict):
            return {key: self.prepared(part, f"{name}_{key}", tokenizer, args) for key, part in rows.items()}
        rows, self.preparation_reports[name] = self.prepare(rows, name, tokenizer, args)
        return rows

    def prepare(self, rows: Rows, name: str, tokenizer: PreTrainedTokenizerBase, args: PreferenceConfig):
        """One data set as tokens, and the report of its preparation."""
        return prepare_preference(rows, tokenizer, args, self.wanted, name)

    def _set_signature_columns_if_needed(self):
        if self._signature_columns is None:
            logps = [f"ref_{side}_logps" for side in self.wanted.sides]
            self._signature_columns = [*self.wanted.columns, *self.wanted.extras, *logps]

    def _get_train_sampler(self, train_dataset=None):
        """As in transformers, whose samplers by length get the tokens of whole rows."""
        rows = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(rows, Dataset) and self.args.train_sampling_strategy in BY_LENGTH:
            self._set_signature_columns_if_needed()
            ids = [name for name in rows.column_names if name in self._signature_columns and name.endswith("_ids")]
            lengths = [sum(map(num_tokens, row.values())) for row in rows.select_columns(ids)]
            rows = Dataset.from_dict({self.args.length_column_name: lengths})
        return super()._get_train_sampler(rows)

    # Loss

    def parts(self, model: Module, batch: Batch) -> tuple[Parts, Metrics]:
        """The micro-batch's loss as sums over examples and over tokens, and metrics as (sum, weight)."""
        raise TypeError(f"{type(self).__name__} must define `parts`")

    def loss(self, model: Module, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
        parts, metrics = self.parts(model, batch)
        return parts.share(counts), metrics

    def balancing(self, aux_loss: Tensor | None, count: int) -> tuple[Tensor | float, Metrics]:
        """A mixture of experts' load-balancing loss as a sum over `count` examples, and its metric; 0 for others."""
        if not self.aux_loss_coef or aux_loss is None:
            return 0.0, {}
        return self.aux_loss_coef * aux_loss * count, {"aux_loss": (aux_loss.detach() * count, count)}

    def row_losses(self, scores: Any) -> Tensor:
        """The loss of each row, (n,), from scores of all the rows that it depends on; where `needs_whole_step`."""
        raise TypeError(f"{type(self).__name__} must define `row_losses`")

    def ahead(self, model: Module, batch: Batch) -> Any:
        """What is computed of a micro-batch before the first is trained: `parts`, or what `row_losses` read of it."""
        return self.parts(model, batch)

    def look_ahead(self, batches: list[Batch]) -> None:
        num_processes = self.accelerator.num_processes
        if not self.needs_whole_step or (len(batches) == 1 and num_processes == 1):
            return
        self.model_wrapped.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free ones hold other weights in evaluation
            self.optimizer.train()
        with torch.no_grad(), self.compute_loss_context_manager():
            run = partial(self.ahead, self.model_wrapped)
            whole_step.look_ahead(batches, run, num_processes, self.accelerator.process_index)

    def count(self, batch: Batch) -> StepCounts:
        mask = batch["completion_mask"]
        num_sides = len(self.wanted.sides)
        return StepCounts(int(mask[self.nll_side :: num_sides].sum()), int(mask[::num_sides].any(-1).sum()))

    # Evaluation

    def evaluation_loop(self, *args, **kwargs):
        self.eval_scores: whole_step.Collected = whole_step.Collected()
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """As in training, but the parts of the loss are added up over the whole set before they are divided."""
        batch = self._without_repeats(self.read(self._prepare_inputs(inputs)), self.args.per_device_eval_batch_size)
        if self.needs_whole_step:
            batch[whole_step.KEY] = self.eval_scores
        with torch.no_grad(), self.compute_loss_context_manager():
            parts, metrics = self.parts(model, batch)
            predictions = (None, None) if prediction_loss_only else self.predictions(model, batch)
        counts = self.count(batch)
        sums = {f"loss/{unit}": (getattr(parts, unit), float(getattr(counts, unit))) for unit in Parts._fields}
        self.eval_sums.add({**sums, **metrics})
        loss = parts.share(counts) if "loss" in self.args.include_for_metrics else None
        return loss, *predictions

    def measured(self, metrics: dict[str, float]) -> dict[str, float]:
        if self.needs_whole_step:
            scores, _ = self.eval_scores.gathered(self.accelerator.num_processes)
            if scores is not None and whole_step.num_rows(scores):
                beside = metrics.get("loss/sequences", 0.0)  # what isn't a loss of rows: balancing
                metrics = metrics | {"loss/sequences": beside + self.row_losses(scores).mean().item()}
        parts = [f"loss/{unit}" for unit in Parts._fields]
        rest = {name: value for name, value in metrics.items() if name not in parts}
        return {"loss": sum(metrics.get(name, 0.0) for name in parts), **rest} if metrics else {}

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """As in transformers, and `eval_dataset` may be raw rows, or a dictionary of data sets."""
        if eval_dataset is not None and not isinstance(eval_dataset, str | dict):
            eval_dataset = self.prepared(eval_dataset, metric_key_prefix, self.processing_class, self.args)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test"):
        """As in transformers, and `test_dataset` may be raw rows."""
        test_dataset = self.prepared(test_dataset, metric_key_prefix, self.processing_class, self.args)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)


def refuse_encoder_decoder(model: Module) -> None:
    """Refuse a model whose encoder reads the prompt and whose decoder writes the completion: rows are one text here."""
    base = base_model(model)
    if getattr(base.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(base).__name__} has an encoder and a decoder, but here prompt and completion are one text. Take a "
            "decoder-only model; SFTTrainer trains encoder-decoder models"
        )


def disable_dropout(model: Module) -> None:
    """Switch off every dropout layer of `model`, and every rate its modules keep; those in its config stay."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in RATES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def num_tokens(ids: list) -> int:
    """Tokens of a completion, or of all completions in a list of them."""
    return sum(map(num_tokens, ids)) if ids and isinstance(ids[0], list) else len(ids)


def means_of(values: Mapping[str, Tensor], count: int) -> Metrics:
    """Metrics whose values, (n,) each, are averaged over `count` examples."""
    return {name: (value.detach().sum(), count) for name, value in values.items()}
