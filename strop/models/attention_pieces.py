"""Attention over segments, one call of PyTorch's attention a segment: right on every device, and fast on a CPU.

A dense mask over a stream of N tokens costs N * N whatever it holds. Here each stretch of queries meets only the keys
it can see, so a stream of S equal segments costs 1/S of that, and no mask is built but a small one for continued
segments and windows.

Shapes: query (1, H, N, D), key (1, K, N, D), value (1, K, N, V), the result (1, N, H, V); H is a multiple of K.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.models.segments import Segments

MIN_BLOCK = 256
"""Shortest stretch a segment is cut into for a sliding window: below it, launching costs more than masked scores."""


class Scores(NamedTuple):
    """How an attention layer turns queries and keys into weights."""

    scaling: float | None = None
    """Factor on the products; 1 / sqrt(D) if None."""
    dropout: float = 0.0
    """Probability of dropping a weight."""
    window: int | None = None
    """How many positions of its branch a query sees, its own included; all if None."""
    softcap: float | None = None
    """Scores are squashed into (-softcap, softcap) by tanh."""
    sinks: Tensor | None = None
    """(H,): a logit a head that takes its share of the softmax and gives nothing."""


class Cut(NamedTuple):
    """A stream cut into stretches. Example: prompt P P P shared by A A and B, no window

    lengths  (3, 2, 1)
    seen     ((0,), (0, 1), (0, 2))
    """

    lengths: tuple[int, ...]
    seen: tuple[tuple[int, ...], ...]
    """For each stretch, the stretches whose keys its queries see: the root's first, its own last."""

    def before(self, stretch: int) -> int:
        """How many keys a stretch sees before its own."""
        return sum(self.lengths[j] for j in self.seen[stretch][:-1])


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Queries, keys, values and mask (None: causal) of one stretch to its result (1, H, n, V)."""


@lru_cache(maxsize=16)
def cut(segments: Segments, window: int | None) -> Cut:
    """One stretch a segment; with a window, long segments in several, so that far keys are never multiplied."""
    lengths: list[int] = []
    seen: list[tuple[int, ...]] = []
    branches: list[list[tuple[int, int]]] = []  # for each segment: (stretch, position after its last token), root first
    for segment, parent in enumerate(segments.parents):
        branch = [] if parent < 0 else list(branches[parent])
        position = segments.depths[segment]
        for length in _blocks(segments.lengths[segment], window):
            stretch = len(lengths)
            branch.append((stretch, position + length))
            first_seen = 0 if window is None else position - window + 1
            lengths.append(length)
            seen.append(tuple(j for j, end in branch if end > first_seen))
            position += length
        branches.append(branch)
    return Cut(tuple(lengths), tuple(seen))


def _blocks(length: int, window: int | None) -> list[int]:
    size = length if window is None else max(window, MIN_BLOCK)
    return [min(size, length - start) for start in range(0, length, size)]


def visible(rows: int, before: int, window: int | None, device: torch.device | str = "cpu") -> Tensor:
    """(rows, before + rows) bool: which keys the last `rows` positions of a branch see."""
    query = torch.arange(before, before + rows, device=device)[:, None]
    key = torch.arange(before + rows, device=device)
    causal = key <= query
    return causal if window is None else causal & (key > query - window)


@lru_cache(maxsize=4)
def _additive_mask(segments: Segments, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The one mask whose corners serve every stretch: 0 where a key is seen, -inf elsewhere."""
    plan = cut(segments, window)
    masked = [i for i in range(len(plan.seen)) if _needs_mask(plan, i, window)]
    rows = max(plan.lengths[i] for i in masked)
    before = max(plan.before(i) for i in masked)
    with torch.inference_mode(False):  # cached: it may be made in an evaluation and used in training
        mask = torch.zeros(rows, before + rows, dtype=dtype, device=device)
        return mask.masked_fill_(~visible(rows, before, window, device), float("-inf"))


def _needs_mask(plan: Cut, stretch: int, window: int | None) -> bool:
    return len(plan.seen[stretch]) > 1 or (window is not None and plan.lengths[stretch] > window)


def attend_in_pieces(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Each segment attends to its ancestors and causally to itself; (1, N, H, V)."""
    plan = cut(segments, scores.window)
    if scores.softcap is None and scores.sinks is None:
        attend: Attend = lambda q, k, v, mask: fused_attention(q, k, v, mask, scores)  # noqa: E731
    else:
        attend = lambda q, k, v, mask: plain_attention(q, k, v, mask, scores)  # noqa: E731
    # split, not slices: the gradient of a split is one concatenation, that of slices one full-length sum a slice
    queries, keys, values = (x.split(plan.lengths, dim=2) for x in (query, key, value))
    results = []
    for i, seen in enumerate(plan.seen):
        mask = _mask_of(plan, i, segments, scores.window, query)
        results.append(attend(queries[i], _joined(keys, seen), _joined(values, seen), mask).transpose(1, 2))
    return torch.cat(results, dim=1)


def _joined(stretches: tuple[Tensor, ...], chosen: tuple[int, ...]) -> Tensor:
    return stretches[chosen[0]] if len(chosen) == 1 else torch.cat([stretches[j] for j in chosen], dim=2)


def _mask_of(plan: Cut, stretch: int, segments: Segments, window: int | None, query: Tensor) -> Tensor | None:
    """(n, keys) additive mask of one stretch, a view of the stream's only mask; None where plain causality serves."""
    if not _needs_mask(plan, stretch, window):
        return None
    mask = _additive_mask(segments, window, compute_dtype(query), query.device)
    rows, before = plan.lengths[stretch], plan.before(stretch)
    offset = mask.shape[1] - mask.shape[0] - before
    return mask[:rows, offset : offset + before + rows]


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type attention computes in: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """PyTorch's fused kernel; `mask` None is causal. (1, H, n, V)."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=scores.dropout,
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Attention written out, for scores no fused kernel knows; softmax in float32 or finer. (B, H, n, V).

    `mask`, broadcast to (B, H, n, keys), is additive or boolean (True: seen); None is causal.
    """
    batch, heads, rows, size = query.shape
    groups = key.shape[1]
    scaling = size**-0.5 if scores.scaling is None else scores.scaling
    # all query heads of a key head as one matrix, so that keys and values are never repeated
    logits = query.reshape(batch, groups, -1, size) @ key.transpose(-1, -2) * scaling
    logits = logits.view(batch, heads, rows, -1).to(torch.promote_types(logits.dtype, torch.float32))
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    seen = visible(rows, logits.shape[-1] - rows, None, logits.device) if mask is None else mask
    far = torch.finfo(logits.dtype).min  # finite: a row of padding sees nothing
    logits = logits.masked_fill(~seen, far) if seen.dtype == torch.bool else logits + seen
    weights = _softmax(logits, scores.sinks)
    weights = F.dropout(weights, scores.dropout, training=scores.dropout > 0).to(value.dtype)
    result = weights.view(batch, groups, -1, weights.shape[-1]) @ value
    return result.view(batch, heads, rows, -1)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return logits.softmax(-1)
    column = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
