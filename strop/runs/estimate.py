"""How much memory a run will take, part by part, from the model's configuration alone.

The model is built on the meta device, where tensors have shapes and no contents: weights, gradients and optimizer
states are counted exactly, and activations by running a forward pass there and adding up what it keeps.
What isn't counted: the allocator's slack, kernels' workspaces, and the framework itself.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from strop.compat import suggestion
from strop.models.adapters import base_model, with_task, wrap
from strop.models.forward import refuse_beyond_positions
from strop.models.head import tiling
from strop.rollout.generator import CPU_MAX_ROWS, DEFAULT_MAX_ROWS
from strop.rollout.generator_stream import PREFILL_TOKENS
from strop.rollout.sampling import padded_size

SHAPES_ONLY = "strop_shapes"
"""Name under which transformers knows the attention that only has shapes."""

TASKS: dict[str, Any] = {
    "CAUSAL_LM": AutoModelForCausalLM,
    "SEQ_CLS": AutoModelForSequenceClassification,
    "TOKEN_CLS": AutoModelForTokenClassification,
}
"""Task, in peft's words -> the class of its models."""

StateBytes = Callable[[Tensor], int]


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    """States kept from step to step."""
    reference: int
    """A frozen model beside it."""
    activations: int
    """What the forward pass keeps for the backward pass, the head excepted."""
    logits: int
    """The head's tiles."""
    kv_cache: int
    """Keys and values of tokens being generated."""

    @property
    def parts(self) -> dict[str, int]:
        """Part -> bytes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        lines = [f"{name.replace('_', ' '):<12} {readable(size):>10}" for name, size in self.parts.items() if size]
        return "\n".join([*lines, f"{'total':<12} {readable(self.total):>10}"])


@dataclass(frozen=True)
class RolloutEstimate:
    """Bytes on one device of a run that trains what it writes, at the peaks of both halves of a step."""

    generation: Estimate
    training: Estimate

    @property
    def parts(self) -> dict[str, Any]:
        """Half -> part -> bytes."""
        halves = {"generation": self.generation, "training": self.training}
        return {name: half.parts | {"total": half.total} for name, half in halves.items()}

    @property
    def total(self) -> int:
        """Of the half that takes more; the other's own parts are free by then."""
        return max(self.generation.total, self.training.total)

    def __str__(self) -> str:
        return f"while it generates:\n{self.generation}\n\nwhile it trains:\n{self.training}"


def estimate(
    config: PreTrainedConfig,
    *,
    batch_size: int,
    length: int,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    optim: str = "adamw_torch",
    peft_config: Any = None,
    weight_bits: int | None = None,
    checkpointing: bool = True,
    device: str = "cpu",
    reference: PreTrainedConfig | None = None,
    cached_tokens: int = 0,
    task: str = "CAUSAL_LM",
    trained_tokens: int | None = None,
) -> Estimate:
    """The memory of training on `batch_size` rows of `length` tokens, `trained_tokens` of them if not all.

    `dtype` is that of the weights, `autocast` that of computation if another. `weight_bits` (4 or 8) is the storage of
    a quantised base's linear layers. `reference` is a frozen model beside it. `cached_tokens` are tokens in the
    key-value cache, of all sequences together. A model for another `task` than "CAUSAL_LM" has no logits.
    Raises ValueError for an optimizer whose states are not known, and for rows that the model can't read.
    """
    state_bytes = optimizer_states(optim)
    model = shapes_of(config, dtype, peft_config, task)
    refuse_beyond_positions(model, length, "estimate")
    trained = [p for p in model.parameters() if p.requires_grad]
    return Estimate(
        weights=weight_bytes(model, weight_bits),
        gradients=nbytes(trained),
        optimizer=sum(map(state_bytes, trained)),
        reference=weight_bytes(shapes_of(reference, dtype, None), weight_bits) if reference else 0,
        activations=traced_activations(config, autocast or dtype, peft_config, batch_size, length, checkpointing, task)
        + (cast_bytes(model, autocast) if autocast not in (None, dtype) else 0),
        logits=logit_bytes(config, trained_tokens or batch_size * length, autocast or dtype, device)
        if task == "CAUSAL_LM"
        else 0,
        kv_cache=cached_tokens * kv_bytes(config, autocast or dtype) if cached_tokens else 0,
    )


@dataclass(frozen=True)
class RolloutSizes:
    """What one device writes and trains at a time."""

    rows: int
    """Completions of a block."""
    batch_size: int
    """Completions of a micro-batch."""
    group: int
    """Completions of a prompt."""
    prompt: int
    """Tokens of the longest prompt."""
    completion: int
    """Tokens of the longest completion."""
    shares_prompts: bool = True
    """A micro-batch holds a group's prompt once, as packed ones do."""

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        prompts = math.ceil(self.batch_size / self.group) if self.shares_prompts else self.batch_size
        return prompts * self.prompt + self.batch_size * self.completion


