"""Group-relative policy optimisation and its relatives: completions of a prompt compared with each other.

rollouts  --rewards, ADVANTAGES-->  advantages  --POLICY_LOSSES-->  loss + beta KL - entropy_coef entropy
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import IterableDataset
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.compat import accepts_old_names
from strop.data.collate import Batch
from strop.losses.advantages import ADVANTAGES, normalize_then_sum
from strop.losses.corrections import (
    entropy_threshold,
    importance_correction,
    off_policy_keep,
    top_entropy_keep,
)
from strop.losses.penalties import EntropyController, kl_penalty
from strop.losses.policy import MAX_LOG_RATIO, Sampled
from strop.losses.reduce import StepCounts, masked_sum
from strop.models.logps import TokenScores, logps
from strop.rollout.episodes import Episodes
from strop.rollout.generator import InProcessGenerator
from strop.rollout.types import Generator, Rollout

from . import checks
from .agents import episodes_of
from .grpo_config import GRPOConfig
from .meter import Metrics, WeightedSums, means
from .on_policy import OnPolicyTrainer
from .ratios import ratio_metrics, sampling_metrics

__all__ = ["GRPOConfig", "GRPOTrainer"]

TIE = 1e-5
"""Entropies, in nats, no farther apart than this are equal, as those of a group's first tokens are but for rounding."""


