"""What every trainer shares: a step counted as a whole, weighted metrics, exact resume, evaluation like training."""

import functools
import inspect
import logging
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from strop.callbacks.progress import install_progress
from strop.callbacks.state import TensorState
from strop.data.collate import Batch, as_batch, keep_examples
from strop.losses.reduce import StepCounts
from strop.models.offload import OffloadActivations
from strop.models.verify import Reader, target_logps
from strop.runs import checkpoint
from strop.runs.record import RunRecord

from .layout import LayoutGuard
from .meter import Metrics, RunMeter, WeightedSums, means

logger = logging.getLogger(__name__)


class BaseTrainer(transformers.Trainer):
    """A `transformers.Trainer` whose subclasses write one method, `loss`.

    `loss` gets a micro-batch and the counts of the optimizer step it belongs to, and returns its share of the step's
    loss: the shares of all micro-batches on all ranks add up to the loss, however the step is cut.

    A subclass may override `compute_loss` instead, with transformers' signature or just `(self, model, inputs)`; it
    then returns the mean over its micro-batch.
    """

    loss_is_scaled_for_ga = True  # transformers must not divide by gradient_accumulation_steps
    eval_weight = "tokens"
    """What an evaluation batch weighs in `eval_loss`: a field of StepCounts."""

    compared: ClassVar[Reader] = target_logps
    """What of a model's output the two layouts are compared by."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "compute_loss" in cls.__dict__:
            cls.compute_loss = _accept_all_arguments(cls.compute_loss)
            cls.loss_is_scaled_for_ga = cls.__dict__.get("loss_is_scaled_for_ga", False)

    def __init__(self, *args, preparation_reports: dict[str, Any] | None = None, **kwargs):
        self._use_cache = _use_cache_of(kwargs.get("model", args[0] if args else None))  # changed for training
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError(
                f"this process sees {self.args.n_gpu} GPUs and would split batches between them in threads "
                "(DataParallel), where a step can't be counted as a whole. Start one process a GPU (torchrun, "
                "accelerate launch), or show the process one GPU with CUDA_VISIBLE_DEVICES."
            )
        if self.optimizer is not None:
            _refuse_foreign_optimizer(self.optimizer, self.model)
        self.preparation_reports = preparation_reports or {}
        self.record = RunRecord(self._datasets(), self.preparation_reports)
        self.add_callback(RunMeter())
        self.add_callback(self.record)
        install_progress(self)
        self.eval_sums = WeightedSums()
        self.layout_guard = LayoutGuard(type(self).compared)
        offloads = getattr(self.args, "activation_offloading", False)
        self._saved_activations = OffloadActivations(self.model, self.args.device) if offloads else nullcontext()
        self._is_staging = False
        self._was_told_of_no_targets = False
        self._was_told_of_repeats = False

    @property
    def meter(self) -> RunMeter:
        return next(callback for callback in self.callback_handler.callbacks if isinstance(callback, RunMeter))

    def _datasets(self) -> dict[str, Any]:
        several = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        sets = {"train": self.train_dataset} | {f"eval_{name}".rstrip("_"): rows for name, rows in several.items()}
        return {name: rows for name, rows in sets.items() if rows is not None}

    @property
    def _uses_loss(self) -> bool:
        return type(self).compute_loss is BaseTrainer.compute_loss

    # One optimizer step

    def loss(self, model: torch.nn.Module, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the step's loss, (), and metrics as (sum, weight)."""
        raise TypeError(f"{type(self).__name__} must define `loss`, or override `compute_loss`")

    def count(self, batch: Batch) -> StepCounts:
        """What one micro-batch trains on, in the units that `loss` divides by."""
        mask = batch["completion_mask"]
        return StepCounts(int(mask.sum()), int(mask.any(-1).sum()))

    def look_ahead(self, batches: list[Batch]) -> None:
        """Put into each micro-batch of a step what its loss must know of the whole step. Every rank calls it."""

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro-batches of one optimizer step, and its counts. transformers calls this once a step."""
        if self.state.global_step >= self.state.max_steps:  # resumed when finished; transformers would do a step more
            return [], None
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not self._uses_loss or not batches:
            return batches, num_items
        batches = [self.read(batch) for batch in batches]
        batches[-1] = self._without_repeats(batches[-1], self.args.per_device_train_batch_size)
        # a stream that ends within a step: transformers would leave the step open, so it gets batches without a loss
        batches += [keep_examples(batches[-1], 0)] * (num_batches - len(batches))
        self.meter.num_batches += num_batches
        counts, num_tokens = self._count_over_ranks(batches)
        self.meter.num_tokens += num_tokens
        if not (counts.tokens or self._was_told_of_no_targets):
            self._was_told_of_no_targets = True
            logger.warning("step %d trains nothing: all its labels are -100", self.state.global_step + 1)
        self.meter.window.add({"loss": (0.0, float(self.is_world_process_zero()))})
        self.look_ahead(batches)
        return batches, counts

    def training_step(self, *args, **kwargs):
        with self._saved_activations:
            return super().training_step(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        counts = num_items_in_batch
        if not isinstance(counts, StepCounts):
            inputs = self.read(inputs)
            counts, _ = self._count_over_ranks([inputs])
        share, metrics = self.loss(model, inputs, counts)
        if share.device.type == "cpu":  # elsewhere reading the loss would wait for the device; `log` looks at it
            self._refuse_non_finite(share.item())
        self.meter.window.add({"loss": (share, 0.0), **metrics})
        share = share * self.accelerator.num_processes  # data parallelism averages gradients; shares want a sum
        return (share, {}) if return_outputs else share

    def _prepare_input(self, data):
        """As in transformers, but DeepSpeed's dtype is the model's alone: log-probabilities and weights of rows keep
        theirs."""
        ours = isinstance(data, Tensor) and self._uses_loss
        return data.to(self.args.device) if ours else super()._prepare_input(data)

    def read(self, inputs: Batch) -> Batch:
        """`inputs` of any collator as a batch, in a layout that the model was seen to compute rightly."""
        with self.accelerator.autocast():  # as the training step will run
            return self.layout_guard(self.model, as_batch(inputs))

    def _count_over_ranks(self, batches: list[Batch]) -> tuple[StepCounts, int]:
        """What `batches` of all ranks train on, and how many tokens the model reads."""
        local = [
            *sum((self.count(batch) for batch in batches), StepCounts(0, 0)),
            sum(batch["num_tokens"] for batch in batches),
        ]
        total = self.accelerator.reduce(torch.tensor(local, device=self.args.device), "sum").tolist()
        return StepCounts(*total[:2]), total[2]

    def _without_repeats(self, batch: Batch, batch_size: int) -> Batch:
        """`batch` without a loss on the examples that only fill up the last round of batches over several ranks."""
        state = self.accelerator.gradient_state
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder == 0:
            return batch
        if state.remainder < 0:
            self._tell_repeats()
            return batch
        return keep_examples(batch, max(0, state.remainder - self.args.process_index * batch_size))

    def _tell_repeats(self) -> None:
        """Warn, once, that a stream has ended, whose length would tell which rows only fill up its last batches."""
        if not self._was_told_of_repeats:
            self._was_told_of_repeats = True
            logger.warning(
                "a stream ended on %d processes: if its rows aren't a multiple of what these read at once, some of its "
                "first rows fill up the last batches and count again. A data set with a length knows which they are",
                self.accelerator.num_processes,
            )

    def _refuse_non_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss at step {self.state.global_step + 1} is {loss}, so another update would only spoil the "
                f"weights. Lower learning_rate ({self.args.learning_rate}) or max_grad_norm "
                f"({self.args.max_grad_norm}), check the weights the run started from, or look at its rows with "
                "`strop inspect`; the last checkpoint is intact."
            )

    # Logs

    def log(self, logs, start_time=None):
        if "loss" in logs and self._uses_loss:
            metrics = self.derived(self.meter.drain(self.accelerator.num_processes))
            logs.update(metrics, num_tokens=self.meter.num_tokens)
            self._refuse_non_finite(logs["loss"])
        if "train_loss" in logs and self._uses_loss:
            self.meter.drain(self.accelerator.num_processes)
            logs["train_loss"] = self.meter.loss_sum / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """The means of a log or an evaluation, with what is computed from them."""
        return metrics

    # Training and its checkpoints

    def train(self, resume_from_checkpoint=None, **kwargs):
        self._set_use_cache(self.args.use_cache)
        try:
            output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
            self._refuse_idle_run()
        except BaseException as error:
            self.record.fail(error)
            raise
        finally:
            self._set_use_cache(self._use_cache)
        if resume_from_checkpoint and self.state.global_step == self._initial_global_step:
            logger.warning(
                "already at step %d of %d: nothing was trained. Raise max_steps or num_train_epochs, or start without "
                "resume_from_checkpoint.",
                self.state.global_step,
                self.state.max_steps,
            )
        return output._replace(training_loss=output.metrics["train_loss"])

    def _refuse_idle_run(self) -> None:
        """Raise ValueError for a run that found no batch, which would otherwise look like a success."""
        if self.state.global_step or self.state.max_steps < 1:
            return
        rows = self.preparation_reports.get("train", "the train data set")
        size = self.args.per_device_train_batch_size
        remedy = "Look at the rows with `strop inspect`."
        if self.args.dataloader_drop_last:
            remedy = f"dataloader_drop_last=True drops batches of fewer than {size} rows; set it to False."
        raise ValueError(f"nothing was trained, as there was not one batch to train on: {rows}. {remedy}")

    def _load_optimizer_and_scheduler(self, checkpoint):
        """As in transformers, which goes on at the checkpoint's learning rate, whatever is asked for."""
        super()._load_optimizer_and_scheduler(checkpoint)
        saved = [group.get("initial_lr") for group in self.optimizer.param_groups] if checkpoint else []
        if saved and self.args.learning_rate not in saved and saved[0] is not None:
            logger.warning(
                "learning_rate=%g has no effect: the run goes on at its checkpoint's, %g. To train on at another one, "
                "start from the checkpoint as the model, without resume_from_checkpoint.",
                self.args.learning_rate,
                saved[0],
            )

    def _init_training_state(self, max_steps, steps_per_epoch, num_epochs, resume_from_checkpoint, trial):
        """Where to go on: for a stream, whose length can't tell, where the checkpoint says it was."""
        place = super()._init_training_state(max_steps, steps_per_epoch, num_epochs, resume_from_checkpoint, trial)
        counters = self.state.stateful_callbacks.get(RunMeter.__name__, {}).get("attributes")
        if resume_from_checkpoint is None or has_length(self.train_dataset) or not counters:
            return place
        return (counters["epoch"], 0 if self.args.ignore_data_skip else counters["num_batches"])

    def _save_checkpoint(self, model, trial):
        """Write the checkpoint where no one looks for it, then give it its name."""
        self.meter.collect(self.accelerator.num_processes, self.is_world_process_zero())
        run_dir = self._get_output_dir(trial)
        if self.args.should_save:
            checkpoint.clear_staging(run_dir)
        self.accelerator.wait_for_everyone()
        self._is_staging = True
        try:
            super()._save_checkpoint(model, trial)
            self._save_callbacks(Path(self._get_output_dir(trial)))
        finally:
            self._is_staging = False
        self.accelerator.wait_for_everyone()
        self._publish_checkpoint(Path(run_dir), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self.accelerator.wait_for_everyone()

    def _save_callbacks(self, run_dir: Path) -> None:
        for callback in self.callback_handler.callbacks if self.args.should_save else ():
            if isinstance(callback, TensorState):
                callback.on_checkpoint(run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def _save(self, output_dir=None, state_dict=None):
        """As in transformers, and what is only for training, a cache switched off, isn't written."""
        in_training = _use_cache_of(self.model)
        self._set_use_cache(self._use_cache)
        try:
            super()._save(output_dir, state_dict)
        finally:
            self._set_use_cache(in_training)

    def _set_use_cache(self, value: bool | None) -> None:
        if value is not None and hasattr(self.model, "config"):
            self.model.config.use_cache = value

    def _get_output_dir(self, trial):
        run_dir = super()._get_output_dir(trial)
        return str(checkpoint.staging_folder(run_dir)) if self._is_staging else run_dir

    def _publish_checkpoint(self, run_dir: Path, name: str) -> None:
        staged = checkpoint.staging_folder(run_dir) / name
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = str(run_dir / name)
            if self.args.should_save:
                self.state.save_to_json(str(staged / "trainer_state.json"))
        if self.args.should_save:
            checkpoint.publish(run_dir, name)
            checkpoint.rotate(run_dir, self.args.save_total_limit, self.state.best_model_checkpoint)

    # Evaluation

    def _get_eval_sampler(self, eval_dataset):
        """Rows in their order, which `predict` keeps; transformers would sort them by length where training does."""

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        self.eval_sums = WeightedSums()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._uses_loss:
            measured = self.derived(self.measured(means(self.eval_sums.totals(self.accelerator.num_processes))))
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in measured.items()})
        if not output.num_samples:
            logger.warning("%s: the data set gave not one row to evaluate, so nothing is reported", metric_key_prefix)
        return output

    def measured(self, metrics: dict[str, float]) -> dict[str, float]:
        """What an evaluation reports, from the means over its rows."""
        return metrics

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        if not self._uses_loss:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        batch = self._without_repeats(self.read(self._prepare_inputs(inputs)), self.args.per_device_eval_batch_size)
        counts = self.count(batch)
        weight = float(getattr(counts, self.eval_weight))
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, metrics = self.loss(model, batch, counts)
            predictions = (None, None) if prediction_loss_only else self.predictions(model, batch)
        self.eval_sums.add({"loss": (loss * weight, weight), **metrics})
        return loss if "loss" in self.args.include_for_metrics else None, *predictions

    def predictions(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """What `predict` returns and `compute_metrics` reads for a batch: predictions and labels, one line a row."""
        return None, None


def _refuse_foreign_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "the optimizer in `optimizers` holds no weight that is trained here, so nothing would change: the model "
            "was loaded by its name, or got its adapter, only after the optimizer was made. Pass "
            'optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 1e-4}) instead, or the finished model.'
        )


def _use_cache_of(model: Any) -> bool | None:
    return getattr(getattr(model, "config", None), "use_cache", None)


def _accept_all_arguments(compute_loss):
    """`compute_loss` callable with every argument that transformers passes, whichever of them it declares."""
    parameters = inspect.signature(compute_loss).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return compute_loss

    @functools.wraps(compute_loss)
    def wrapped(self, model, inputs, **kwargs):
        loss = compute_loss(self, model, inputs, **{name: v for name, v in kwargs.items() if name in parameters})
        return (loss, {}) if kwargs.get("return_outputs") and "return_outputs" not in parameters else loss

    return wrapped
