"""REINFORCE with a leave-one-out baseline: a completion against the mean reward of its siblings.

r - beta log pi/ref of the completion  --leave one out-->  advantage  --ratio of whole completions, clipped-->  loss
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.compat import accepts_old_names
from strop.data.collate import Batch
from strop.losses.advantages import leave_one_out
from strop.losses.policy import POLICY_LOSSES, Sampled
from strop.losses.reduce import StepCounts, masked_sum
from strop.models.logps import logps
from strop.rollout.types import Generator, Rollout

from . import checks
from .meter import Metrics
from .on_policy import OnPolicyTrainer
from .on_policy_config import OnPolicyConfig
from .ratios import ratio_metrics

__all__ = ["RLOOConfig", "RLOOTrainer"]

LOSS = POLICY_LOSSES["rloo"]


@accepts_old_names
@dataclass
class RLOOConfig(OnPolicyConfig):
    """Settings of REINFORCE leave-one-out (arXiv:2402.14740)."""

    num_generations: int = 2
    """Completions a prompt, compared with each other: at least 2."""

    beta: float = 0.05
    """Weight of log pi/ref of a completion, which is subtracted from its reward; 0: no reference is kept."""

    normalize_advantages: bool = False
    """Give the advantages of a block mean 0 and standard deviation 1."""

    reward_clip_range: tuple[float, float] | None = None
    """Least and largest reward; others are clipped before log pi/ref is subtracted."""

    def __post_init__(self):
        checks.at_least("epsilon", self.epsilon, 0)
        checks.at_least("epsilon_high", self.epsilon_high, 0)
        if self.reward_clip_range is not None:
            low, high = self.reward_clip_range = tuple(self.reward_clip_range)
            if not low < high:
                raise ValueError(f"reward_clip_range=({low}, {high}) leaves nothing in between; give (least, largest).")
        super().__post_init__()


@accepts_old_names
class RLOOTrainer(OnPolicyTrainer):
    """Trains a policy on its own completions, each against the mean reward of the others to the same prompt.

    `reward_funcs` and rows are those of GRPOTrainer. Metrics as well; `kl` is the mean log pi/ref of a token, nats,
    ratios are those of whole completions.
    """

    config_class = RLOOConfig
    method = "RLOO"

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any,
        args: RLOOConfig | TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[Callable] | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        generator: Generator | None = None,
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
    ):
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            quantization_config=quantization_config,
            peft_config=peft_config,
            generator=generator,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        given = {"epsilon": self.args.epsilon, "epsilon_high": self.args.epsilon_high}
        self.loss_options = {name: value for name, value in given.items() if value is not None}

    @property
    def needs_old_logps(self) -> bool:
        return super().needs_old_logps or self.reference is not None

    def advantages(self, rollouts: Sequence[Rollout], group: int) -> Tensor:
        totals = self.totals(rollouts)
        if self.args.reward_clip_range is not None:
            totals = totals.clamp(*self.args.reward_clip_range)
        if self.reference is not None:
            totals = totals - self.args.beta * self.reference_kl(rollouts)
        return leave_one_out(totals, group, self.args.normalize_advantages)

    def loss(self, model: Module, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
        mask = batch["completion_mask"]
        scores = logps(model, batch, temperature=batch["temperature"], entropy=True)
        old = batch.get("old_logps", scores.logps.detach())
        sampled = Sampled(scores.logps, old, batch["advantages"], mask)
        loss = LOSS(sampled, counts, **self.loss_options)
        balancing, balance = self.balancing(scores.aux_loss, batch, counts)
        metrics = {"entropy": (masked_sum(scores.entropy.detach(), mask), mask.sum()), **balance}
        if "ref_logps" in batch:
            metrics["kl"] = (masked_sum(old - batch["ref_logps"], mask), mask.sum())
        return loss + balancing, {**metrics, **ratio_metrics(LOSS, sampled, self.loss_options)}
