"""The one call of a model in training, and the choice of layout it is called with.

`choose_layout` says which layout a model can take, `use_packed_attention` prepares it for the packed one, `forward`
calls it with whatever a batch of that layout holds.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from strop.models.attention import NAME, packed_masks
from strop.models.segments import Layout

MODEL_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "segments",
    "token_type_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
)
"""Keys of a batch that a model reads, besides what `model_kwargs` holds."""

PACKABLE_LAYERS = {"full_attention", "sliding_attention", "dense", "sparse", "moe"}
"""Layer types of transformers' configs whose tokens meet in `AttentionInterface` or not at all."""


def forward(model: nn.Module, batch: Mapping[str, Any], **options) -> ModelOutput:
    """The model's output on `batch`, whichever layout it has. `options` go to the model as they are.

    `model` may be wrapped: by PEFT, DistributedDataParallel, torch.compile.
    """
    inputs = {name: batch[name] for name in MODEL_INPUTS if name in batch} | dict(batch.get("model_kwargs", {}))
    with packed_masks() if "segments" in batch else nullcontext():
        return model(**inputs, use_cache=False, **options)


@contextmanager
def stand_in(module: nn.Module, call: Callable) -> Iterator[None]:
    """The forward of `module` is `call`, however the module is wrapped and hooked."""
    own = module.__dict__.get("forward")
    module.forward = call  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def state_indices(indices: Tensor, hidden: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """`indices` into a batch's tokens, flattened, as indices into its states `hidden` (..., time, D), flattened.

    They differ by the virtual tokens that prompt tuning puts before every row.
    """
    width = batch.get("decoder_input_ids", batch["input_ids"]).shape[-1]
    return indices + (indices // width + 1) * (hidden.shape[-2] - width)


def base_model(model: nn.Module) -> nn.Module:
    """The model of transformers within its wrappers."""
    while True:
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod  # type: ignore[assignment]
        elif not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):  # PEFT
            model = model.get_base_model()  # type: ignore[operator]
        elif not isinstance(model, PreTrainedModel) and isinstance(getattr(model, "module", None), nn.Module):
            model = model.module  # type: ignore[assignment]  # data parallel wrappers
        else:
            return model


def choose_layout(model: nn.Module) -> tuple[Layout, str]:
    """The layout `model` can be trained in, and why, in words for one line of log."""
    obstacle = packing_obstacle(model)
    if obstacle is None:
        return "packed", f"{type(base_model(model)).__name__} attends through transformers' AttentionInterface"
    return "padded", obstacle


def use_packed_attention(model: nn.Module) -> None:
    """Set `model` to strop's attention, which packed batches need; a second call changes nothing.

    Raises ValueError if the model can only take padded batches.
    """
    obstacle = packing_obstacle(model)
    if obstacle is not None:
        raise ValueError(f"{obstacle}: a packed batch would mix its rows. Use the padded layout for this model")
    base_model(model).set_attn_implementation(NAME)  # type: ignore[operator]


def packing_obstacle(model: nn.Module) -> str | None:
    """Why `model` can't take packed batches, None if it can."""
    base = base_model(model)
    if not isinstance(base, PreTrainedModel):
        return f"{type(base).__name__} is no transformers model"
    return _adapter_obstacle(model) or _class_obstacle(base) or _config_obstacle(base)


def _class_obstacle(base: PreTrainedModel) -> str | None:
    name = type(base).__name__
    if base.config.is_encoder_decoder:
        return f"{name} has an encoder and a decoder"
    if getattr(base, "_is_stateful", False):
        return f"{name} carries a state from token to token, which can't be cut between rows"
    if not all(m._supports_attention_backend for m in base.modules() if isinstance(m, PreTrainedModel)):
        return f"{name} doesn't attend through transformers' AttentionInterface"
    parameters = inspect.signature(base.forward).parameters
    if "position_ids" not in parameters:
        return f"{name} takes no position_ids, so its positions can't restart with every row"
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return f"{name} takes no further keywords, so its attention can't be told where rows begin"
    return None


def _config_obstacle(base: PreTrainedModel) -> str | None:
    name, config = type(base).__name__, base.config
    if config.sub_configs:
        return f"{name} reads more than text"
    if looks_ahead(base):
        return f"{name} attends to later tokens, as encoders do"
    if getattr(config, "alibi", False):
        return f"{name} biases its scores by distance in the stream (ALiBi)"
    others = set(getattr(config, "layer_types", None) or ()) - PACKABLE_LAYERS
    if others:
        return f"{name} has layers of type {', '.join(sorted(others))}"
    if _has_window(config) and not _hands_window_to_attention(base):
        return f"{name} keeps its sliding window in its mask, where strop's attention can't see it"
    return None


def looks_ahead(base: PreTrainedModel) -> bool:
    """Whether the tokens of `base`, a model of transformers, are known to attend to later ones."""
    if any(getattr(module, "is_causal", True) is False for module in base.modules()):
        return True
    config = base.config
    return not getattr(config, "is_causal", True) or bool(getattr(config, "use_bidirectional_attention", None))


POSITION_TABLES = ("position_embeddings", "wpe", "embed_positions")
"""What transformers calls the embedding of positions, where they are learned."""


def learned_positions(base: PreTrainedModel) -> int | None:
    """How many positions `base`, a model of transformers, has an embedding for, so that it can't read longer rows; None
    where they aren't learned."""
    positions = getattr(base.config.get_text_config(), "max_position_embeddings", 0)
    for name, module in base.named_modules():
        if not isinstance(module, nn.Embedding) or name.split(".")[-1] not in POSITION_TABLES:
            continue
        if module.num_embeddings >= positions:  # those of other modalities are shorter
            unused = int(getattr(module, "offset", 0)) if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    return None


def refuse_beyond_positions(model: nn.Module, length: int, name: str) -> None:
    """Raise ValueError if `model` can't read rows of `length` tokens. Encoder-decoders read prompt and answer apart."""
    base = base_model(model)
    if not isinstance(base, PreTrainedModel) or base.config.is_encoder_decoder:
        return
    known = learned_positions(base)
    if known is not None and length > known:
        raise ValueError(
            f"{name}: rows have up to {length} tokens, but {type(base).__name__} has learned {known} positions and can "
            f"read no longer ones. Shorten them, in training with max_length={known}"
        )


def _has_window(config) -> bool:
    if getattr(config, "layer_types", None):
        return "sliding_attention" in config.layer_types
    return getattr(config, "sliding_window", None) is not None


def _hands_window_to_attention(base: PreTrainedModel) -> bool:
    source = Path(inspect.getfile(type(base))).read_text(encoding="utf-8")
    return re.search(r"\bsliding_window=(self\.|getattr\(self)", source) is not None


def _adapter_obstacle(model: nn.Module) -> str | None:
    """PEFT adapters that act on rows rather than tokens."""
    for adapter in getattr(model, "peft_config", {}).values():
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        if adapter.is_prompt_learning or adapter.is_adaption_prompt:
            return f"the {kind} adapter puts virtual tokens before every row"
        if getattr(adapter, "alora_invocation_tokens", None):
            return "the activated LoRA adapter starts at a token it searches for in every row"
        if kind == "XLORA":
            return "the X-LoRA adapter mixes its experts by whole rows"
    return None