def estimate_rollouts(config: PreTrainedConfig, sizes: RolloutSizes, **options: Any) -> RolloutEstimate:
    """The memory of training on completions that the model writes itself, all of them as long as they may be;
    `options` are those of `estimate`. Raises ValueError for what it does, and for conversations that the model can't
    read."""
    dtype = options.get("dtype", torch.float32)
    model = shapes_of(config, dtype, None)
    refuse_beyond_positions(model, sizes.prompt + sizes.completion, "estimate")
    training = estimate(
        config,
        batch_size=sizes.batch_size,
        length=math.ceil(sizes.tokens / sizes.batch_size),
        trained_tokens=sizes.batch_size * sizes.completion,
        **options,
    )
    most = CPU_MAX_ROWS if options.get("device", "cpu") == "cpu" else DEFAULT_MAX_ROWS
    rows = min(sizes.rows, most)
    prompts = math.ceil(rows / sizes.group)
    read = min(prompts * sizes.prompt, max(PREFILL_TOKENS, sizes.prompt))
    computed = options.get("autocast") or dtype
    generation = replace(
        training,
        gradients=0,
        activations=max(layer_bytes(config, computed, read)),  # at most: without gradients a layer frees as it goes
        logits=2 * rows * padded_size(config.get_text_config().vocab_size) * 4,  # those entering are put beside others
        kv_cache=(prompts * sizes.prompt + rows * sizes.completion) * kv_bytes(config, computed),
    )
    return RolloutEstimate(generation, training)


def shapes_of(config: PreTrainedConfig, dtype: torch.dtype, peft_config: Any, task: str = "CAUSAL_LM") -> nn.Module:
    """The model without contents, with its adapter if it gets one."""
    with torch.device("meta"):
        model = TASKS[task].from_config(config, dtype=dtype)
        return model if peft_config is None else wrap(model, with_task(model, copy.deepcopy(peft_config)))


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def weight_bytes(model: nn.Module, bits: int | None = None) -> int:
    """Bytes of all weights.

    Quantised layers, which are all linear ones that an adapter leaves frozen but the head, also keep scales: 4 bytes
    for 64 weights of 4 bits, or for a row of 8 bits.
    """
    if bits is None:
        return nbytes(model.parameters())
    frozen = [layer.weight for layer in linear_layers(model) if not layer.weight.requires_grad]
    scales = [math.ceil(w.numel() / 64) if bits == 4 else w.shape[0] for w in frozen]
    stored = sum(w.numel() * bits // 8 + 4 * scale for w, scale in zip(frozen, scales, strict=True))
    return stored + nbytes(model.parameters()) - nbytes(frozen)


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """All but the head."""
    inner: Any = base_model(model)
    head = inner.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]


# Optimizers


def copies(count: int) -> StateBytes:
    """`count` states of the parameter's own shape and dtype."""
    return lambda p: count * p.numel() * p.element_size()


def blockwise(count: int) -> StateBytes:
    """`count` states of 8 bits with a scale for 256 of them; parameters below 4096 elements keep theirs in float32."""
    return lambda p: count * (4 * p.numel() if p.numel() < 4096 else p.numel() + 4 * math.ceil(p.numel() / 256))


def factored(p: Tensor) -> int:
    """Adafactor's: for matrices a row and a column, for vectors the whole, in float32 (arXiv:1804.04235)."""
    if p.dim() < 2:
        return 4 * p.numel()
    return 4 * (math.prod(p.shape[:-1]) + math.prod(p.shape[:-2]) * p.shape[-1])


