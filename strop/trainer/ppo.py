"""Proximal policy optimisation: every token against what a value function expected.

rollouts --scores, KL of each token--> rewards of tokens --GAE with values--> advantages, returns
         --clipped ratios--> loss of the policy + vf_coef clipped loss of the values
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from strop.compat import accepts_old_names
from strop.data.collate import Batch
from strop.losses.penalties import KL_ESTIMATORS, KLController
from strop.losses.policy import POLICY_LOSSES, Sampled
from strop.losses.reduce import StepCounts, masked_mean, masked_sum, token_mean
from strop.losses.value import clipped_value_loss, gae, token_rewards, whiten
from strop.models.forward import base_model
from strop.models.load import load_tokenizer
from strop.models.reference import Computed
from strop.models.scores import token_states
from strop.models.segments import Layout
from strop.models.values import MODEL, critic_of, load_critic, logps_and_values, save_critic, values, without_critic
from strop.rollout.buffer import Experience
from strop.rollout.episodes import Episodes
from strop.rollout.types import Generator, Rollout

from .agents import episodes_of
from .config import config_for
from .critic import ValuesFirst, add_critic, with_reward_model
from .layout import LayoutGuard, settle_layout
from .meter import Metrics
from .on_policy import OnPolicyTrainer
from .ppo_config import PPOConfig
from .preference import disable_dropout
from .ratios import moved_metrics, value_metrics

__all__ = ["PPOConfig", "PPOTrainer"]

LOSS = POLICY_LOSSES["dapo"]
"""PPO's: clipped ratios of tokens, every token of a step weighs the same."""


class Block(NamedTuple):
    """Rollouts as tensors, (N, T) over the tokens after each prompt, float64."""

    mask: Tensor
    """1 on the tokens that are trained."""
    values: Tensor
    kl: Tensor
    """What each token adds to the KL divergence, nats; 0 without a reference."""
    scores: Tensor
    """(N,): rewards of completions; 0 where none applies."""