@accepts_old_names
class GRPOTrainer(OnPolicyTrainer):
    """Trains a policy on its own completions, each compared with the others to the same prompt.

    `reward_funcs` is one or several of: callables `f(prompts=..., completions=..., completion_ids=..., **columns)` that
    return a number for each completion or None where they don't apply, names (`strop.rewards.resolve`), reward models.
    Rows have a `prompt`, a text or messages.

    Metrics: `reward`, `reward_std`, `rewards/<name>/mean` and `/std`, `frac_reward_zero_std` (share of groups of equal
    rewards), `completions/...` (lengths in tokens, `clipped_ratio`), `entropy` (nats a token), `kl` where beta isn't 0,
    `clip_ratio/...` or `cispo_clip_ratio` (shares of tokens, or of rows where these have one ratio), `step_time`
    (seconds), `num_tokens` of prompts and completions.
    """

    config_class = GRPOConfig
    method = "GRPO"

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Any = None,
        generator: Generator | None = None,
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
    ):
        self._played_by = {"tools": tools, "rollout_func": rollout_func, "environment_factory": environment_factory}
        if train_dataset is None and callable(environment_factory):
            train_dataset = IterableDataset.from_generator(empty_prompts)
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
        self.policy_loss = self.args.policy_loss
        self.loss_options = self.args.loss_options
        self._check_sampler()

    def make_episodes(self) -> Episodes:
        """Single answers; conversations with `tools` and environments; or what `rollout_func` plays."""
        return episodes_of(self, **self._played_by)

    @property
    def samples_itself(self) -> bool:
        """Whether the model in training writes the completions, whose log-probabilities are then its own."""
        return isinstance(self.generator, InProcessGenerator) and not self._played_by["rollout_func"]

    def _check_sampler(self) -> None:
        if self.samples_itself:
            names = ("mode", "clip_min", "clip_max")
            options = {f.name: f.default for f in fields(GRPOConfig)}
            checks.no_effect(
                self.args,
                {f"vllm_importance_sampling_{name}": options[f"vllm_importance_sampling_{name}"] for name in names},
                "generation by the model in training, whose log-probabilities need no correction",
            )

    # Advantages

    def advantages(self, rollouts: Sequence[Rollout], group: int) -> Tensor:
        rewards, weights = self.rewards_of(rollouts), self.reward_weights
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            return normalize_then_sum(rewards, group, weights)
        totals = self.totals(rollouts)
        if self.args.kl_in_reward:
            totals = totals - self.args.beta * self.reference_kl(rollouts)
        name = self.args.advantage_type or self.args.scale_rewards
        options = {"lengths": torch.tensor([float(r.length) for r in rollouts])} if name == "opo" else {}
        return ADVANTAGES[name](totals, group, **options)

    @property
    def needs_old_logps(self) -> bool:
        return super().needs_old_logps or self.args.kl_in_reward

    # Before a step

    @property
    def needs_sampling_logps(self) -> bool:
        reads = self.args.vllm_importance_sampling_correction or self.args.off_policy_mask_threshold is not None
        mixes = self.args.dynamic_sampling_rounds > 0 or self.args.replay_buffer_size > 0  # what others have said
        return reads and not self.samples_itself and not self.is_exact and (self.sampler_speaks or mixes)

    def look_ahead(self, batches: list[Batch]) -> None:
        self.settle_entropy()
        weight = self.controller.weight if self.args.use_adaptive_entropy else self.args.entropy_coef
        for batch in batches:
            batch["entropy_weight"] = weight
        if self.args.top_entropy_quantile < 1:
            self._select_tokens(batches)
        if self.has_bonus:
            self._measure({"policy_loss": (0.0, 1.0), "entropy_coef": (self.controller.coef, 1.0)})

    @property
    def has_bonus(self) -> bool:
        return bool(self.args.entropy_coef or self.args.use_adaptive_entropy)

    def settle_entropy(self) -> None:
        """Move the weight of the entropy by what the last step's was. All processes call it alike."""
        mean = means(self.step_entropy.totals(self.accelerator.num_processes)).get("entropy")
        self.step_entropy = WeightedSums()
        if self.args.use_adaptive_entropy and mean is not None:
            self.controller = self.controller.after(mean)

    def _select_tokens(self, batches: list[Batch]) -> None:
        """Tell each micro-batch which of its tokens have the highest entropies of the step, and how many are so."""
        found = []
        self.model_wrapped.train()
        with torch.no_grad(), self.compute_loss_context_manager():
            for batch in batches:
                scores = logps(self.model_wrapped, batch, temperature=batch["temperature"], entropy=True)
                found.append(scores.entropy.cpu())
        own = [e[batch["completion_mask"].bool().cpu()] for e, batch in zip(found, batches, strict=True)]
        every = torch.cat([part for several in gather_object([own]) for part in several])
        threshold = entropy_threshold(every, torch.ones_like(every), self.args.top_entropy_quantile) - TIE
        for batch, entropy in zip(batches, found, strict=True):
            batch["entropy_keep"] = top_entropy_keep(entropy, batch["completion_mask"].cpu(), threshold)
            batch["entropy_tokens"] = int((every >= threshold).sum())

    def rollout_state(self) -> dict[str, Any]:
        return super().rollout_state() | {"entropy": asdict(self.controller)}

    def load_rollout_state(self, state: dict[str, Any]) -> None:
        super().load_rollout_state(state)
        self.controller = EntropyController(**state["entropy"])

    def _restart(self) -> None:
        super()._restart()
        args = self.args
        bounds = args.entropy_coef_delta, args.entropy_coef_min, args.entropy_coef_max
        self.controller = EntropyController(args.entropy_coef, args.entropy_target, *bounds)
        self.step_entropy = WeightedSums()

    def _save_checkpoint(self, model, trial):
        self.settle_entropy()
        super()._save_checkpoint(model, trial)

    # Loss

    def loss(self, model: Module, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
        mask = batch["completion_mask"]
        scores = logps(model, batch, temperature=batch["temperature"], entropy=True)
        sampled, sampling = self.sampled(scores, batch)
        penalty, divergence = self.penalty(sampled, batch)
        loss = self.policy_loss(sampled, counts, penalty, **self.loss_options)
        entropy = {"entropy": (masked_sum(scores.entropy.detach(), mask), mask.sum())}
        if not self._is_evaluating:
            self.step_entropy.add(entropy)
        bonus, shown = self.bonus(scores, batch, counts, loss)
        balancing, balance = self.balancing(scores.aux_loss, batch, counts)
        ratios = ratio_metrics(self.policy_loss, sampled, self.loss_options)
        return loss - bonus + balancing, {**entropy, **divergence, **shown, **sampling, **balance, **ratios}

    def sampled(self, scores: TokenScores, batch: Batch) -> tuple[Sampled, Metrics]:
        """What the loss reads, and how far from the sampler the policy was."""
        args, mask = self.args, batch["completion_mask"]
        old = batch.get("old_logps", scores.logps.detach())
        correction, metrics = None, {}
        if "sampling_logps" in batch and args.vllm_importance_sampling_correction:
            bounds = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
            mode = args.vllm_importance_sampling_mode
            correction = importance_correction(old, batch["sampling_logps"], mask, mode, *bounds)
            metrics = sampling_metrics(old, batch["sampling_logps"], mask, correction)
        keep = self.keep(scores, old, batch)
        return Sampled(scores.logps, old, batch["advantages"], mask, keep, correction), metrics

    def keep(self, scores: TokenScores, old: Tensor, batch: Batch) -> Tensor | None:
        """1 on what isn't left out, (B, 1) or (B, T); None if nothing is."""
        args, mask = self.args, batch["completion_mask"]
        parts = []
        if args.off_policy_mask_threshold is not None:
            sampling = batch.get("sampling_logps", old)
            parts.append(
                off_policy_keep(scores.logps, sampling, batch["advantages"], mask, args.off_policy_mask_threshold)
            )
        if args.top_entropy_quantile < 1:
            parts.append(self.top_entropy(scores, batch))
        return None if not parts else parts[0] if len(parts) == 1 else parts[0] * parts[1]

    def top_entropy(self, scores: TokenScores, batch: Batch) -> Tensor:
        """(B, T): 1 on the tokens of highest entropy, of the whole step; in evaluation, of the batch."""
        if "entropy_keep" in batch:
            return batch["entropy_keep"].to(scores.entropy.device)
        mask = batch["completion_mask"]
        return top_entropy_keep(
            scores.entropy, mask, entropy_threshold(scores.entropy, mask, self.args.top_entropy_quantile)
        )

    def penalty(self, sampled: Sampled, batch: Batch) -> tuple[Tensor | None, Metrics]:
        """beta KL of each token, (B, T), and its metric."""
        if "ref_logps" not in batch:
            return None, {}
        args, mask = self.args, sampled.mask
        if args.kl_in_reward:
            kl = sampled.old_logps - batch["ref_logps"]
        else:
            log_ratio = self.policy_loss.log_ratio(sampled) if args.use_bias_correction_kl else None
            kl = kl_penalty(sampled.logps, batch["ref_logps"], mask, args.kl_estimator, log_ratio)
        metrics = {"kl": (masked_sum(kl.detach(), mask), mask.sum())}
        if not args.kl_in_reward:
            far = (batch["ref_logps"] - sampled.logps.detach() > MAX_LOG_RATIO).to(mask.dtype)
            metrics["kl_clip_ratio"] = (masked_sum(far, mask), mask.sum())
        return None if args.kl_in_reward else args.beta * batch["kl_weights"] * kl, metrics

    def bonus(self, scores: TokenScores, batch: Batch, counts: StepCounts, loss: Tensor) -> tuple[Any, Metrics]:
        """This batch's share of the weighted mean entropy of the trained tokens, and the loss without it."""
        if not self.has_bonus or self._is_evaluating:
            return 0.0, {}
        mask, tokens = batch["completion_mask"], counts.tokens
        if "entropy_tokens" in batch:
            mask, tokens = self.top_entropy(scores, batch), batch["entropy_tokens"]
        share = masked_sum(scores.entropy, mask) / max(tokens, 1)
        return batch["entropy_weight"] * share, {"policy_loss": (loss, 0.0)}


def empty_prompts() -> Iterator[dict[str, Any]]:
    """Rows without end for environments that say what there is to do when they are reset."""
    while True:
        yield {"prompt": [{"role": "user", "content": ""}]}
