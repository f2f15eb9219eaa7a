"""Trainers on preferences between two completions of a prompt, of which the policy writes one or both.

prompts -> two rollouts each -> rewards or a judge -> the chance that the first is better -> loss of a pair
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.callbacks.alarms import RolloutAlarm
from strop.data.collate import Batch
from strop.models.reference import FrozenModel
from strop.rewards.verdicts import preference, verdicts
from strop.rollout.buffer import Experience
from strop.rollout.types import Generator, Rollout

from . import checks
from .config import config_for
from .meter import Metrics
from .on_policy import OnPolicyTrainer
from .online_config import OnlinePreferenceConfig, at_epoch

logger = logging.getLogger(__name__)


class OnlinePreferenceTrainer(OnPolicyTrainer):
    """An `OnPolicyTrainer` whose rollouts come in pairs; subclasses write `loss`, and who writes the second.

    The better one of two is told by `reward_funcs`, those of GRPOTrainer, or by `judge` (`strop.rewards.verdicts`).
    Pairs that nobody can tell apart train nothing. The reference is `ref_model` if given, else the model
    as it is now. `data_collator`, `compute_metrics` and `preprocess_logits_for_metrics` are TRL's, and refused.
    """

    writers: tuple[str, str] = ("policy", "policy")
    """Who writes the first and who the second completion."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: str | PreTrainedModel | None = None,
        reward_funcs: Any = None,
        args: OnlinePreferenceConfig | TrainingArguments | None = None,
        data_collator: None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        compute_metrics: None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        preprocess_logits_for_metrics: None = None,
        judge: Any = None,
        quantization_config: Any = None,
        generator: Generator | None = None,
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
    ):
        refuse_unused(
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        args = config_for(self.config_class, args, model, self.method)
        self.judge = judge
        self._ref_model = ref_model
        functions, tokenizers = with_reward_model(reward_funcs, reward_processing_classes, args)
        check_preferences(judge, functions, args)
        super().__init__(
            model,
            functions,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            tokenizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            generator=generator,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.is_exact = False  # nobody asks what the generator says of its tokens
        if judge is not None:
            self.remove_callback(RolloutAlarm)  # which looks at rewards
        self._check_schedules()

    # What a run is made of

    def settled_rewards(self, functions, own):
        return (None, [], torch.zeros(0)) if self.judge is not None else super().settled_rewards(functions, own)

    def _say_what_is_constant(self) -> None:
        """Nothing is: the loss of pairs falls, and there is a reference."""

    def _check_schedules(self) -> None:
        several = self.args.schedules
        if several and self.train_dataset is not None and not hasattr(self.train_dataset, "__len__"):
            name, values = next(iter(several.items()))
            raise ValueError(f"{name}={values} has a value for each epoch, but a stream has only one; give a number.")

    def now(self, name: str) -> float:
        """The value of a setting that may have one for each epoch."""
        return at_epoch(getattr(self.args, name), self.state.epoch or 0.0)

    @property
    def ref_model(self) -> torch.nn.Module | None:
        """The second model in memory, if the reference is one."""
        return self.reference.model if isinstance(self.reference, FrozenModel) else None

    def batch_of(self, experiences: Sequence[Experience]) -> Batch:
        """The policy that is compared with the reference is the one at temperature 1, however completions are drawn."""
        return super().batch_of(experiences) | {"temperature": 1.0}

    @property
    def needs_old_logps(self) -> bool:
        return False

    # Preferences

    def totals(self, rollouts: Sequence[Rollout]) -> Tensor:
        totals = super().totals(rollouts)
        if self.args.missing_eos_penalty is None:
            return totals
        cut_off = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])
        return totals - self.args.missing_eos_penalty * cut_off

    def preferences(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """For each two rollouts the chance that the first is better; None where nobody can say."""
        if self.judge is not None:
            return self._judged(rollouts)
        totals = self.totals(rollouts).tolist()
        return [preference(first, second) for first, second in zip(totals[::2], totals[1::2], strict=True)]

    def _judged(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """What the judge says; in training all processes hold all pairs, and each asks about its share."""
        pairs = list(zip(rollouts[::2], rollouts[1::2], strict=True))
        split = 1 if self._is_evaluating else self.accelerator.num_processes
        own = pairs[self.accelerator.process_index :: split] if split > 1 else pairs
        prompts, texts = [first.prompt for first, _ in own], [(a.completion, b.completion) for a, b in own]
        found = verdicts(self.judge, prompts, texts, self.args.seed)
        if split == 1:
            return found
        parts = gather_object([found])
        return [parts[i % split][i // split] for i in range(len(pairs))]

    def _finish(self, rollouts: Sequence[Rollout], group: int) -> None:
        found = self.preferences(rollouts)
        if None in found:
            first = rollouts[2 * found.index(None)]
            logger.warning(
                "nobody could say which is better in %d of %d pairs, which train nothing; the first's prompt: %.200r",
                found.count(None), len(found), first.prompt,
            )  # fmt: skip
        for i, probability in enumerate(found):
            pair = rollouts[2 * i : 2 * i + 2]
            chances = (None, None) if probability is None else (probability, 1 - probability)
            trained = probability is not None and self.is_trained(pair, probability)
            lead = self.lead(probability) if trained else 0.0  # type: ignore[arg-type]
            for rollout, chance, weight, writer in zip(pair, chances, (lead, -lead), self.writers, strict=True):
                rollout.advantage = weight
                rollout.extras |= {"preference": chance, "writer": writer, "trained": trained}

    def is_trained(self, pair: Sequence[Rollout], probability: float) -> bool:
        """Whether a pair on which there is a verdict is trained."""
        return not (self.args.mask_truncated_completions and any(one.finish_reason == "length" for one in pair))

    def lead(self, probability: float) -> float:
        """What stands as the first one's advantage in the batch; the second one's is the opposite."""
        raise TypeError(f"{type(self).__name__} must define `lead`")

    def measured_rewards(self, rollouts: Sequence[Rollout], group: int) -> Metrics:
        found = [rollout.extras["preference"] for rollout in rollouts[::2]]
        metrics: dict[str, Any] = {
            "preferences/ties": (sum(chance == 0.5 for chance in found), len(found)),
            "preferences/no_verdict": (found.count(None), len(found)),
        }
        for name, some in self.by_writer("val/", "contain_eos_token", rollouts):
            metrics[name] = (sum(rollout.finish_reason == "stop" for rollout in some), len(some))
        if self.judge is not None:
            return metrics
        for name, some in self.by_writer("objective/", "scores", rollouts):
            judged = [total for total in self.totals(some).tolist() if total == total]
            metrics[name] = (sum(judged), len(judged))
        return {**super().measured_rewards(rollouts, group), **metrics}

    def by_writer(self, prefix: str, name: str, rollouts: Sequence[Rollout]) -> list[tuple[str, Sequence[Rollout]]]:
        """Rollouts under the names of their metrics: as one, if one has written both."""
        if len(set(self.writers)) == 1:
            return [(prefix + name, rollouts)]
        return [(f"{prefix}model_{name}", rollouts[::2]), (f"{prefix}ref_{name}", rollouts[1::2])]


def refuse_unused(**given: Any) -> None:
    """Refuse arguments that nothing would read."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} would have no effect: batches are made of what is written in training, and nothing "
                "is predicted. Remove it; functions of completions go into reward_funcs."
            )


def with_reward_model(functions: Any, tokenizers: Any, args: OnlinePreferenceConfig) -> tuple[list[Any], Any]:
    """Reward functions and their tokenizers, `reward_model_path` among them."""
    several = list(functions) if isinstance(functions, list | tuple) else [] if functions is None else [functions]
    if args.reward_model_path is None:
        return several, tokenizers
    cutters = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    if several and len(cutters) == len(several):
        tokenizers = [*cutters, None]
    return [*several, args.reward_model_path], tokenizers


def check_preferences(judge: Any, functions: Sequence[Any], args: OnlinePreferenceConfig) -> None:
    """Refuse neither rewards nor a judge, and a judge beside rewards or their settings."""
    if judge is None:
        if not functions:
            raise ValueError(
                "nothing tells which completion is better; pass reward_funcs (e.g. accuracy_reward), reward_model_path "
                "in the config, or a judge."
            )
        return
    if functions:
        raise ValueError(
            f"there are both a judge ({type(judge).__name__}) and rewards (reward_funcs or reward_model_path); keep "
            "one of them. RewardJudge(reward_funcs) makes a judge of rewards."
        )
    if not callable(getattr(judge, "judge", None)):
        raise ValueError(f"judge={judge!r} has no method `judge`; pass e.g. PairwiseJudge(model, base_url).")
    checks.no_effect(
        args,
        {"missing_eos_penalty": None, "reward_weights": None, "reward_timeout": None, "reward_workers": 0}
        | {"stop_on_dead_run": False},
        "a judge, which gives no rewards",
    )
