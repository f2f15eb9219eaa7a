"""Which value function a run of PPO has, and who keeps the policy still while only it is trained."""

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase, TrainerCallback

from strop.models.forward import base_model
from strop.models.load import load_model
from strop.models.tokenizers import check_vocabulary
from strop.models.values import add_value_head, add_value_model, no_critic, own_trunk, without_critic
from strop.rewards.from_model import RewardModel

logger = logging.getLogger(__name__)


def add_critic(
    model: Module,
    args: Any,
    tokenizer: PreTrainedTokenizerBase,
    functions: Sequence[Callable],
    value_model: str | Module | None,
) -> None:
    """Give `model` the value function that `args.value_function` asks for (`PPOConfig`).

    Raises ValueError for a `value_model` that isn't used, and for a reward model that reads other tokens.
    """
    kind, models = args.value_function, [one for one in functions if isinstance(one, RewardModel)]
    if value_model is not None:
        if kind not in ("auto", "separate"):
            raise ValueError(f"value_model would have no effect with value_function={kind!r}; remove one of the two.")
        what, critic = "the value_model", _given(value_model, args, [one.model for one in models])
    elif kind == "separate":
        what, critic = "a copy of the policy's trunk with a new head", own_trunk(model)
    else:
        own = next((one.model for one in models if one.tokenizer.get_vocab() == tokenizer.get_vocab()), None)
        if kind == "reward" and own is None:
            raise ValueError(
                'value_function="reward" starts values from a reward model that reads the policy\'s tokens, but '
                + ("it has another tokenizer" if models else "there is none")
                + '; take "shared" or "separate".'
            )
        use = own is not None and (kind == "reward" or (kind == "auto" and not no_critic(own)))
        what = "a copy of the reward model" if use else "a head on the policy's own states"
        critic = _copied(own, base_model(model).dtype) if use else None  # type: ignore[arg-type]
    logger.info("values: %s", what)
    if critic is None:
        add_value_head(model)
    else:
        check_vocabulary(tokenizer, critic)
        add_value_model(model, critic)


def _copied(reward_model: Module, dtype: torch.dtype) -> Module:
    """A copy to be trained, at least as precise as the policy."""
    if no_critic(reward_model):  # which is refused later
        return reward_model
    copied = copy.deepcopy(reward_model)
    return copied.to(torch.promote_types(dtype, base_model(copied).dtype))  # type: ignore[arg-type]


def _given(value_model: str | Module, args: Any, reward_models: list[Module]) -> Module:
    if isinstance(value_model, str):
        return load_model(value_model, args, auto_class=AutoModelForSequenceClassification, num_labels=1)
    if any(value_model is other for other in reward_models):  # it would be trained along
        return copy.deepcopy(value_model)
    return value_model


def with_reward_model(
    functions: Any, tokenizers: Any, reward_model: str | Module | None, tokenizer: Any, batch_size: int
) -> tuple[Any, Any]:
    """`functions` and their `tokenizers` with the reward model behind them, which scores `batch_size` completions at a
    time. An object reads what `tokenizer` writes unless a further one of `tokenizers` says otherwise."""
    if reward_model is None:
        return functions, tokenizers
    if not isinstance(reward_model, str | Path | Module):
        raise ValueError(
            f"reward_model={reward_model!r} is a {type(reward_model).__name__}, but a reward model is a model or its "
            "name. Pass functions as reward_funcs."
        )
    several = list(functions) if isinstance(functions, list | tuple) else [] if functions is None else [functions]
    given = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers] * (len(several) + 1)
    own = given.pop() if len(given) > len(several) else None
    if own is None and isinstance(reward_model, Module):
        own = tokenizer
    return [*several, RewardModel(reward_model, own, batch_size)], [*given, None]


class ValuesFirst(TrainerCallback):
    """Leaves the policy as it is in the first `steps` optimizer steps, whatever an optimizer does without gradients."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step >= self.steps:
            return
        with without_critic(model):  # type: ignore[arg-type]
            for parameter in model.parameters():  # type: ignore[union-attr]
                parameter.grad = None
