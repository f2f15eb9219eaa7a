"""The value function of PPO: a module beside the policy's own, and what it says of each scored token.

    value_head    a linear map of the policy's own states, those that its output embedding reads
    value_model   a model of its own with a head of one output: another trunk

Either is a child of the policy's transformers model and computed within its forward, so that whoever wraps that one
(DistributedDataParallel, FSDP, autocast) wraps it too. A token's value is that of the state which predicts it, before
it is chosen. `without_critic` hides it from whatever reads the policy alone: saving, a reference.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from strop.models.adapters import is_peft
from strop.models.forward import base_model, forward, looks_ahead, stand_in, state_indices
from strop.models.logps import PROBE, TokenScores, logps, output_embedding
from strop.models.quantize import is_quantized
from strop.models.scores import checked_head, classification_head, token_outputs

HEAD, MODEL = "value_head", "value_model"
HEAD_FILE = "value_head.safetensors"
"""Where a head is saved; a model is in the folder "value_model"."""


def add_value_head(model: nn.Module) -> None:
    """Give `model` a value function on its own states, which says 0 until it is trained."""
    base = base_model(model)
    weight = next(p for p in base.parameters() if p.dtype.is_floating_point)
    dtype = torch.float64 if weight.dtype is torch.float64 else torch.float32
    head = nn.Linear(base.config.get_text_config().hidden_size, 1, dtype=dtype, device=weight.device)
    setattr(base, HEAD, _zeroed(head))


def add_value_model(model: nn.Module, critic: nn.Module) -> None:
    """Give `model` a value function with a trunk of its own. Raises ValueError if its head has not one output, or if it
    can't be trained to say values."""
    reason = no_critic(critic)
    if reason:
        raise ValueError(
            f'the value model {reason}. Pass another value_model, or take value_function="shared", a head on the '
            "policy's own states"
        )
    if is_peft(critic):
        critic = critic.merge_and_unload()  # type: ignore[operator]
    base = base_model(model)
    setattr(base, MODEL, critic.to(next(base.parameters()).device).requires_grad_(True))


def no_critic(model: nn.Module) -> str:
    """Why `model` can't be a value function, "" if it can. Raises ValueError if its head has not one output."""
    base = checked_head(model, num_labels=1)
    if is_quantized(base):
        return "is quantised, so its weights can't be trained"
    return "reads whole texts at once, so its values would know what comes later" if looks_ahead(base) else ""