OPTIMIZERS: dict[str, StateBytes] = (
    {name: copies(2) for name in ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision")}
    | {name: blockwise(2) for name in ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")}
    | {name: copies(2) for name in ("paged_adamw_32bit", "paged_adamw")}
    | {name: copies(1) for name in ("lion_32bit", "paged_lion_32bit", "rmsprop", "adagrad")}
    | {name: blockwise(1) for name in ("lion_8bit", "paged_lion_8bit")}
    | {"sgd": copies(0), "adafactor": factored}
)
"""Name as in `TrainingArguments.optim` -> bytes of one parameter's states."""


def optimizer_states(optim: str) -> StateBytes:
    """The row of `OPTIMIZERS` for `optim`. Raises ValueError for one that isn't there."""
    if optim not in OPTIMIZERS:
        raise ValueError(
            f"the states of optim={optim!r} are not known.{suggestion(optim, OPTIMIZERS)} "
            f"Known are {', '.join(OPTIMIZERS)}."
        )
    return OPTIMIZERS[optim]


# Activations


def traced_activations(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    peft_config: Any,
    batch_size: int,
    length: int,
    checkpointing: bool,
    task: str = "CAUSAL_LM",
) -> int:
    """`activation_bytes` of the model computing in `dtype`."""
    traced = traced_dtype(config, dtype)
    model = shapes_of(config, traced, peft_config, task)
    return activation_bytes(model, batch_size, length, checkpointing) * dtype.itemsize // traced.itemsize


def traced_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> torch.dtype:
    """The grouped products of a mixture of experts have shapes in bfloat16 only, from which theirs are scaled."""
    return torch.bfloat16 if hasattr(config.get_text_config(), "output_router_logits") else dtype


def layer_bytes(config: PreTrainedConfig, dtype: torch.dtype, num_tokens: int) -> list[int]:
    """What each layer keeps for the backward pass on so many tokens, computing in `dtype`."""
    traced = traced_dtype(config, dtype)
    kept = kept_by_layer(shapes_of(config, traced, None), 1, num_tokens)
    return [size * dtype.itemsize // traced.itemsize for layer, size in kept.items() if layer is not None] or [0]


def activation_bytes(model: nn.Module, batch_size: int, length: int, checkpointing: bool) -> int:
    """Bytes that one forward pass of the model's body on (batch_size, length) tokens keeps for the backward pass.

    With checkpointing each layer keeps its input, and one layer at a time everything.
    """
    inner: Any = base_model(model)
    kept = kept_by_layer(model, batch_size, length)
    layers = [size for layer, size in kept.items() if layer is not None]
    if not checkpointing or not layers:
        return sum(kept.values())
    hidden_size = inner.config.get_text_config().hidden_size
    inputs = len(layers) * batch_size * length * hidden_size * next(inner.parameters()).element_size()
    return inputs + max(layers) + kept.get(None, 0)


def kept_by_layer(model: nn.Module, batch_size: int, length: int) -> dict[int | None, int]:
    """Layer -> bytes first kept in it, None standing for outside of all layers. Tensors kept twice count once."""
    inner: Any = base_model(model)
    layers = [m for m in inner.modules() if isinstance(m, GradientCheckpointingLayer)]
    seen = {p.untyped_storage()._cdata for p in model.parameters()}
    alive: list[Any] = []  # an address must not be used again
    kept: dict[int | None, int] = {}
    where: list[int | None] = [None]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            alive.append(tensor)
            kept[where[-1]] = kept.get(where[-1], 0) + storage.nbytes()
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with shapes_only_attention(inner), inside(layers, where), saving:
        embedded = inner.get_input_embeddings()(torch.zeros(batch_size, length, dtype=torch.int64, device="meta"))
        mask = shape_of_mask(inner, batch_size, length)
        alive.append(inner.base_model(inputs_embeds=embedded.requires_grad_(), use_cache=False, **mask))
    return kept


def shape_of_mask(model: Any, batch_size: int, length: int) -> dict[str, Tensor]:
    """A ready attention mask of four dimensions, because transformers would look into what it makes one of."""
    if not model._supports_attention_backend and not model._supports_sdpa:
        return {}
    return {"attention_mask": torch.ones(batch_size, 1, length, length, dtype=torch.bool, device="meta")}


@contextmanager
def inside(layers: Sequence[nn.Module], where: list) -> Iterator[None]:
    """While it lasts, the last entry of `where` is the index of the layer that runs."""
    index_of = {id(layer): index for index, layer in enumerate(layers)}

    def enter(layer: nn.Module, _) -> None:
        where.append(index_of[id(layer)])

    def leave(*_) -> None:
        where.pop()

    handles = [layer.register_forward_pre_hook(enter) for layer in layers]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Attention(torch.autograd.Function):
    """Keeps what memory-efficient attention keeps: queries, keys, values, the output, one number a query."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, length, _ = query.shape
        output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)  # as kernels lay it out
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output


def _attend(module, query, key, value, attention_mask, **kwargs):
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


AttentionInterface.register(SHAPES_ONLY, _attend)
AttentionMaskInterface.register(SHAPES_ONLY, lambda *args, **kwargs: None)


@contextmanager
def shapes_only_attention(model: Any) -> Iterator[None]:
    """While it lasts, `model` attends without a mask and without computing anything."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = SHAPES_ONLY
    try:
        yield
    finally:
        config._attn_implementation = before


def cast_bytes(model: nn.Module, autocast: torch.dtype) -> int:
    """Copies of the linear layers' weights in the dtype of computation, which the backward pass reads."""
    return sum(m.weight.numel() for m in linear_layers(model) if m.weight.dtype != autocast) * autocast.itemsize


# Head and cache


def logit_bytes(config: PreTrainedConfig, num_tokens: int, dtype: torch.dtype, device: str) -> int:
    """The head's tiles alive at once, in float32, and their logits if those are narrower."""
    vocab_size = config.get_text_config().vocab_size
    tile, num_kept = tiling(vocab_size, dtype, torch.device(device))
    tokens = min(num_tokens, tile * (num_kept + 1))
    return tokens * vocab_size * (4 + (dtype.itemsize if dtype.itemsize < 4 else 0))


def kv_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token."""
    text = config.get_text_config()
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * num_heads * head_dim * dtype.itemsize


def readable(size: int) -> str:
    """E.g. "1.25 GiB"."""
    unit, power = next((u, p) for u, p in (("GiB", 3), ("MiB", 2), ("KiB", 1), ("B", 0)) if size >= 1024**p or p == 0)
    return f"{size / 1024**power:.4g} {unit}"
