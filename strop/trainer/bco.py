"""Binary classifier optimisation: completions with a thumb up or down, around the mean of all rewards so far."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.callbacks.state import TensorState
from strop.compat import accepts_old_names
from strop.data.collate import Batch
from strop.data.preference import LABELLED, PreferenceFormat
from strop.losses.unpaired import bco, running_mean
from strop.models.arguments import ReferenceArguments

from . import checks, whole_step
from .density_ratio import COLUMN, Classifier, Embedder, fit, sample, weighted_rows
from .labelled import Labelled, LabelledTrainer
from .meter import Metrics
from .preference import PreferenceConfig, Rows
from .referenced import check_reference

UNWEIGHTED = {"prompt_sample_size": 1024, "min_density_ratio": 0.5, "max_density_ratio": 10.0}
"""Defaults of what only an `embedding_func` reads."""


@accepts_old_names
@dataclass
class BCOConfig(ReferenceArguments, PreferenceConfig):
    """Settings of binary classifier optimisation."""

    learning_rate: float = 5e-7
    """Peak learning rate of the optimizer."""

    beta: float = 0.1
    """Scale of the implicit reward log pi/ref, in 1/nat; larger keeps the policy closer to the reference."""

    prompt_sample_size: int = 1024
    """Prompts of each class, at most, that the classifier for the density ratio is fitted on; with embedding_func."""

    min_density_ratio: float = 0.5
    """Least weight of an undesirable row; with embedding_func."""

    max_density_ratio: float = 10.0
    """Greatest weight of an undesirable row; with embedding_func."""

    def __post_init__(self):
        checks.positive("beta", self.beta)
        checks.at_least("prompt_sample_size", self.prompt_sample_size, 1)
        checks.positive("min_density_ratio", self.min_density_ratio)
        checks.at_least("max_density_ratio", self.max_density_ratio, self.min_density_ratio)
        check_reference(self)
        super().__post_init__()


class RunningMean(TensorState):
    """The mean log-ratio of all rows trained so far, in nats, part of a run's checkpoints.

    A step's rows count before its loss, once, however they are cut; `classifier` is saved beside it.
    """

    file = "bco.safetensors"

    def __init__(self, classifier: Classifier | None = None):
        self.classifier = classifier
        self.mean, self.count = 0.0, 0
        self.next: tuple[float, int] | None = None
        """Mean and count with the rows of the step that is being trained."""

    def include(self, log_ratios: Tensor) -> None:
        """Count the log-ratios (n,) of all rows of the step."""
        total, number = log_ratios.detach().double().sum().item(), len(log_ratios)
        self.next = running_mean(self.mean, self.count, total, number), self.count + number

    def on_step_end(self, args, state, control, **kwargs):
        if self.next is not None:
            (self.mean, self.count), self.next = self.next, None

    def state(self) -> dict[str, Tensor]:
        classifier = {} if self.classifier is None else vars(self.classifier)
        mean = {"mean": torch.tensor(self.mean, dtype=torch.float64), "count": torch.tensor(self.count)}
        return mean | {f"classifier.{name}": value for name, value in classifier.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        saved = {name: value for name, value in state.items() if name.startswith("classifier.")}
        fitted = {name: value for name, value in self.state().items() if name.startswith("classifier.")}
        if saved.keys() != fitted.keys() or not all(torch.allclose(saved[name], fitted[name]) for name in saved):
            raise ValueError(
                "the classifier of prompts differs from the checkpoint's, so rows would get other weights than before: "
                "resume with the same train_dataset, seed, prompt_sample_size, embedding_func and embedding_tokenizer"
            )
        self.mean, self.count = state["mean"].item(), int(state["count"])

    def on_train_begin(self, args, state, control, **kwargs):
        self.mean, self.count, self.next = 0.0, 0, None
        if state.global_step > 0:
            self.resume(args, state, "running mean")


@accepts_old_names
class BCOTrainer(LabelledTrainer):
    """Trains a policy on completions that are labelled desirable or not (arXiv:2404.04656), relative to a reference.

    Rows are those of KTO: `prompt`, `completion` and `label`; pairs are taken as two rows each. Rewards are classified
    around their running mean, into which a step's rows count before its loss. Where the prompts of both classes come
    from different sources, `embedding_func(input_ids=..., attention_mask=...)`, which returns a vector for each prompt
    as `embedding_tokenizer` tokenises it, makes undesirable rows weigh what a classifier finds their prompts to be
    worth.

    Metrics: those of KTO, and instead of `kl` the baseline `delta` (beta times the running mean).
    """

    config_class = BCOConfig
    method = "BCO"
    needs_whole_step = True

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: str | PreTrainedModel | None = None,
        args: BCOConfig | TrainingArguments | None = None,
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
        embedding_func: Callable[..., Tensor] | None = None,
        embedding_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        if (embedding_func is None) != (embedding_tokenizer is None):
            raise ValueError(
                "embedding_func and embedding_tokenizer belong together: prompts are tokenised by the one and embedded "
                "by the other; pass both, or neither"
            )
        self.embedding_func, self.embedding_tokenizer = embedding_func, embedding_tokenizer
        self.running = RunningMean()
        super().__init__(
            model,
            ref_model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_metrics,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
            optimizer_cls_and_kwargs,
        )
        self.add_callback(self.running)
        if embedding_func is None:
            checks.no_effect(self.args, UNWEIGHTED, "no embedding_func")
        else:
            self._weigh_rows()

    def rows_wanted(self, args: Any) -> PreferenceFormat:
        extras = ("label",) if self.embedding_func is None else ("label", COLUMN)
        return PreferenceFormat(LABELLED.sides, extras)

    # Weights of rows

    def _weigh_rows(self) -> None:
        """Fit the classifier on the training prompts, and give all rows their weight."""
        if not isinstance(self.train_dataset, Dataset):
            raise ValueError(
                f"embedding_func compares the prompts of the train data set, but it is a "
                f"{type(self.train_dataset).__name__}; pass a datasets.Dataset, or no embedding_func"
            )
        labels = self.train_dataset["label"][:]
        chosen = sample(labels, self.args.prompt_sample_size, self.args.seed)
        vectors = self._embedded(self.train_dataset.select(chosen))
        self.running.classifier = fit(vectors, torch.tensor([bool(labels[i]) for i in chosen]))
        self.train_dataset = self._weighted(self.train_dataset)
        self.eval_dataset = self._weighted(self.eval_dataset)

    def _weighted(self, rows: Any) -> Any:
        if isinstance(rows, dict):
            return {key: self._weighted(part) for key, part in rows.items()}
        if rows is None:
            return None
        if not isinstance(rows, Dataset):
            raise ValueError(
                f"embedding_func weighs rows ahead, but these are a {type(rows).__name__}, read only once; pass a "
                "datasets.Dataset, or no embedding_func"
            )
        low, high = self.args.min_density_ratio, self.args.max_density_ratio
        return weighted_rows(rows, self._embedded(rows), self.running.classifier, low, high)

    def _embedded(self, rows: Dataset) -> Tensor:
        num, index = self.accelerator.num_processes, self.accelerator.process_index
        embedder = Embedder(self.embedding_func, self.embedding_tokenizer, num, index, self.args.device)
        return embedder(self.processing_class.batch_decode(rows["prompt_ids"][:], skip_special_tokens=True))

    def prepared(self, rows: Any, name: str, tokenizer: Any, args: Any) -> Any:
        rows = super().prepared(rows, name, tokenizer, args)
        is_done = self.running.classifier is None or isinstance(rows, dict)  # set by set
        return rows if is_done else self._weighted(rows)

    # Loss

    def look_ahead(self, batches: list[Batch]) -> None:
        super().look_ahead(batches)
        step = batches[0].get(whole_step.KEY)
        if step is not None:
            self.running.include(step.scores.log_ratio)

    def row_losses(self, rows: Labelled) -> Tensor:
        """(n,): the loss of each row, around the mean of all rows so far, those of this step included."""
        if self.model.training and self.running.next is None:  # the step is one micro-batch
            self.running.include(rows.log_ratio)
        losses = bco(rows.log_ratio, rows.desirable, rows.log_ratio.new_tensor(self.baseline), self.args.beta)
        return losses if rows.weight is None else losses * rows.weight

    @property
    def baseline(self) -> float:
        """The log-ratio that counts as neither good nor bad, in nats."""
        if self.model.training and self.running.next is not None:
            return self.running.next[0]
        return self.running.mean

    def baseline_metrics(self, rows: Labelled, batch: Batch) -> Metrics:
        num_rows = len(rows.log_ratio)
        return {"delta": (self.args.beta * self.baseline * num_rows, num_rows)}
