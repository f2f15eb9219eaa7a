"""Tokens drawn from logits, exactly and cheaply, with the log-probabilities of the policy and of the draw.

One uniform number a token, and the inverse of the cumulative distribution: no noise over the vocabulary and no sort of
it. The number is a hash of the sampling's seed, the row and the position, so a text depends neither on what it is
generated with nor on the process that does it.

Shapes: R rows, vocabulary V. Logits become e = exp(z - max z) in place. The distribution is looked at in chunks of the
vocabulary: first the chunk is drawn by the chunks' sums, then the token in it; top-k and top-p meet only the chunks
that can hold a candidate.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.rollout.types import Sampling

CHUNK = 1024
"""Tokens a chunk of the vocabulary; a matrix product with so much of a head stays in a core's cache."""
FINE_CHUNK = 128
"""... when candidates are looked for."""
FIRST_CANDIDATES = 64
"""Likeliest tokens looked at for top-p; eight times as many for the rows where they hold too little."""
CACHE_BYTES = 2**20
"""What a core keeps near while it goes over some rows several times."""

_MASK = 2**64 - 1


class Draw(NamedTuple):
    """One token a row, (R,) each."""

    token_ids: Tensor
    logps: Tensor
    """Of the policy at the sampling temperature, over the whole vocabulary; float32."""
    sampled_logps: Tensor
    """Of the distribution drawn from: after penalty and filters; float32. 0 at temperature 0."""


