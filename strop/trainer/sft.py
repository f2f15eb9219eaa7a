"""Supervised fine-tuning.

rows --prepare--> input_ids + labels --collate--> batch --logps--> log-probabilities --loss--> share of the step's loss
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.compat import accepts_old_names
from strop.data.collate import (
    IGNORE,
    Batch,
    EncoderDecoderCollator,
    SupervisedCollator,
    by_example,
    flat_labels,
    masked_targets,
)
from strop.data.inspect import as_text, explain
from strop.data.prepare import check_ids, prepare
from strop.losses.reduce import StepCounts, token_mean
from strop.losses.supervised import SUPERVISED_LOSSES, label_smoothed
from strop.models.forward import base_model, forward
from strop.models.logps import TokenScores, logps, top_ids
from strop.models.neftune import neftune

from . import checks
from .base import BaseTrainer
from .config import SFTConfig, config_for
from .layout import settle_layout
from .meter import Metrics
from .setup import (
    check_datasets,
    check_lengths,
    ready_model,
    ready_tokenizer,
    router_aux_loss_coef,
    show_logs,
    vocabulary_size,
)

Rows = Dataset | IterableDataset | torch.utils.data.Dataset


@accepts_old_names
class SFTTrainer(BaseTrainer):
    """Fine-tunes a causal language model on given texts.

    Rows are texts, conversations, prompts with completions (plain or conversational), or tokens: see docs/sft.md. The
    loss is the mean over all trained tokens of an optimizer step, whatever the batch size, accumulation, packing or
    number of processes.

    Metrics: `loss`, `entropy` (nats) and `mean_token_accuracy` over the trained tokens, `num_tokens` read so far,
    `aux_loss` for mixtures of experts; with `eval_` in front of them for evaluation.

    Raises ValueError, before the model is loaded where that is possible, for rows it can't read, an empty data set, and
    options that contradict each other or would have no effect.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: SFTConfig | TrainingArguments | None = None,
        data_collator: Callable[[list[dict]], Batch] | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | dict[str, Rows] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict], str | list[str]] | None = None,
    ):
        args = config_for(SFTConfig, args, model, "SFT")
        show_logs(args)
        check_datasets(train_dataset, eval_dataset, args)
        _check_functions(args, data_collator, compute_loss_func, formatting_func)
        tokenizer = ready_tokenizer(processing_class, model, args)
        self.formatting_func = formatting_func
        self.preparation_reports: dict[str, Any] = {}
        self._tokenised: dict[str, Dataset] = {}  # data sets that came as tokens, until their ids are checked
        with args.main_process_first(desc="data preparation"):
            train_dataset = self._prepared(train_dataset, "train", tokenizer, args)
            eval_dataset = self._prepared(eval_dataset, "eval", tokenizer, args)
        model = ready_model(model, args, tokenizer, quantization_config, peft_config)
        for report in self.preparation_reports.values():
            check_lengths(model, report, args.max_length)
        self._check_ids(model)
        if data_collator is None:
            data_collator = supervised_collator(model, tokenizer, args)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            preparation_reports=self.preparation_reports,
        )
        self.token_loss = args.loss_type if callable(args.loss_type) else SUPERVISED_LOSSES[args.loss_type]
        self.aux_loss_coef = router_aux_loss_coef(model, args)
        self.neftune_noise_alpha = None  # transformers' own noise would depend on how rows are packed

    def _prepared(self, rows, name: str, tokenizer, args: SFTConfig):
        """`rows`, a data set or a dictionary of them, as input_ids + labels. Prepared rows come back as they are."""
        if rows is None or (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
            return rows
        if isinstance(rows, dict):
            return {key: self._prepared(part, f"{name}_{key}", tokenizer, args) for key, part in rows.items()}
        was_tokenised = "input_ids" in (getattr(rows, "column_names", None) or ["input_ids"])
        packing = args.packing if name == "train" or args.eval_packing is None else args.eval_packing
        rows, self.preparation_reports[name] = prepare(
            rows, tokenizer, args, formatting_func=self.formatting_func, name=name, packing=packing
        )
        if was_tokenised and isinstance(rows, Dataset):
            self._tokenised[name] = rows
        return rows

    def _check_ids(self, model: Module) -> None:
        for name, rows in self._tokenised.items():
            check_ids(rows, vocabulary_size(model), name)
        self._tokenised.clear()

    def _set_signature_columns_if_needed(self):
        if self._signature_columns is None:
            self._signature_columns = ["input_ids", "labels", "seq_lengths", "completion_mask", "assistant_masks"]

    def inspect(self, count: int = 3) -> None:
        """Print the first `count` training rows as the model will see them: every token trained, context or padding."""
        rows = explain(self.train_dataset, self.processing_class, range(min(count, len(self.train_dataset))))
        print(as_text(rows, show_tokens=True))

    # Loss

    def loss(self, model: Module, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
        mask = batch["completion_mask"]
        num_tokens = mask.sum()
        alpha = self.args.neftune_noise_alpha
        with neftune(model, batch, alpha) if alpha else nullcontext():
            if self.compute_loss_func is not None:
                return self._users_loss(model, batch, counts), {}
            smoothed = self.args.label_smoothing_factor > 0
            scores = logps(model, batch, entropy=True, top1=True, mean_logps=smoothed)
        share = token_mean(self._token_losses(scores), mask, counts)
        metrics = {
            "entropy": (scores.entropy.sum(), num_tokens),
            "mean_token_accuracy": (scores.is_top1.sum(), num_tokens),
        }
        if self.aux_loss_coef and scores.aux_loss is not None:
            share = share + self.aux_loss_coef * scores.aux_loss * num_tokens / max(counts.tokens, 1)
            metrics["aux_loss"] = (scores.aux_loss * num_tokens, num_tokens)
        return share, metrics

    def _token_losses(self, scores: TokenScores) -> Tensor:
        losses = self.token_loss(scores.logps)
        if losses.shape != scores.logps.shape:
            raise ValueError(
                f"the function given as loss_type returned {tuple(losses.shape)} for log-probabilities of shape "
                f"{tuple(scores.logps.shape)}; it must return the loss of each token, in the same shape (the mean over "
                "the trained ones is taken afterwards)"
            )
        if self.args.label_smoothing_factor:
            losses = label_smoothed(losses, scores.mean_logps, self.args.label_smoothing_factor)
        return losses

    def _users_loss(self, model: Module, batch: Batch, counts: StepCounts) -> Tensor:
        """What `compute_loss_func` makes of full logits and labels at their own index, as transformers calls it."""
        outputs = forward(model, batch)
        return self.compute_loss_func(outputs, flat_labels(batch), num_items_in_batch=counts.tokens)

    # Evaluation

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """As in transformers, and `eval_dataset` may be raw rows, prepared as those of the constructor were."""
        if eval_dataset is not None and not isinstance(eval_dataset, str | dict):
            eval_dataset = self._prepared(eval_dataset, metric_key_prefix, self.processing_class, self.args)
            self._check_ids(self.model)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test"):
        """As in transformers; rows may be raw. Predictions are the likeliest ids, (rows, tokens), like the labels."""
        if isinstance(test_dataset, dict):
            raise ValueError(f"predict takes one data set, but this is a dictionary of {sorted(test_dataset)}")
        test_dataset = self._prepared(test_dataset, metric_key_prefix, self.processing_class, self.args)
        self._check_ids(self.model)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def predictions(self, model: Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.preprocess_logits_for_metrics is None:
            values, labels = top_ids(model, batch), masked_targets(batch)
        else:
            values, labels = forward(model, batch).logits, flat_labels(batch)
        return by_example(batch, values, 0), by_example(batch, labels, IGNORE)


def _check_functions(args: SFTConfig, data_collator, compute_loss_func, formatting_func) -> None:
    """Refuse functions of the user's that would leave an option, or that an option would leave, without effect."""
    if data_collator is not None:
        checks.collator(args)
        if (args.packing or args.eval_packing) and not isinstance(data_collator, SupervisedCollator):
            raise ValueError(
                "packing=True puts several rows into one, told apart by the column seq_lengths, which a data_collator "
                "of your own need not heed: rows would read each other. Pass packing=False, or no data_collator"
            )
    if compute_loss_func is not None:
        checks.users_loss(args)
    if formatting_func is not None and (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        raise ValueError(
            'formatting_func would have no effect with dataset_kwargs={"skip_prepare_dataset": true}, which leaves the '
            "rows as they are; remove one of the two"
        )


def supervised_collator(model: Module, tokenizer: PreTrainedTokenizerBase, args: SFTConfig):
    """The collator for what `model` can read; `model` is made ready for it."""
    layout, multiple = settle_layout(model, args.layout, args.padding_free), args.pad_to_multiple_of or 1
    config = base_model(model).config
    if config.is_encoder_decoder:
        return EncoderDecoderCollator(tokenizer.pad_token_id, config.decoder_start_token_id, multiple)
    return SupervisedCollator(tokenizer.pad_token_id, layout, multiple)