@accepts_old_names
class PPOTrainer(OnPolicyTrainer):
    """Trains a policy on its own completions, each token by how much better than expected it went on.

    Rewards are `reward_funcs`, as GRPOTrainer takes them, and `reward_model`, a model or its name. Rows have a
    `prompt`, a text or messages, or the `input_ids` of one. `value_model`, an object or a name, estimates values;
    without one see `PPOConfig.value_function`. `ref_model` is by default the model as it is now.

    `generate`, `score`, `advantages` and `loss` can be overridden one by one.

    Metrics: `objective/kl` (nats a completion), `objective/entropy` (surprise of a completion, nats),
    `objective/non_score_reward`, `objective/scores`, `objective/rlhf_reward` (their sum), `policy/approxkl_avg`,
    `policy/clipfrac_avg`, `policy/entropy_avg` (nats a token), `loss/policy_avg`, `loss/value_avg`, `val/clipfrac_avg`,
    `val/ratio`, `val/ratio_var`, `val/explained_variance` (1 - var(returns - values) / var(returns)),
    `val/num_eos_tokens` (completions that came to an end, of those written at a time), `episode`, `eps` (episodes a
    second), `lr`, and those of GRPOTrainer that don't compare completions.
    """

    config_class = PPOConfig
    method = "PPO"
    eval_weight = "tokens"

    def __init__(
        self,
        args: PPOConfig | TrainingArguments | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        model: str | PreTrainedModel | None = None,
        ref_model: str | Module | None = None,
        reward_model: str | Module | None = None,
        train_dataset: Any = None,
        value_model: str | Module | None = None,
        data_collator: None = None,
        eval_dataset: Any = None,
        optimizers: tuple = (None, None),
        callbacks: list | None = None,
        peft_config: Any = None,
        *,
        reward_funcs: Any = None,
        reward_processing_classes: Any = None,
        quantization_config: Any = None,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Any = None,
        generator: Generator | None = None,
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
    ):
        if data_collator is not None:
            raise ValueError(
                f"data_collator={type(data_collator).__name__} would have no effect: rollouts are put into batches by "
                "the trainer itself. Leave it out."
            )
        model, args, processing_class = named_policy(model, args, processing_class)
        if ref_model is not None and not args.kl_coef:
            raise ValueError("ref_model would have no effect with kl_coef=0; remove one of the two.")
        self._ref_model, self._value_model = ref_model, value_model
        self._played_by = {"tools": tools, "rollout_func": rollout_func, "environment_factory": environment_factory}
        reward_model = args.reward_model_path if reward_model is None else reward_model
        functions, tokenizers = with_reward_model(
            reward_funcs, reward_processing_classes, reward_model, processing_class, args.lookup_size
        )
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
        self.loss_options = {"epsilon": self.args.cliprange, "epsilon_high": self.args.epsilon_high}
        if self.args.num_value_pretraining_steps:
            self.add_callback(self._values_first())

    # What a run is made of

    def equip(self, model: Module, args: Any, tokenizer: PreTrainedTokenizerBase, functions: list[Callable]) -> None:
        """Give `model` its value function as well."""
        super().equip(model, args, tokenizer, functions)
        refuse_unknown_token(model, args.stop_token_id)
        add_critic(model, args, tokenizer, functions, self._value_model)
        if args.disable_dropout:
            disable_dropout(model)

    def settled_layout(self, model: Module, args: Any) -> Layout:
        """One layout for the values as well."""
        name, critic = critic_of(model)
        with without_critic(model):
            layout = super().settled_layout(model, args)
        self._critic_guard = LayoutGuard(token_states) if name == MODEL else None
        return layout if name != MODEL or settle_layout(critic, args.layout) == layout else "padded"

    def read(self, inputs: Batch) -> Batch:
        """In a layout that policy and values were seen to compute rightly."""
        batch = super().read(inputs)
        if self._critic_guard is None or self.is_sharded:
            return batch
        with self.accelerator.autocast():
            return self._critic_guard(critic_of(self.model)[1], batch)

    @property
    def is_sharded(self) -> bool:
        """Whether a critic alone would be called in pieces."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def make_episodes(self) -> Episodes:
        """Single answers; conversations with `tools` and environments; or what `rollout_func` plays."""
        return episodes_of(self, **self._played_by)

    def _settled_reference(self) -> Computed:
        with without_critic(self.model):
            return super()._settled_reference()

    def _values_first(self) -> ValuesFirst:
        steps = self.args.num_value_pretraining_steps
        if self.is_sharded:
            raise ValueError(
                f"num_value_pretraining_steps={steps} can't keep the policy as it is where FSDP or DeepSpeed hold the "
                "gradients of several weights as one. Train values before, without them, and pass a value_model."
            )
        return ValuesFirst(steps)

    def _restart(self) -> None:
        super()._restart()
        self.controller = KLController(self.args.kl_coef, self.args.target_kl, self.args.kl_horizon)
        self._began = time.monotonic(), 0

    # Before a block is trained

    @property
    def trains_policy(self) -> bool:
        """Whether more than the values is trained by now."""
        return self._is_evaluating or self.state.global_step >= self.args.num_value_pretraining_steps

    @property
    def needs_old_logps(self) -> bool:
        return True

    def _ask_policy(self, mine: Sequence[Rollout], largest: int) -> None:
        if not self.is_exact or self.is_sharded:
            self.lookup.ask(mine, largest, self.policy_logps_and_values, "old_logps", "old_values")
            return
        super()._ask_policy(mine, largest)
        self.lookup.ask(mine, largest, lambda batch: values(self.model, batch), "old_values")

    def policy_logps_and_values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        scores, found = logps_and_values(self.model, batch, temperature=batch["temperature"])
        return scores.logps, found

    def trained(self, rollout: Rollout) -> list[int]:
        """1 on the tokens that are trained: those the model wrote, where a reward applies."""
        is_out = self.args.mask_truncated_completions and rollout.finish_reason == "length"
        if is_out or self.totals([rollout]).isnan().any():
            return [0] * len(rollout.token_ids)
        return rollout.completion_mask

    def scores(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(N,): what completions earn, NaN where nothing could be judged: rewards, less where there is no end."""
        totals = self.totals(rollouts).double()
        cut_off = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])
        return totals - cut_off * (self.args.missing_eos_penalty or 0.0)

    def block(self, rollouts: Sequence[Rollout]) -> Block:
        """Rollouts as tensors."""
        mask = after_prompts(rollouts, [self.trained(rollout) for rollout in rollouts])
        old_values = after_prompts(rollouts, [rollout.old_values for rollout in rollouts])
        return Block(mask, old_values, self.kl(rollouts) * mask, self.scores(rollouts).nan_to_num(0.0))

    def kl(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(N, T): what each token that the model wrote adds to the KL divergence from the reference, nats."""
        mask = after_prompts(rollouts, [rollout.completion_mask for rollout in rollouts])
        if self.reference is None:
            return torch.zeros_like(mask)
        old, ref = (after_prompts(rollouts, [getattr(r, n) for r in rollouts]) for n in ("old_logps", "ref_logps"))
        return KL_ESTIMATORS[self.args.kl_estimator]((ref - old) * mask) * mask

    def rewards_of_tokens(self, block: Block) -> Tensor:
        """(N, T): the score at the last token, less kl_coef KL at every one."""
        rewards = token_rewards(block.scores, block.mask, self.controller.coef * block.kl)
        return whiten(rewards, block.mask, shift_mean=False) if self.args.whiten_rewards else rewards

    def advantages(self, rollouts: Sequence[Rollout], group: int) -> Tensor:
        """(N, T) over the tokens after each prompt, before they are whitened. What values are trained towards is the
        sum of these and the old values."""
        block = self.block(rollouts)
        return gae(self.rewards_of_tokens(block), block.values, block.mask, self.args.gamma, self.args.lam)[0]

    def _give_advantages(self, rollouts: Sequence[Rollout], group: int) -> None:
        block, advantages = self.block(rollouts), self.advantages(rollouts, group)
        returns = torch.where(block.mask.bool(), advantages + block.values, 0.0)
        if self.args.whiten_advantages:
            advantages = whiten(advantages, block.mask)
        means = masked_mean(advantages, block.mask, -1).tolist()
        for rollout, *rows, mean in zip(rollouts, advantages.tolist(), returns.tolist(), means, strict=True):
            before, after = [0.0] * rollout.prompt_length, len(rollout.completion_ids)
            rollout.token_advantages, rollout.returns = (before + row[:after] for row in rows)
            rollout.advantage = mean
        self._measure_objective(rollouts)

    def _measure_objective(self, rollouts: Sequence[Rollout]) -> None:
        """Put into each rollout what it is measured by, and move kl_coef for the next block."""
        divergences, coef = self.kl(rollouts).sum(-1).tolist(), self.controller.coef
        for rollout, kl, score in zip(rollouts, divergences, self.scores(rollouts).tolist(), strict=True):
            own = zip(rollout.old_logps, rollout.completion_mask, strict=True)  # type: ignore[arg-type]
            found = {"objective/entropy": -sum(logp for logp, m in own if m)}
            found["objective/non_score_reward"] = -coef * kl
            if self.reference is not None:
                found |= {"objective/kl": kl, "kl_coef": coef}
            if not math.isnan(score):
                found |= {"objective/scores": score, "objective/rlhf_reward": score - coef * kl}
            rollout.metrics |= {name: (value, 1.0) for name, value in found.items()}
        if self.reference is not None and self.trains_policy and not self._is_evaluating:
            self.controller = self.controller.after(sum(divergences) / len(divergences), len(divergences))

    def measured_rewards(self, rollouts: Sequence[Rollout], group: int) -> Metrics:
        metrics = dict(super().measured_rewards(rollouts, group))
        if group == 1:
            metrics.pop("frac_reward_zero_std", None)  # of groups of one it would say nothing
        metrics["val/num_eos_tokens"] = (sum(rollout.finish_reason != "length" for rollout in rollouts), 1.0)
        inside = after_prompts(rollouts, [self.trained(rollout) for rollout in rollouts]).bool()
        returns, old = (
            after_prompts(rollouts, [getattr(r, n) for r in rollouts])[inside] for n in ("returns", "old_values")
        )
        if len(returns) > 1 and returns.var() > 1e-12 * (returns**2).mean():  # more than rounding
            metrics["val/explained_variance"] = (1 - ((returns - old).var() / returns.var()).item(), 1.0)
        return metrics

    def experience(self, rollout: Rollout) -> Experience:
        return replace(
            super().experience(rollout),
            completion_mask=self.trained(rollout),
            advantages=rollout.token_advantages,
            returns=rollout.returns,
            old_values=rollout.old_values,
        )

    # Loss

    def loss(self, model: Module, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
        args, mask = self.args, batch["completion_mask"]
        options = {"temperature": batch["temperature"], "entropy": True}
        scores, found = logps_and_values(model, batch, detached=not self.trains_policy, **options)
        sampled = Sampled(scores.logps, batch["old_logps"], batch["advantages"], mask)
        policy = LOSS(sampled, counts, **self.loss_options)
        errors = clipped_value_loss(found, batch["old_values"], batch["returns"], mask, args.cliprange_value)
        value = token_mean(errors, mask, counts)
        balancing, balance = self.balancing(scores.aux_loss, batch, counts)
        total = args.vf_coef * value
        if self.trains_policy:
            total = total + policy + balancing
        elif self.accelerator.num_processes > 1:  # data parallelism waits for a gradient of every weight
            total = total + 0.0 * (policy + balancing)
        tokens = mask.sum()
        metrics = {
            "policy/entropy_avg": (masked_sum(scores.entropy.detach(), mask), tokens),  # type: ignore[union-attr]
            "loss/policy_avg": (policy.detach() * counts.tokens, tokens),
            "loss/value_avg": (value.detach() * counts.tokens, tokens),
            **moved_metrics(LOSS, sampled, self.loss_options),
            **value_metrics(found.detach(), batch["returns"], errors.detach(), mask),
        }
        return total, {**metrics, **balance}

    # Logs and checkpoints

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        square = metrics.pop("val/ratio_square", None)
        if square is not None:
            metrics["val/ratio_var"] = max(square - metrics["val/ratio"] ** 2, 0.0)
        return super().derived(metrics)

    def log(self, logs, start_time=None):
        if "loss" in logs or "train_loss" in logs:
            began, first = self._began
            written = self.buffer.num_rollouts
            logs |= {"episode": written, "eps": (written - first) / max(time.monotonic() - began, 1e-9)}
            logs |= {"lr": logs["learning_rate"]} if "learning_rate" in logs else {}
        super().log(logs, start_time)

    def rollout_state(self) -> dict[str, Any]:
        return super().rollout_state() | {"kl": asdict(self.controller)}

    def load_rollout_state(self, state: dict[str, Any]) -> None:
        super().load_rollout_state(state)
        self.controller = KLController(**state["kl"])
        self._began = time.monotonic(), self.buffer.num_rollouts

    def _save(self, output_dir=None, state_dict=None):
        """The policy as a model of its own, and the value function beside it."""
        folder = self.args.output_dir if output_dir is None else output_dir
        own = None
        if state_dict is not None:
            part = f"{critic_of(self.model)[0]}."
            own = {name.partition(part)[2]: value for name, value in state_dict.items() if part in name}
            state_dict = {name: value for name, value in state_dict.items() if part not in name}
        with without_critic(self.model):
            super()._save(folder, state_dict)
        if self.args.should_save:
            save_critic(self.model, folder, own)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if self.is_fsdp_enabled:  # its own files hold both
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with without_critic(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_critic(self.model, resume_from_checkpoint)

    def _load_best_model(self):
        if self.is_sharded:
            super()._load_best_model()
            return
        with without_critic(self.model):
            super()._load_best_model()
        load_critic(self.model, self.state.best_model_checkpoint)


def named_policy(model: Any, args: Any, tokenizer: Any) -> tuple[Any, PPOConfig, Any]:
    """The model to train, the config and the tokenizer: `sft_model_path` takes the place of a model given by name, not
    of an object. Raises ValueError if there is no model."""
    path = args.get("sft_model_path") if isinstance(args, dict) else getattr(args, "sft_model_path", None)
    if model is None and path is None:
        raise ValueError("there is no model to train; pass one, or its name: PPOTrainer(model=...)")
    args = config_for(PPOConfig, args, path if model is None else model, PPOTrainer.method)
    if path is None or not (model is None or isinstance(model, str)):
        return model, args, tokenizer
    return path, args, load_tokenizer(model, args) if tokenizer is None and model is not None else tokenizer


def refuse_unknown_token(model: Module, stop_token_id: int | None) -> None:
    """Raise ValueError for a stop token that `model` can't write."""
    rows = base_model(model).get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    if stop_token_id is not None and not 0 <= stop_token_id < rows:
        raise ValueError(
            f"stop_token_id={stop_token_id} would have no effect, as the model writes tokens 0 to {rows - 1}; give the "
            "id of one of them."
        )


def after_prompts(rollouts: Sequence[Rollout], lists: Sequence[Sequence[float] | None]) -> Tensor:
    """(N, T) float64: of a list a rollout, what stands after its prompt; 0 behind its end."""
    own = [
        torch.tensor((x or ())[r.prompt_length :], dtype=torch.float64) for r, x in zip(rollouts, lists, strict=True)
    ]
    return pad_sequence(own, batch_first=True)
