"""Trainers on what the policy itself writes: prompts become rollouts, scores, advantages, and batches of a buffer.

    rows --PromptSource--> a block's prompts --Episodes--> rollouts --RewardFunctions--> scores --advantages-->
    experiences --RolloutBuffer--> micro-batches --loss--> gradient

A block is made when the last one is used up, which transformers' `get_batch_samples` comes to ask once a step. All
processes hold the whole block, so what is trained together depends on no number of processes.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from strop.callbacks.alarms import RolloutAlarm
from strop.callbacks.sync_ref import SyncRefModelCallback
from strop.data.collate import Batch
from strop.data.prepare import as_dataset
from strop.losses.advantages import weighted_sum
from strop.losses.reduce import StepCounts
from strop.models.logps import compute_head_in_float32, logps
from strop.models.reference import Computed, fingerprint
from strop.models.segments import Layout
from strop.models.verify import evaluating
from strop.rollout import measure, record
from strop.rollout.buffer import Experience, RolloutBuffer
from strop.rollout.collate import RolloutCollator
from strop.rollout.encode import Encoder
from strop.rollout.episodes import Episodes, SingleTurn
from strop.rollout.generator import InProcessGenerator
from strop.rollout.plan import BatchPlan
from strop.rollout.refill import has_signal, spreads, with_signal
from strop.rollout.replay import ReplayBuffer
from strop.rollout.sampler import PromptSource
from strop.rollout.types import Generator, Rollout, Sampling

from .base import BaseTrainer
from .config import config_for
from .layout import LayoutGuard, settle_layout
from .lookup import LookUp
from .meter import Metrics, means
from .on_policy_config import OnPolicyConfig
from .preference import disable_dropout, refuse_encoder_decoder
from .referenced import SAMPLE, SameReference, placed_reference, ready_ref_model
from .rounds import EvalRounds, Share, random_states_kept, reward_functions, weighted_rewards
from .setup import (
    check_completion_length,
    check_datasets,
    ready_model,
    ready_tokenizer,
    router_aux_loss_coef,
    show_logs,
)

logger = logging.getLogger(__name__)

EVALUATION_SEED = 2**32
"""Added to the seed for completions of evaluations, which are drawn alike each time."""
STATE = "rollouts.json"
"""File of a checkpoint with the block in training, and where the prompts are."""


class OnPolicyTrainer(BaseTrainer):
    """A `BaseTrainer` that trains on completions of its own; subclasses write `advantages` and `loss`.

    Rows have a `prompt`, a text or messages, and what reward functions read. Every rollout is written to `rollouts/` in
    the output folder.
    """

    config_class: ClassVar[type[OnPolicyConfig]]
    method: ClassVar[str]
    """Its name, in the default output folder's."""
    eval_weight = "sequences"
    _ref_model: Any = None
    """A reference of its own, for subclasses that take one: an object or a name."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any,
        args: Any,
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: PreTrainedTokenizerBase | None,
        reward_processing_classes: Any = None,
        *,
        quantization_config: Any = None,
        peft_config: Any = None,
        generator: Generator | None = None,
        **options: Any,
    ):
        args = config_for(self.config_class, args, model, self.method)
        show_logs(args)
        check_datasets(train_dataset, eval_dataset, args)
        tokenizer = ready_tokenizer(processing_class, model, args)
        self.encoder = Encoder(
            tokenizer,
            args.chat_template_kwargs or {},
            args.max_prompt_length,
            args.overlong,
            keep_special_tokens=not args.reward_skip_special_tokens,
        )
        train_dataset, eval_dataset = self._fitting(train_dataset, "train"), self._fitting(eval_dataset, "eval")
        functions = reward_functions(reward_funcs, reward_processing_classes, args)
        model = ready_model(model, args, tokenizer, quantization_config, peft_config)
        self.equip(model, args, tokenizer, functions)
        layout = self.settled_layout(model, args)
        super().__init__(
            model=model,
            args=args,
            data_collator=list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            **options,
        )
        self.aux_loss_coef = router_aux_loss_coef(model, args)
        self.collator = RolloutCollator(tokenizer.pad_token_id, layout, args.pad_to_multiple_of or 1)
        self._ref_guard = LayoutGuard()
        self.lookup = LookUp(args.lookup_size, self.ready_batch_of, self.accelerator.autocast)
        self.generator = generator or InProcessGenerator(model, tokenizer)
        self.episodes = self.make_episodes()
        own = self.episodes.own_rewards
        self.rewards, self.reward_names, self.reward_weights = self.settled_rewards(functions, own)
        self._check_rows()
        self._is_evaluating = False
        self.reference: Computed | None = self._settled_reference() if args.beta else None
        self.is_exact: bool | None = None
        """Whether the generator says what a training forward says; None until the first completions are compared."""
        self.sampler_speaks = True
        """Whether log-probabilities of the last completions are known at all."""
        self.add_callback(RolloutAlarm())
        self._restart()
        self._say_what_is_constant()

    # What a run is made of

    def equip(self, model: Module, args: Any, tokenizer: PreTrainedTokenizerBase, functions: list[Callable]) -> None:
        """Make `model` what is trained, before a trainer has it."""
        refuse_encoder_decoder(model)
        check_completion_length(model, args.max_completion_length)
        if args.cast_lm_head_to_fp32:
            compute_head_in_float32(model)
        if args.disable_dropout:
            disable_dropout(model)
        self._ref_model = ready_ref_model(self._ref_model, model, args, tokenizer)

    def settled_layout(self, model: Module, args: Any) -> Layout:
        """One layout for policy and reference."""
        layout = settle_layout(model, args.layout)
        if self._ref_model is None:
            return layout
        return layout if settle_layout(self._ref_model, args.layout) == layout else "padded"

    def make_episodes(self) -> Episodes:
        """What turns rows into rollouts."""
        return SingleTurn(self.generator, self.encoder)

    def settled_rewards(self, functions: list[Callable], own: Sequence[str]) -> tuple:
        """What asks the reward functions, the names of all rewards, and their weights."""
        return weighted_rewards(functions, own, self.args)

    def batch_plan(self) -> BatchPlan:
        """Prompts, completions and optimizer steps of this run; print it."""
        rows = self.train_dataset
        return self.args.plan(self.accelerator.num_processes, len(rows) if hasattr(rows, "__len__") else None)

    def _fitting(self, rows: Any, name: str) -> Any:
        if rows is None:
            return None
        if isinstance(rows, dict):
            return {key: self._fitting(part, f"{name}_{key}") for key, part in rows.items()}
        return self.encoder.fitting(as_dataset(rows, name), name)

    def _check_rows(self) -> None:
        """Refuse, before anything is written, rows without a prompt, or without what reward functions need."""
        if not isinstance(self.episodes, SingleTurn):  # others may make prompts and columns themselves
            return
        evals = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        for rows in (self.train_dataset, *evals):
            if isinstance(rows, Dataset) and len(rows):
                self.encoder.whole_prompt_ids(rows[0])
                if self.rewards is not None:
                    self.rewards.check(rows.column_names)

    def _say_what_is_constant(self) -> None:
        """What users look for in the log of a run that can't have it."""
        if self.reference is None:
            logger.info("beta=0: there is no reference, and no kl in the log")
        on_policy = self.train_dataset is not None and self.batch_plan().is_on_policy
        if on_policy and not self.args.replay_buffer_size:
            logger.info(
                "completions are trained once, in the step they were written for: ratios are 1, nothing is clipped, "
                "and what the policy is trained by has a value near 0, whatever it learns"
            )

    def _settled_reference(self) -> Computed:
        """`_ref_model` or, without one, the model as it is now."""
        reference = placed_reference(self.model, self._ref_model, self.args, moving=self.args.sync_ref_model)
        if self.args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(reference))
        else:  # one that moves is in the checkpoints
            self.add_callback(SameReference(fingerprint(reference, SAMPLE)))
        return reference

    def _restart(self) -> None:
        plan, args = self.batch_plan() if self.train_dataset is not None else None, self.args
        self.source = PromptSource(self.train_dataset, args.shuffle_dataset, args.data_seed or args.seed)
        self.buffer = RolloutBuffer(plan, args.seed)
        self.replay = ReplayBuffer(args.replay_buffer_size, args.seed)
        self._to_print: list[record.Line] = []
        self._tokens_written = 0

    # A block

    def get_train_dataloader(self) -> DataLoader:
        """Counts micro-batches; their rows come from the buffer."""
        if self.train_dataset is None:
            raise ValueError("there is no train_dataset to train on; pass one to the constructor")
        batches = self.batch_plan().batches_per_epoch
        return DataLoader(range(batches or self.args.max_steps * self.args.gradient_accumulation_steps), batch_size=1)

    def num_examples(self, dataloader: DataLoader) -> int:
        rows = getattr(self, "train_dataset", None)
        return len(rows) if hasattr(rows, "__len__") else len(dataloader)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        began, num_tokens = time.monotonic(), self.meter.num_tokens
        self._tokens_written = 0
        batches, counts = super().get_batch_samples(self._micro_batches(epoch_iterator), num_batches, device)
        self.meter.num_tokens = num_tokens + self._tokens_written  # each rollout once, however often it is trained
        self._measure({"step_time": (time.monotonic() - began, 1.0)})
        return batches, counts

    def _micro_batches(self, ticks: Iterator) -> Iterator[Batch]:
        for _ in ticks:
            if self.buffer.is_used_up:
                self._make_block()
            yield self.batch_of(self.buffer.next_batch(self.accelerator.process_index))

    def batch_of(self, experiences: Sequence[Experience]) -> Batch:
        return self.collator(experiences) | {"temperature": self.args.sampling.temperature}

    def read(self, inputs: Batch) -> Batch:
        batch = super().read(inputs)
        if self._ref_model is None:  # a copy computes as its original does
            return batch
        with self.accelerator.autocast():
            return self._ref_guard(self._ref_model, batch)

    def ready_batch_of(self, experiences: Sequence[Experience]) -> Batch:
        """On the device, as the loss reads it."""
        return self.read(self._prepare_inputs(self.batch_of(experiences)))

    def training_step(self, *args, **kwargs):
        began = time.monotonic()
        loss = super().training_step(*args, **kwargs)
        self._measure({"step_time": (time.monotonic() - began, 0.0)})
        return loss

    def _measure(self, metrics: Metrics) -> None:
        """Add what all processes know alike, once."""
        if self.is_world_process_zero():
            self.meter.window.add(metrics)

    def _make_block(self) -> None:
        """Generate, score, and fill the buffer."""
        across = self.buffer.plan.full_blocks
        rows = self.source.take(self.buffer.plan.prompts_per_block, across)
        sampling, group = self.args.sampling, self.args.num_generations
        rollouts = self._played(rows, group, sampling)
        if rounds := self.args.dynamic_sampling_rounds:
            rollouts, metrics = with_signal(
                rollouts,
                group,
                rounds,
                self.signals,
                lambda count: self._played(self.source.take(count, across=True), group, sampling),
            )
            self._measure(metrics)
        self._finish(rollouts, group)
        experiences = [self.experience(rollout) for rollout in rollouts]
        if self.args.replay_buffer_size:
            widths = spreads(self.totals(rollouts), group)
            experiences, replaced = self.replay.refill(experiences, widths, self.buffer.number + 1)
            self._measure({"replay/groups": (replaced, 1.0)})
        self.buffer.fill(experiences, group)
        metrics = measure.added([measure.length_metrics(rollouts), measure.episode_metrics(rollouts)])
        self._measure({**metrics, **self.measured_rewards(rollouts, group)})
        self._tokens_written += sum(rollout.prompt_length + rollout.length for rollout in rollouts)
        self._record(f"step-{self.state.global_step + 1:06d}-block-{self.buffer.number}", rollouts)

    def _record(self, name: str, rollouts: Sequence[Rollout]) -> None:
        if self.is_world_process_zero():
            lines = record.lines_of(self.state.global_step + 1, rollouts)
            record.write(self.args.output_dir, name, lines)
            self._to_print += lines if self.args.log_completions else []

    def _played(self, rows: Sequence[dict], group: int, sampling: Sampling) -> list[Rollout]:
        """Scored rollouts of `rows`, `group` of each, of all processes: each process plays its share."""
        first = self.buffer.num_rollouts
        self.buffer.num_rollouts += len(rows) * group
        share = Share(len(rows), group, self.accelerator.num_processes, self.accelerator.process_index)
        mine = self._scored([rows[i // group] for i in share.own], [first + i for i in share.own], sampling)
        self._look_up(mine, share.largest)
        return self._gathered(mine, rows, group)

    def _scored(self, rows: Sequence[dict], numbers: Sequence[int], sampling: Sampling) -> list[Rollout]:
        """One rollout a row, with its rewards."""
        rollouts = self.generate(rows, numbers, sampling)
        self.score(rollouts)
        return rollouts

    def generate(self, rows: Sequence[dict], numbers: Sequence[int], sampling: Sampling) -> list[Rollout]:
        """One rollout a row; `numbers` are those of the completions in the run, from which follows what is drawn."""
        self.generator.sync(self.model)
        with self.accelerator.autocast():  # so that the generator knows how exact a forward is
            return self.episodes.roll_out(rows, numbers, sampling)

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """Give rollouts their `rewards`, by name, and `extras`; None where a reward doesn't apply."""
        if self.rewards is None:
            return
        names = dict.fromkeys(name for r in rollouts for name in (*r.row, *r.columns))
        columns = {name: [{**r.row, **r.columns}.get(name) for r in rollouts] for name in names}
        scores = self.rewards.score(
            [r.prompt for r in rollouts],
            [r.completion for r in rollouts],
            [r.completion_ids for r in rollouts],
            columns,
            self.state,
        )
        for i, rollout in enumerate(rollouts):
            values = zip(scores.names, scores.values[i].tolist(), strict=True)
            rollout.rewards |= {name: None if value != value else value for name, value in values}
            rollout.extras = {name: column[i] for name, column in scores.columns.items()}
        sums = self.eval_sums if self._is_evaluating else self.meter.window
        sums.add(measure.logged(scores.metrics))

    def _gathered(self, mine: list[Rollout], rows: Sequence[dict], group: int) -> list[Rollout]:
        """The rollouts of all processes, in the order of `rows`."""
        if self.accelerator.num_processes == 1:
            return mine
        for rollout in mine:  # what rows hold needn't go to other processes, which have them
            rollout.row, rollout.columns = {}, {}
        rollouts = [rollout for part in gather_object([mine]) for rollout in part]
        for i, rollout in enumerate(rollouts):
            rollout.row = rows[i // group]
        return rollouts

    # From rewards to experiences

    def rewards_of(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(N, F)."""
        return measure.reward_matrix(rollouts, self.reward_names)

    def totals(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(N,): weighted sums of rewards, NaN where nothing could be judged."""
        return weighted_sum(self.rewards_of(rollouts), self.reward_weights)

    def signals(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(N,): the rewards whose differences dynamic sampling asks for."""
        name = self.args.dynamic_sampling_reward
        return self.totals(rollouts) if name is None else measure.reward_matrix(rollouts, [name])[:, 0]

    def measured_rewards(self, rollouts: Sequence[Rollout], group: int) -> Metrics:
        return measure.reward_metrics(self.rewards_of(rollouts), self.reward_names, self.totals(rollouts), group)

    def advantages(self, rollouts: Sequence[Rollout], group: int) -> Tensor:
        """(N,): the advantage of each rollout, `group` of which answer the same prompt."""
        raise TypeError(f"{type(self).__name__} must define `advantages`")

    def _finish(self, rollouts: Sequence[Rollout], group: int) -> None:
        """Give rollouts their advantages, and say which the KL divergence leaves alone."""
        unjudged = self.totals(rollouts).isnan()
        if unjudged.any():
            first = rollouts[int(unjudged.nonzero()[0, 0])]
            logger.warning(
                "no reward applies to %d of %d completions, which train nothing; the first: prompt %.200r, completion "
                "%.200r", int(unjudged.sum()), len(rollouts), first.prompt, first.completion,
            )  # fmt: skip
        if not self.args.kl_on_equal_rewards:
            differ = has_signal(self.totals(rollouts), group).repeat_interleave(group)
            for rollout, weight in zip(rollouts, differ.tolist(), strict=True):
                rollout.kl_weight = float(weight)
        self._give_advantages(rollouts, group)

    def _give_advantages(self, rollouts: Sequence[Rollout], group: int) -> None:
        for rollout, advantage in zip(rollouts, self.advantages(rollouts, group).tolist(), strict=True):
            rollout.advantage = advantage

    def experience(self, rollout: Rollout) -> Experience:
        """What the loss reads of a rollout."""
        is_masked = self.args.mask_truncated_completions and rollout.finish_reason == "length"
        return Experience(
            rollout.token_ids,
            rollout.prompt_length,
            [0] * len(rollout.token_ids) if is_masked else rollout.completion_mask,
            rollout.advantage,
            rollout.old_logps,
            rollout.ref_logps,
            rollout.logps if self.needs_sampling_logps else None,
            kl_weight=rollout.kl_weight,
        )

    def reference_kl(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(N,): log pi/ref of each completion, the sum over its tokens, under the policy that wrote it; 0 where it is
        left alone."""
        zipped = [zip(r.old_logps, r.ref_logps, r.completion_mask, strict=True) for r in rollouts]
        sums = torch.tensor([sum(old - ref for old, ref, m in tokens if m) for tokens in zipped])
        return torch.where(torch.tensor([r.kl_weight > 0 for r in rollouts]), sums, 0.0)

    @property
    def needs_sampling_logps(self) -> bool:
        """Whether the loss reads what somebody else says who has sampled."""
        return False

    def _look_up(self, mine: Sequence[Rollout], largest: int) -> None:
        """Give rollouts what policy and reference say of their tokens, where the loss needs it. All processes call it
        alike; one of them has `largest` rollouts."""
        with evaluating(self.model):
            if self.is_exact is None:
                self.is_exact = self.lookup.is_exact(mine, largest, self.policy_logps)
            self._ask_policy(mine, largest)
            if self.reference is not None:
                self.lookup.ask(mine, largest, self.reference.logps, "ref_logps")

    def _ask_policy(self, mine: Sequence[Rollout], largest: int) -> None:
        is_complete, self.sampler_speaks = self.lookup.known(mine)
        if self.is_exact and is_complete:
            for rollout in mine:
                rollout.old_logps = rollout.logps
        elif self.needs_old_logps:
            self.lookup.ask(mine, largest, self.policy_logps, "old_logps")

    @property
    def needs_old_logps(self) -> bool:
        """Whether the policy moves while completions are trained, or a sampler is corrected for."""
        moves = not self.buffer.plan.is_on_policy or self.args.replay_buffer_size > 0
        return moves or self.needs_sampling_logps

    def policy_logps(self, batch: Batch) -> Tensor:
        return logps(self.model, batch, temperature=batch["temperature"]).logps

    # Counts and loss

    def balancing(self, aux_loss: Tensor | None, batch: Batch, counts: StepCounts) -> tuple[Tensor | float, Metrics]:
        """A mixture of experts' load-balancing loss, weighed by this batch's share of the step's tokens."""
        if not self.aux_loss_coef or aux_loss is None:
            return 0.0, {}
        tokens = batch["completion_mask"].sum()
        return self.aux_loss_coef * aux_loss * tokens / max(counts.tokens, 1), {
            "aux_loss": (aux_loss.detach() * tokens, tokens)
        }

    # Logs and checkpoints

    def log(self, logs, start_time=None):
        if "train_loss" in logs:  # the steps since the last log, of a short run all
            last = self.derived(means(self.meter.window.totals(self.accelerator.num_processes)))
            logs.update({name: value for name, value in last.items() if name != "loss"})
        super().log(logs, start_time)
        if self._to_print and self.is_world_process_zero():
            record.show(self._to_print, self.args.num_completions_to_print, self.args.log_unique_prompts)
        self._to_print = []

    def rollout_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides weights and counters, as JSON can."""
        place = {"epoch": self.source.epoch, "position": self.source.position}
        buffers = {"buffer": self.buffer.state(), "replay": self.replay.state()}
        return {**buffers, "source": place, "is_exact": self.is_exact}

    def load_rollout_state(self, state: dict[str, Any]) -> None:
        self.buffer.load(state["buffer"])
        self.replay.load(state.get("replay", []))
        self.source.go_to(**state["source"])
        self.is_exact = state["is_exact"]

    def _save_callbacks(self, run_dir: Path) -> None:
        super()._save_callbacks(run_dir)
        if self.args.should_save:
            folder = run_dir / f"checkpoint-{self.state.global_step}"
            (folder / STATE).write_text(json.dumps(self.rollout_state()), encoding="utf-8")

    def _init_training_state(self, max_steps, steps_per_epoch, num_epochs, resume_from_checkpoint, trial):
        place = super()._init_training_state(max_steps, steps_per_epoch, num_epochs, resume_from_checkpoint, trial)
        self._restart()
        if resume_from_checkpoint is not None:
            file = Path(resume_from_checkpoint, STATE)
            if not file.is_file():
                raise ValueError(
                    f"there is no {file}, so the run can't go on with its prompts and rollouts. Resume from a "
                    f"checkpoint that {type(self).__name__} has written."
                )
            self.load_rollout_state(json.loads(file.read_text(encoding="utf-8")))
        return place

    # Evaluation

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """Rounds of prompts, each process its own; see `EvalRounds`."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = rows if not isinstance(rows, str) else self.eval_dataset[rows]
        if rows is None:
            raise ValueError("there is no eval_dataset; pass one to the constructor or to evaluate")
        size = max(self.args.completions_per_device_eval // self.args.generations_in_evaluation, 1)
        rounds = EvalRounds(rows, size, self.accelerator.num_processes, self.accelerator.process_index)
        return DataLoader(rounds, batch_size=None)

    def get_test_dataloader(self, test_dataset) -> DataLoader:
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(self, dataloader, *args, **kwargs):
        self._is_evaluating = True
        try:
            with random_states_kept():
                output = super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self._is_evaluating = False
        return output._replace(num_samples=dataloader.dataset.num_rows or output.num_samples)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Generates, scores, and computes the loss of training, with ratios of 1."""
        group = self.args.generations_in_evaluation
        numbers = [n * group + i for n in inputs["numbers"].tolist() for i in range(group)]
        rows = [row for row in inputs["rows"] for _ in range(group)]
        sampling = self.args.sampling
        rollouts = self._scored(rows, numbers, replace(sampling, seed=sampling.seed + EVALUATION_SEED))
        self._look_up(rollouts, max(self.args.completions_per_device_eval, group))
        self._finish(rollouts, group)
        if inputs["counted"]:
            metrics = measure.added([measure.length_metrics(rollouts), measure.episode_metrics(rollouts)])
            self.eval_sums.add({**metrics, **self.measured_rewards(rollouts, group)})
        experiences = [self.experience(rollout) for rollout in rollouts]
        size = self.args.completions_per_device_eval
        for start in range(0, len(experiences), size):
            batch = self.ready_batch_of(experiences[start : start + size])
            counts = self.count(batch)
            with torch.no_grad(), self.compute_loss_context_manager():
                loss, metrics = self.loss(model, batch, counts)
            if inputs["counted"]:
                weight = float(getattr(counts, self.eval_weight))
                self.eval_sums.add({"loss": (loss * weight, weight), **metrics})
        return None, None, None
