"""Attention over segments by the fused kernels of a GPU: flash_attn where installed, else PyTorch's own.

What a kernel needs to know of a stream is worked out once a batch and kept, so no layer waits for the device. Queries
stay where they are; the keys of a continued segment are gathered behind those of its ancestors, and the kernels align
causality at the last key ("bottom right"), which is what a continued segment needs.

    kernel      dropout  window  soft cap  sinks  types
    flash_attn  yes      yes     yes       no     16 bit
    varlen      no       yes     no        no     16 bit
    flex        no       yes     yes       yes    all

Everything here but the kernels themselves is plain tensor code, and runs on a CPU too.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from strop.models.attention_pieces import Scores, compute_dtype
from strop.models.segments import Segments

Kernel = Literal["flash_attn", "varlen", "flex"]


class Varlen(NamedTuple):
    """A stream as sequences of queries and of keys, sequence i of the one meeting sequence i of the other.

    Example: prompt P P P shared by A A and B

        cu_seq_q  0 3 5 6
        cu_seq_k  0 3 8 12
        gathered  P P P  P P P A A  P P P B    as indices into the stream; None: every key is met once
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    gathered: Tensor | None


# --- which kernel ---------------------------------------------------------------------------------------------------


def kernel_for(query: Tensor, value: Tensor, scores: Scores) -> Kernel | None:
    """The fastest kernel that computes exactly these scores; None where there is none, as on a CPU."""
    if query.device.type != "cuda":
        return None
    half = compute_dtype(query) in (torch.float16, torch.bfloat16) and _has_tensor_cores(query.device)
    sizes = (query.shape[-1], value.shape[-1])
    return choose_kernel(half, sizes, scores, has_flash_attn(), has_varlen())


def choose_kernel(half: bool, sizes: tuple[int, int], scores: Scores, flash_attn: bool, varlen: bool) -> Kernel | None:
    """The decision alone. `half`: 16 bit, on a device with flash kernels; `sizes`: of a query and of a value head."""
    fits = half and scores.sinks is None and sizes[0] == sizes[1] <= 256 and sizes[0] % 8 == 0
    if fits and flash_attn:
        return "flash_attn"
    if fits and varlen and not scores.dropout and scores.softcap is None:
        return "varlen"
    return None if scores.dropout else "flex"


