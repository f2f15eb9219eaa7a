"""The reference policy: what the model was before training, asked for log-probabilities.

A trainer holds one `Reference` and never asks which kind it is.
"""

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from strop.models.adapters import is_peft
from strop.models.logps import logps


class Reference(Protocol):
    """Log-probabilities of a batch's targets, (B, T), without a graph."""

    def logps(self, batch: Mapping[str, Any]) -> Tensor: ...


class FrozenModel:
    """A second model whose weights training doesn't touch."""

    def __init__(self, model: Module):
        self.model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def logps(self, batch: Mapping[str, Any]) -> Tensor:
        return logps(self.model, batch).logps


class AdapterOff:
    """The model itself without its adapter; only the starting policy if the adapter is fresh."""

    def __init__(self, model: Module):
        self.model = model

    @torch.no_grad()
    def logps(self, batch: Mapping[str, Any]) -> Tensor:
        training = self.model.training
        self.model.eval()
        try:
            with self.model.disable_adapter():
                return logps(self.model, batch).logps
        finally:
            self.model.train(training)


def reference_for(model: Module, ref_model: Module | None = None) -> Reference:
    """The reference of `model` as it is in memory: `ref_model` if given, else the model without its fresh adapter, else
    a copy."""
    if ref_model is model:
        raise ValueError(
            "ref_model is the model itself, so it would be trained along and every log-ratio stay 0. Leave ref_model "
            "out for a copy of the model as it is now, or load it a second time"
        )
    if ref_model is not None:
        return FrozenModel(ref_model)
    return AdapterOff(model) if is_peft(model) and _is_fresh(model) else FrozenModel(copy.deepcopy(model))


def _is_fresh(model: Module) -> bool:
    """Whether the adapter changes nothing yet: every LoRA B is zero, and there is nothing else in it."""
    adapter = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return all("lora_" in name and ("lora_B" not in name or not p.any()) for name, p in adapter.items())