def own_trunk(model: nn.Module) -> PreTrainedModel:
    """A model with a copy of the trunk of `model`, without adapters, and a head that says 0 until it is trained. Raises
    ValueError for a quantised trunk, and where transformers has no such model."""
    if is_quantized(base_model(model)):
        raise ValueError(
            "the policy is quantised, so a copy of its trunk can't be trained. Pass a value_model that isn't, or take "
            'value_function="shared", a head on the policy\'s own states'
        )
    base = base_model(copy.deepcopy(model).unload() if is_peft(model) else model)  # type: ignore[operator]
    config = copy.deepcopy(base.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            critic = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise ValueError(
            f"transformers has no classification model for a {config.model_type}, so there is no value model with a "
            'trunk of its own. Take value_function="shared", or pass a value_model with a head called `score`'
        ) from error
    head = classification_head(critic)
    trunk = getattr(base, base.base_model_prefix)
    setattr(critic, critic.base_model_prefix, copy.deepcopy(trunk))
    weight = next(p for p in trunk.parameters() if p.dtype.is_floating_point)
    head.to_empty(device=weight.device).to(weight.dtype)
    for part in head.modules():
        if isinstance(part, nn.Linear):
            _zeroed(part)
    return critic


def _zeroed(head: nn.Linear) -> nn.Linear:
    nn.init.zeros_(head.weight)
    if head.bias is not None:
        nn.init.zeros_(head.bias)
    return head


def critic_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The name and the module of the value function of `model`. Raises ValueError if it has none."""
    base = base_model(model)
    for name in (HEAD, MODEL):
        if isinstance(getattr(base, name, None), nn.Module):
            return name, getattr(base, name)
    raise ValueError(f"{type(base).__name__} has no value function; give it one by add_value_head or add_value_model")


@contextmanager
def without_critic(model: nn.Module) -> Iterator[None]:
    """Within it, `model` is the policy alone; as it is if there is nothing else."""
    base = base_model(model)
    critics = {name: getattr(base, name) for name in (HEAD, MODEL) if isinstance(getattr(base, name, None), nn.Module)}
    for name in critics:
        delattr(base, name)
    try:
        yield
    finally:
        for name, critic in critics.items():
            setattr(base, name, critic)


def logps_and_values(
    model: nn.Module, batch: Mapping[str, Any], *, detached: bool = False, **options: Any
) -> tuple[TokenScores, Tensor]:
    """Scores of `batch["targets"]` (`strop.models.logps`) and the value before each, (B, T), in float32 (float64
    stays), 0 where the completion mask is; both differentiable, in one forward.

    `detached`: values of a head don't train the states that it reads.
    """
    reader = _ValueReader(model, batch, detached)
    with reader:
        scores = logps(model, batch, **options)
    return scores, reader.result


def values(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B, T): the values alone."""
    name, critic = critic_of(model)
    if name == MODEL:
        return token_outputs(critic, batch)[..., 0]
    reader = _ValueReader(model, batch, detached=False)
    with reader, stand_in(reader.embedding, lambda hidden: hidden.new_full((*hidden.shape[:-1], 1), PROBE)):
        forward(model, batch)
    return reader.result


class _ValueReader:
    """Computes values when the forward of the policy comes to its output embedding."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], detached: bool):
        self.name, self.critic = critic_of(model)
        self.embedding = output_embedding(base_model(model))
        self.batch, self.detached = batch, detached
        self.found: list[Tensor] = []

    def __enter__(self) -> None:
        self.hook = self.embedding.register_forward_pre_hook(self._read)

    def __exit__(self, *_) -> None:
        self.hook.remove()

    @property
    def result(self) -> Tensor:
        if len(self.found) != 1:
            raise ValueError(
                f"the output embedding was called {len(self.found)} times in one forward, but its states are read "
                "once. strop trains models that apply it once, to their last states"
            )
        return self.found[0]

    @torch.compiler.disable  # which tokens have a value is data
    def _read(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self.name == MODEL:
            self.found.append(token_outputs(self.critic, self.batch)[..., 0])
            return
        hidden = args[0].detach() if self.detached else args[0]
        mask = self.batch["completion_mask"].to(hidden.device).bool()
        indices = state_indices(self.batch["predictors"], hidden, self.batch).to(hidden.device)[mask]
        states = hidden.flatten(0, -2).index_select(0, indices)
        with torch.autocast(states.device.type, enabled=False):
            weight, bias = self.critic.weight, self.critic.bias
            found = F.linear(states.to(weight.dtype), weight, bias)[:, 0]  # type: ignore[arg-type]
        self.found.append(found.new_zeros(mask.shape).masked_scatter(mask, found))


def save_critic(model: nn.Module, folder: str | Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write the value function of `model` into `folder`, beside the policy. `state`: its weights, where they are
    gathered from several processes."""
    name, critic = critic_of(model)
    if name == HEAD:
        state = critic.state_dict() if state is None else state
        save_file({key: value.contiguous() for key, value in state.items()}, Path(folder, HEAD_FILE))
    else:
        critic.save_pretrained(Path(folder, MODEL), state_dict=None if state is None else dict(state))  # type: ignore[operator]


def load_critic(model: nn.Module, folder: str | Path) -> None:
    """Set the value function of `model` to the one in `folder`. Raises ValueError if there is none of its kind."""
    name, critic = critic_of(model)
    place = Path(folder, HEAD_FILE if name == HEAD else MODEL)
    if not place.exists():
        raise ValueError(
            f"there is no {place}, so the value function can't go on where it was. Resume from a checkpoint that was "
            "written with the same value_function"
        )
    if name == HEAD:
        critic.load_state_dict(load_file(place))
    else:
        own = next(critic.parameters())
        saved = type(critic).from_pretrained(place, dtype=own.dtype)  # type: ignore[attr-defined]
        critic.load_state_dict(saved.state_dict())