@lru_cache
def _has_tensor_cores(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache
def has_flash_attn() -> bool:
    """flash_attn is installed."""
    return find_spec("flash_attn") is not None


@lru_cache
def has_varlen() -> bool:
    """This PyTorch has varlen attention with windows and grouped heads."""
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return {"window_size", "enable_gqa", "scale"} <= set(inspect.signature(varlen_attn).parameters)


def attend_by_kernel(kernel: Kernel, query, key, value, segments: Segments, scores: Scores) -> Tensor:
    """Each segment attends to its ancestors and causally to itself; (1, N, H, V)."""
    query, key, value = (x.to(compute_dtype(x)) for x in (query, key, value))
    if kernel == "flex":
        return flex(query, key, value, segments, scores)
    return varlen(query, key, value, segments, scores, _flash_attn if kernel == "flash_attn" else _torch_varlen)


# --- kernels over sequences of different lengths --------------------------------------------------------------------


@lru_cache(maxsize=8)
def varlen_layout(segments: Segments, window: int | None, device: torch.device) -> Varlen:
    """The stream as kernels over sequences of different lengths take it; keys no query can see are left out."""
    spans, key_lengths = [], []
    for i, length in enumerate(segments.lengths):
        chain = (*segments.ancestors(i), i)
        keys = torch.cat([torch.arange(segments.span(j).start, segments.span(j).stop) for j in chain])
        keys = keys if window is None else keys[-(length + window - 1) :]
        spans.append(keys)
        key_lengths.append(len(keys))
    with torch.inference_mode(False):  # cached: it may be made in an evaluation and used in training
        return Varlen(
            cu_seq_q=_cumulative(segments.lengths, device),
            cu_seq_k=_cumulative(key_lengths, device),
            max_q=max(segments.lengths),
            max_k=max(key_lengths),
            gathered=None if segments.is_flat else torch.cat(spans).to(device),
        )


def _cumulative(lengths, device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def varlen(query, key, value, segments: Segments, scores: Scores, kernel: Callable[..., Tensor]) -> Tensor:
    """Attention by `kernel(query, key, value, layout, scores)` of (tokens, heads, size), aligned bottom right."""
    layout = varlen_layout(segments, scores.window, query.device)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if layout.gathered is not None:
        key, value = (Gathered.apply(x, layout.gathered) for x in (key, value))
    return kernel(query, key, value, layout, scores)[None]


class Gathered(torch.autograd.Function):
    """`x[index]`, (len(index), ...). Its gradient is summed in float32: a prompt's keys get one from each answer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.length = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        (grad,) = grads
        total = torch.zeros(ctx.length, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, layout: Varlen, scores: Scores) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query,
        key,
        value,
        layout.cu_seq_q,
        layout.cu_seq_k,
        layout.max_q,
        layout.max_k,
        dropout_p=scores.dropout,
        softmax_scale=scores.scaling,
        causal=True,
        window_size=(-1, -1) if scores.window is None else (scores.window - 1, 0),
        softcap=scores.softcap or 0.0,
    )


def _torch_varlen(query: Tensor, key: Tensor, value: Tensor, layout: Varlen, scores: Scores) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    result = varlen_attn(
        query,
        key,
        value,
        layout.cu_seq_q,
        layout.cu_seq_k,
        layout.max_q,
        layout.max_k,
        scale=scores.scaling,
        window_size=(-1 if scores.window is None else scores.window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(result, Tensor)
    return result


# --- flex -----------------------------------------------------------------------------------------------------------


def flex(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Attention by flex_attention with a block mask; (1, N, H, V). Compiled on a GPU; on a CPU it has no gradient."""
    from torch.nn.attention.flex_attention import AuxRequest

    result, aux = _flex_kernel(query.device.type)(
        query,
        key,
        value,
        score_mod=None if scores.softcap is None else _softcapped(scores.softcap),
        block_mask=block_mask(segments, scores.window, query.device),
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if scores.sinks is not None:
        result = result * sink_factor(aux.lse, scores.sinks)[..., None].to(result.dtype)
    return result.transpose(1, 2)


def sink_factor(lse: Tensor, sinks: Tensor) -> Tensor:
    """(1, H, N): the share of the softmax a sink leaves to the keys, exp(lse) / (exp(lse) + exp(sink))."""
    return torch.sigmoid(lse - sinks.float()[:, None])


@lru_cache
def _flex_kernel(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


@lru_cache
def _softcapped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score, batch, head, query, key):
        return torch.tanh(score / softcap) * softcap

    return score_mod


@lru_cache(maxsize=4)
def block_mask(segments: Segments, window: int | None, device: torch.device):
    """The block mask of the stream for flex_attention, every head and layer alike."""
    from torch.nn.attention.flex_attention import create_block_mask

    n = segments.num_tokens
    with torch.inference_mode(False):
        mask_mod = visibility(segments, window, device)
        return create_block_mask(mask_mod, None, None, n, n, device=device, _compile=device.type == "cuda")


def visibility(segments: Segments, window: int | None, device: torch.device) -> Callable[..., Tensor]:
    """The function (batch, head, query, key) -> bool that says which keys of the stream a query sees."""
    count = len(segments.lengths)
    segment_of = torch.arange(count).repeat_interleave(torch.tensor(segments.lengths)).to(device)
    position = segments.position_ids()[0].to(device)
    related = torch.eye(count, dtype=torch.bool)
    for i in range(count):
        related[i, list(segments.ancestors(i))] = True
    related = related.to(device)

    def mask_mod(batch, head, query, key):
        seen = related[segment_of[query], segment_of[key]] & (position[key] <= position[query])
        return seen if window is None else seen & (position[key] > position[query] - window)

    return mask_mod
