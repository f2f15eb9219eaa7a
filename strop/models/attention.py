"""Attention over the segments of a packed stream, registered with transformers under the name "strop".

A model set to it (`use_packed_attention`) is served in two ways. When its forward pass was given `segments=...`, each
segment attends to its ancestors and causally to itself, and transformers builds no mask. Without, for instance in
`generate`, it does what the model does by default: PyTorch's fused attention, or plain attention for models whose
score function has no fused kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from strop.models.attention_kernels import attend_by_kernel, kernel_for
from strop.models.attention_pieces import Scores, attend_in_pieces, plain_attention
from strop.models.segments import Segments

NAME = "strop"


class Memory(Protocol):
    """Keys and values from earlier forward passes, which a stream's tokens attend to besides its own."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
        """Attention of one layer, (1, N, H, V); called once a layer, in their order."""


_packed: ContextVar[bool] = ContextVar("packed", default=False)


@contextmanager
def packed_masks() -> Iterator[None]:
    """Inside, models set to "strop" build no attention masks: their forward pass is given segments."""
    token = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(token)


def attention_mask(*args, **kwargs) -> Tensor | None:
    """The mask function of "strop": none for a packed stream, else the boolean mask of fused attention."""
    return None if _packed.get() else sdpa_mask(*args, **kwargs)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segments: Segments | None = None,
    memory: Memory | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention function of "strop"; (B, n, H, V) and no weights, as transformers expects.

    With `memory`, a packed stream also attends to what that remembers.

    Raises ValueError where a packed stream can't be served: segments of another length than the stream, several
    streams, attention that is not causal, or a bias on the scores.
    """
    scores = Scores(scaling, dropout, sliding_window, softcap, s_aux)
    if segments is None:
        return _unpacked(module, query, key, value, attention_mask, scores, **kwargs), None
    _check_packed(module, query, segments, **kwargs)
    if memory is not None:
        return memory.attend(query, key, value, segments, scores), None
    return over_segments(query, key, value, segments, scores), None


@torch.compiler.disable  # a batch's cut is data: tracing it would compile anew for every batch
def over_segments(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Attention of a packed stream to itself, by the fastest means there is; (1, N, H, V)."""
    kernel = kernel_for(query, value, scores)
    if kernel is None:
        return attend_in_pieces(query, key, value, segments, scores)
    return attend_by_kernel(kernel, query, key, value, segments, scores)


def _check_packed(module: nn.Module, query: Tensor, segments: Segments, is_causal=None, position_bias=None, **kwargs):
    name = type(module).__name__
    if query.shape[0] != 1 or query.shape[2] != segments.num_tokens:
        raise ValueError(
            f"{name} got {query.shape[0]} x {query.shape[2]} tokens but segments for 1 x {segments.num_tokens}: "
            "rows would attend to each other. Pass the batch as it was collated; virtual tokens need the padded layout"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal or position_bias is not None:
        what = "a bias on its scores" if causal else "attention that is not causal"
        raise ValueError(
            f"{name} has {what}, which a packed stream doesn't honour. Use the padded layout for this model"
        )


def _unpacked(module, query, key, value, mask: Tensor | None, scores: Scores, **kwargs) -> Tensor:
    if scores.softcap is None and scores.sinks is None:
        kwargs |= {"scaling": scores.scaling, "dropout": scores.dropout}
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
    if mask is None and query.shape[2] > 1:  # a first pass into a static cache: what lies behind is empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    return plain_attention(query, key, value, mask, scores).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, attention_mask)
