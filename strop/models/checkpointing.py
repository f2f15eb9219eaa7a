"""Activation checkpointing: recompute activations in the backward pass, all of them or all but attention's."""

import json
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from strop.compat import suggestion
from strop.models.adapters import base_model

OPTIONS = (
    "selective",
    "use_reentrant",
    "every_n_layers",
    "offload",
    "preserve_rng_state",
    "determinism_check",
    "debug",
)
ATTENTION_KERNELS = ("scaled_dot_product", "flash_attn", "varlen_attn", "flex_attention", "attention_forward")


def wire_checkpointing(model: nn.Module, kwargs: dict[str, Any] | str | None) -> None:
    """Checks the options of activation checkpointing and has `model` understand {"selective": True}.

    Selective checkpointing keeps the outputs of attention kernels, which are small and dear to compute, and recomputes
    the rest. The trainer of transformers hands `kwargs` to the model's `activation_checkpointing_enable`, which is
    wrapped for that.
    """
    options = json.loads(kwargs) if isinstance(kwargs, str) else dict(kwargs or {})
    check_options(model, options)
    if options.get("selective"):
        model.activation_checkpointing_enable = partial(enable_checkpointing, model)


def check_options(model: nn.Module, options: dict[str, Any]) -> None:
    """Refuses unknown options, and selective checkpointing where it can't work."""
    for name in options:
        if name not in OPTIONS:
            hint = suggestion(name, OPTIONS) or f" Known are {', '.join(OPTIONS)}."
            raise ValueError(f"unknown option of activation checkpointing: {name!r}.{hint}")
    if not options.get("selective"):
        return
    if options.get("use_reentrant"):
        raise ValueError(
            "activation checkpointing can't be selective and reentrant: the reentrant kind recomputes a layer as a "
            "whole. Leave out use_reentrant (or set it to False)."
        )
    if base_model(model).config._attn_implementation == "eager":
        raise ValueError(
            'selective activation checkpointing keeps what attention kernels return, and attn_implementation="eager" '
            'calls none, so it would save nothing. Load the model with attn_implementation="sdpa", or leave selective '
            "out."
        )


def enable_checkpointing(
    model: nn.Module, activation_checkpointing_kwargs: dict[str, Any] | None = None, **layers: Any
) -> None:
    """`activation_checkpointing_enable` of `model`, selective if asked. `layers` are every_n_layers and offload."""
    options = {"use_reentrant": False} | (activation_checkpointing_kwargs or {})
    if options.pop("selective", False):
        options["context_fn"] = attention_kept
    PreTrainedModel.activation_checkpointing_enable(
        base_model(model), activation_checkpointing_kwargs=options, **layers
    )


def attention_kept() -> tuple[Any, Any]:
    """The contexts of a layer's forward pass and of its recomputation, under which attention runs only once."""
    return create_selective_checkpoint_contexts(keep_attention)


def keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the outputs of attention kernels; recompute everything else."""
    kept = any(kernel in operator_name(operator) for kernel in ATTENTION_KERNELS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def operator_name(operator: Any) -> str:
    """E.g. "aten::_scaled_dot_product_flash_attention"; higher-order operators have plain names."""
    return (
        operator.name()
        if isinstance(operator, torch._ops.OpOverload | torch._ops.HigherOrderOperator)
        else str(operator)
    )
