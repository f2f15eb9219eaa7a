"""NEFTune: noise on the input embeddings while a model is fine-tuned (arXiv:2310.05914)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.forward import base_model
from strop.models.segments import Segments


@contextmanager
def neftune(model: nn.Module, batch: Mapping[str, Any], alpha: float) -> Iterator[None]:
    """Within it, `model` in training mode adds noise to the input embeddings of `batch`.

    Each number is uniform within alpha / sqrt(L D), where L counts the tokens of the token's own row and D is the
    hidden size: what else is in the batch, or in the same packed stream, changes nothing.

    Raises ValueError for alpha < 0.
    """
    if alpha < 0:
        raise ValueError(f"neftune_noise_alpha={alpha} is no size of noise; use a positive one (paper: 5 to 15)")
    embedding = base_model(model).get_input_embeddings()  # type: ignore[operator]
    lengths = row_lengths(batch)

    def add_noise(module: nn.Module, inputs: tuple, embedded: Tensor) -> Tensor:
        if not module.training:
            return embedded
        bound = alpha / (lengths.to(embedded.device) * embedded.shape[-1]).sqrt()
        noise = torch.rand_like(embedded, dtype=torch.float32).mul_(2).sub_(1).mul_(bound[..., None])
        return embedded + noise.to(embedded.dtype)

    hook = embedding.register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()


def row_lengths(batch: Mapping[str, Any]) -> Tensor:
    """How many tokens each token's row has, float32, of the shape of `input_ids` or broadcasting to it.

    A segment that others continue counts with its longest continuation.
    """
    if "segments" in batch:
        segments = batch["segments"]
        return torch.tensor(_branch_lengths(segments)).repeat_interleave(torch.tensor(segments.lengths))[None].float()
    return batch["attention_mask"].sum(-1, keepdim=True).float()


def _branch_lengths(segments: Segments) -> list[int]:
    """Tokens of the longest branch through each segment, from its root to its end."""
    ends = [depth + length for depth, length in zip(segments.depths, segments.lengths, strict=True)]
    for segment in reversed(range(len(ends))):
        parent = segments.parents[segment]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[segment])
    return ends