def uniforms(seed: int, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
    """(R,) float64 in (0, 1), each a hash of the seed, a row's number and a position in its completion."""
    start = _mix(seed & _MASK)
    hashes = (_mix(_mix(start ^ (row & _MASK)) ^ position) for row, position in zip(rows, positions, strict=True))
    return torch.tensor([((h >> 11) + 0.5) * 2.0**-53 for h in hashes], dtype=torch.float64)


def _mix(x: int) -> int:
    """One step of splitmix64 (doi:10.1145/2660193.2660195): a bijection that leaves no bit's neighbours alike."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def padded_size(vocab_size: int) -> int:
    """The vocabulary rounded up to whole chunks; what lies behind its end is -inf."""
    return -(-vocab_size // CHUNK) * CHUNK


def draw_(logits: Tensor, at: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Draw:
    """One token a row from `logits` (R, V), already divided by the temperature; their memory is used up.

    `at` (R,) in (0, 1) says where in the cumulative distribution. `seen` (R, L): ids that the repetition penalty is
    for, in any order, repeated or not; needed where there is a penalty.
    """
    vocab_size = logits.shape[-1]
    if vocab_size % CHUNK:
        logits = F.pad(logits, (0, padded_size(vocab_size) - vocab_size), value=float("-inf"))
    if sampling.repetition_penalty == 1:
        plain = None
    else:
        assert seen is not None
        plain = logits.clone()
        _penalise_(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        token_ids = _first_largest(logits)
        logps = _logps(logits if plain is None else plain, token_ids)
        return Draw(token_ids, logps, torch.zeros_like(logps))
    sums = _exponentiate_(logits)
    token_ids, sampled_logps = _draw_filtered_(logits, sums, at.to(logits.device), sampling)
    if plain is not None:
        return Draw(token_ids, _logps(plain, token_ids), sampled_logps.float())
    if not sampling.is_filtered:
        return Draw(token_ids, sampled_logps.float(), sampled_logps.float())
    drawn = logits.gather(-1, token_ids[:, None]).squeeze(-1)
    logps = drawn.double().log() - sums.sum(-1, dtype=torch.float64).log()
    return Draw(token_ids, logps.float(), sampled_logps.float())


def _penalise_(logits: Tensor, seen: Tensor, penalty: float) -> None:
    scores = logits.gather(-1, seen)
    logits.scatter_(-1, seen, torch.where(scores < 0, scores * penalty, scores / penalty))


def _blocks(z: Tensor) -> tuple[Tensor, ...]:
    """Rows in the number that a core keeps near; all on accelerators."""
    if z.device.type != "cpu":
        return (z,)
    return z.split(max(CACHE_BYTES // (z.shape[-1] * z.element_size()), 1))


def _exponentiate_(z: Tensor) -> Tensor:
    """Turn z into e in place; (R, V / CHUNK): the chunks' sums."""
    sums = []
    for block in _blocks(z):
        block.sub_(block.amax(-1, keepdim=True)).exp_()
        sums.append(block.unflatten(-1, (-1, CHUNK)).sum(-1))
    return torch.cat(sums)


def _logps(z: Tensor, token_ids: Tensor) -> Tensor:
    """(R,) float32: log-probability of each row's token."""
    totals = torch.cat([block.logsumexp(-1) for block in _blocks(z)])
    return (z.gather(-1, token_ids[:, None]).squeeze(-1) - totals).float()


def _first_largest(z: Tensor) -> Tensor:
    """(R,): the likeliest token, among equals the first. Over chunks, because `argmax` is slow on a CPU."""
    chunks = z.unflatten(-1, (-1, CHUNK))
    chunk = chunks.amax(-1).argmax(-1)
    return chunk * CHUNK + chunks[torch.arange(len(z), device=z.device), chunk].argmax(-1)


# ---- e to tokens ----


def _draw_filtered_(e: Tensor, sums: Tensor, at: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Each row's token and the log-probability it was drawn with, (R,), float64."""
    if sampling.top_k:
        return _draw_likeliest(e, None, at, sampling, min(sampling.top_k, e.shape[-1]))
    if sampling.top_p < 1:
        return _draw_likeliest(e, sums.sum(-1, dtype=torch.float64), at, sampling, FIRST_CANDIDATES)
    if sampling.min_p:
        kept = [torch.where(block >= sampling.min_p, block, 0) for block in _blocks(e)]  # max e = 1
        e = torch.cat(kept)
        sums = e.unflatten(-1, (-1, CHUNK)).sum(-1)
    chunk, rest = _invert(sums, at * sums.sum(-1, dtype=torch.float64))
    inside = e.unflatten(-1, (-1, CHUNK))[torch.arange(len(e), device=e.device), chunk]
    token, _ = _invert(inside, rest)
    drawn = inside.gather(-1, token[:, None]).squeeze(-1)
    return chunk * CHUNK + token, drawn.double().log() - sums.sum(-1, dtype=torch.float64).log()


def _draw_likeliest(
    e: Tensor, total: Tensor | None, at: Tensor, sampling: Sampling, candidates: int
) -> tuple[Tensor, Tensor]:
    """Draws among the likeliest tokens, the likeliest first. `total` (R,) is what top-p is a share of; None: of the
    candidates, which are then all that top-k leaves. Rows whose candidates hold too little get more of them.
    """
    values, ids = _largest(e, candidates)
    cumulative = values.cumsum(-1, dtype=torch.float64)
    needed = sampling.top_p * (cumulative[:, -1] if total is None else total)
    if sampling.top_p < 1:
        values = torch.where(cumulative - values < needed[:, None], values, 0)
    if sampling.min_p:
        values = torch.where(values >= sampling.min_p, values, 0)
    kept = values.sum(-1, dtype=torch.float64)
    index, _ = _invert(values, at * kept)
    token_ids = ids.gather(-1, index[:, None]).squeeze(-1)
    logps = values.gather(-1, index[:, None]).squeeze(-1).double().log() - kept.log()
    if total is not None and candidates < e.shape[-1]:
        short = (cumulative[:, -1] < needed).nonzero().flatten()
        if len(short):
            more = min(8 * candidates, e.shape[-1])
            token_ids[short], logps[short] = _draw_likeliest(e[short], total[short], at[short], sampling, more)
    return token_ids, logps


def _largest(e: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their places, (R, k), the largest first.

    They lie in the k chunks with the largest maxima, so the rest of the vocabulary needs no selection.
    """
    if k * FINE_CHUNK * 2 > e.shape[-1] or e.device.type != "cpu":
        return e.topk(k)
    chunks = e.unflatten(-1, (-1, FINE_CHUNK))
    chosen = chunks.amax(-1).topk(k).indices.sort(-1).values
    candidates = chunks.gather(1, chosen[..., None].expand(-1, -1, FINE_CHUNK)).flatten(1)
    values, places = candidates.topk(k)
    return values, chosen.gather(-1, places // FINE_CHUNK) * FINE_CHUNK + places % FINE_CHUNK


def _invert(weights: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative sum of `weights` (R, n) first exceeds `at` (R,), and what is left of `at` there.

    Never a place of weight 0, whatever is rounded.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    at = torch.minimum(at, torch.nextafter(cumulative[:, -1], torch.zeros_like(at)))
    index = torch.searchsorted(cumulative, at[:, None], right=True).clamp(max=weights.shape[-1] - 1)  # NaN
    before = torch.where(index > 0, cumulative.gather(-1, (index - 1).clamp(min=0)), 0)
    return index.squeeze(-1), at - before.squeeze(-1)
