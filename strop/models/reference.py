"""The reference policy: what the model was before training, asked for log-probabilities.

A trainer holds one `Reference` and never asks which kind it is.

    FrozenModel      a model of its own: a copy, or one that was given
    AdapterOff       the model without its adapter, which was fresh
    FrozenWeights    the model with the trained weights that it had: one set of base weights in memory
    Precomputed      what one of these said, read from the rows
"""

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from strop.models.adapters import is_peft
from strop.models.forward import base_model
from strop.models.logps import logps

NOT_THE_FUNCTION = frozenset(
    {
        *("_name_or_path", "transformers_version", "use_cache", "_attn_implementation", "attn_implementation"),
        *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
    }
)
"""Fields of a model's or an adapter's config that change no log-probability."""


class Reference(Protocol):
    """Log-probabilities of a batch's targets, (B, T), without a graph, at the batch's `temperature` if it has one."""

    def logps(self, batch: Mapping[str, Any]) -> Tensor: ...


class Computed(ABC):
    """A reference that is in memory. Subclasses write `acting` and `tensors`."""

    model: Module

    @abstractmethod
    def acting(self) -> AbstractContextManager[Module]:
        """Within it, what it gives is the reference, in evaluation mode: to be read, or to write."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that its log-probabilities depend on, by name."""

    @torch.no_grad()
    def logps(self, batch: Mapping[str, Any]) -> Tensor:
        with self.acting() as model:
            return logps(model, batch, temperature=batch.get("temperature", 1.0)).logps


class FrozenModel(Computed):
    """A second model whose weights training doesn't touch."""

    def __init__(self, model: Module):
        self.model = model.eval().requires_grad_(False)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Its weights by name; whoever changes them moves the reference."""
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    @contextmanager
    def acting(self) -> Iterator[Module]:
        yield self.model

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()


class AdapterOff(Computed):
    """The model itself without its adapter; only the starting policy if the adapter is fresh."""

    def __init__(self, model: Module):
        self.model = model

    @contextmanager
    def acting(self) -> Iterator[Module]:
        frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        try:
            with evaluating(self.model), self.model.disable_adapter():
                yield self.model
        finally:
            for parameter in frozen:  # peft unfreezes whole adapters when it switches them on
                parameter.requires_grad_(False)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        yield from ((name, value) for name, value in self.model.state_dict().items() if name not in trained)


class FrozenWeights(Computed):
    """The model itself, in which copies of its trainable weights take their place meanwhile.

    For an adapter, whatever its name or kind, and for a model of which a part is trained.
    """

    def __init__(self, model: Module):
        self.model = model
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        """By the parameter's name; whoever changes them moves the reference."""

    @contextmanager
    def acting(self) -> Iterator[Module]:
        with evaluating(self.model), weights_replaced(self.model, self.weights):
            yield self.model

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with weights_replaced(self.model, self.weights):
            yield from self.model.state_dict().items()


class ModelNow(Computed):
    """The model as it is at the moment: the reference as long as it isn't trained."""

    def __init__(self, model: Module):
        self.model = model

    @contextmanager
    def acting(self) -> Iterator[Module]:
        with evaluating(self.model):
            yield self.model

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()


class Precomputed:
    """What a reference said before training, a stream of the batch."""

    def logps(self, batch: Mapping[str, Any]) -> Tensor:
        if "ref_logps" not in batch:
            raise ValueError(
                "precompute_ref_log_probs=True, but these rows came without ref_chosen_logps and ref_rejected_logps. "
                "Pass data sets to the trainer's constructor, evaluate or predict, which compute them"
            )
        return batch["ref_logps"].to(batch["targets"].device)


def reference_for(
    model: Module, ref_model: Module | None = None, *, moving: bool = False, copied: bool = True
) -> Computed:
    """The reference of `model` as it is in memory: `ref_model` if given, else the kind that takes the least memory.

    A `moving` one has `weights` of its own; one that isn't `copied` is gone when a whole model is trained. Raises
    ValueError for a `ref_model` that would be trained along.
    """
    if ref_model is not None:
        refuse_shared(model, ref_model)
        return FrozenModel(ref_model)
    if is_peft(model) and _is_fresh(model) and not moving:
        return AdapterOff(model)
    if is_peft(model) or not all(parameter.requires_grad for parameter in model.parameters()):
        return FrozenWeights(model)
    return FrozenModel(copy.deepcopy(model)) if copied else ModelNow(model)


def refuse_shared(model: Module, ref_model: Module) -> None:
    """Refuse a `ref_model` with weights of `model` that are trained."""
    trained = {parameter.data_ptr(): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    shared = [name for name, parameter in ref_model.named_parameters() if parameter.data_ptr() in trained]
    if ref_model is model or shared:
        what = "is the model itself" if ref_model is model else f"shares {len(shared)} trained weights with the model"
        raise ValueError(
            f"ref_model {what}, so it would be trained along and log-ratios stay 0. Leave ref_model out for the model "
            "as it is now, or load it a second time"
        )


def _is_fresh(model: Module) -> bool:
    """Whether the adapter, the model's only one, changes nothing yet: every LoRA B is zero, and there is nothing else
    in it."""
    adapter = {name: p for name, p in model.named_parameters() if p.requires_grad}
    is_alone = len(model.peft_config) == 1
    return is_alone and all("lora_" in name and ("lora_B" not in name or not p.any()) for name, p in adapter.items())


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Within it, `model` is in evaluation mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def weights_replaced(model: Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it, the parameters of `model` named in `weights` have these values; afterwards their own again."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in weights}
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = weights[name].to(parameter.device, parameter.dtype)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def fingerprint(reference: Computed, sample: int | None = None) -> str:
    """A digest of everything that the log-probabilities of `reference` depend on besides the rows.

    With `sample` only that many numbers of each tensor are read, enough to tell a model from what it was trained to.
    """
    digest = hashlib.sha256()
    adapters = {} if isinstance(reference, AdapterOff) else getattr(reference.model, "peft_config", {})
    for config in (base_model(reference.model).config, *adapters.values()):
        fields = {name: value for name, value in config.to_dict().items() if name not in NOT_THE_FUNCTION}
        digest.update(json.dumps(fields, sort_keys=True, default=_plain).encode())
    for name, tensor in reference.tensors():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        numbers = tensor.detach().flatten()[:sample].cpu().contiguous()
        digest.update(numbers.view(torch.uint8).numpy())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
