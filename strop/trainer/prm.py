"""Process reward models: a judgement of each step of a solution, trained by which steps are good."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from strop.compat import accepts_old_names
from strop.data.arguments import StepArguments
from strop.data.collate import IGNORE, Batch
from strop.data.steps import StepCollator, prepare_steps
from strop.losses.reduce import StepCounts
from strop.losses.reward import step_cross_entropy
from strop.models.scores import checked_head, token_outputs, token_states
from strop.rewards.reward_model import Words, score_steps

from . import checks
from .base import BaseTrainer
from .meter import Metrics
from .preference import Parts, PreferenceConfig, PreferenceTrainer, Rows
from .reward import check_head, scoring_layout
from .setup import ready_model


@accepts_old_names
@dataclass
class PRMConfig(StepArguments, PreferenceConfig):
    """Settings of process reward modelling."""

    learning_rate: float = 1e-5
    """Peak learning rate of the optimizer."""

    def __post_init__(self):
        checks.no_balancing(self)
        super().__post_init__()


@accepts_old_names
class PRMTrainer(PreferenceTrainer):
    """Trains a token classifier of two classes to tell good steps of a solution from bad ones.

    Rows have `prompt`, `completions` (a list of steps) and `labels` (true for a good step). Behind each step stands the
    separator, and the step is judged at its last token. A language model's name is loaded with a new head. Metrics:
    `accuracy` (the share of steps whose likelier class is their label, ties count half); loss and metrics are means
    over the labelled steps of an optimizer step.
    """

    config_class = PRMConfig
    method = "PRM"
    compared = token_states

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: PRMConfig | TrainingArguments | None = None,
        data_collator: Callable[[list[dict]], Batch] | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | dict[str, Rows] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        if isinstance(model, Module):
            checked_head(model, num_labels=2)
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
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )

    def ready_model(self, model, args, tokenizer, quantization_config, peft_config) -> Module:
        loading = {"auto_class": AutoModelForTokenClassification, "num_labels": 2}
        model = ready_model(model, args, tokenizer, quantization_config, peft_config, **loading)
        check_head(model, num_labels=2)
        return model

    def prepare(self, rows, name, tokenizer, args):
        """Its steps' judgements as labels."""
        return prepare_steps(rows, tokenizer, args, name)

    def collator(self, tokenizer, layout, args) -> Callable[[list[dict]], Batch]:
        return StepCollator(tokenizer.pad_token_id, layout, args.pad_to_multiple_of or 1)

    def _set_signature_columns_if_needed(self):
        if self._signature_columns is None:
            self._signature_columns = ["input_ids", "labels"]

    def count(self, batch: Batch) -> StepCounts:
        return BaseTrainer.count(self, batch)

    def parts(self, model: Module, batch: Batch) -> tuple[Parts, Metrics]:
        mask = batch["completion_mask"].bool()
        logits, labels = token_outputs(model, batch)[mask], batch["targets"][mask]
        lead = (logits[:, 1] - logits[:, 0]).detach() * (2 * labels - 1)  # of the right class over the wrong one
        metrics = {"accuracy": (((lead.sign() + 1) / 2).sum(), len(labels))}
        return Parts(tokens=step_cross_entropy(logits, labels).sum()), metrics

    def predictions(self, model: Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (E, S, 2) of each row's labelled steps and their labels (E, S), with -100 behind the last one."""
        mask = batch["completion_mask"].bool()
        logits, labels = token_outputs(model, batch), batch["targets"]
        both = [[row[own] for row, own in zip(values, mask, strict=True)] for values in (logits, labels)]
        steps, judgements = (pad_sequence(rows, batch_first=True, padding_value=IGNORE) for rows in both)
        return steps, judgements

    def score(self, prompts: Sequence[Words], solutions: Sequence[Sequence[str]], **columns: Any) -> list[Tensor]:
        """For each solution, a list of steps, the probability that each step is good, (S,); see `strop.rewards`."""
        with self.compute_loss_context_manager():
            return score_steps(
                self.model,
                self.processing_class,
                prompts,
                solutions,
                separator=self.args.step_separator,
                batch_size=self.args.per_device_eval_batch_size,
                template_options=self.args.chat_template_kwargs,
                layout=scoring_layout(self),
                **columns,
            )
