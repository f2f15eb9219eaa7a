"""Keys and values of rows that are being written, on a CPU: each prompt once, nothing padded.

A step's stream is one token of each running row, then the prompts of new rows. Rows that enter together are a cohort;
their own tokens stand in one block a layer, of one length for all, so no mask is needed. What their queries see:

    prompt   keys of the prompt, kept once, met by the queries of all its rows as one product
    own      the cohort's block

Both parts are softmaxes of their own, joined by the weights their normalisers give them (arXiv:2402.05099, section 3).
Rows that share their prompt with no other have it in their block, aligned at its end; a small mask hides what lies
before.

Shapes: n rows of a cohort, H query heads, K key heads, G = H / K, D of a head, P tokens of a prompt, S of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.models.attention import over_segments
from strop.models.attention_pieces import Scores, compute_dtype, plain_attention
from strop.models.segments import Segments
from strop.rollout.rows import Prefix, Row

FIRST_TOKENS = 32
"""Tokens a row that a block begins with; doubled when full."""


PADDING = (1.25, 16)
"""Lone prompts stand in one block up to this multiple of the shortest one's tokens, and so many more."""


class Part(NamedTuple):
    """The rows of one cohort that continue the same prompt."""

    prefix: Prefix
    slots: Tensor | slice


class Cohort:
    """Rows that entered at the same step, in the order of their slots, and the keys and values of what they wrote.

    With `lone`, keys and values of their prompts too, which are taken from the prefixes.
    """

    def __init__(self, rows: Sequence[Row], lone: bool):
        self.rows = list(rows)
        self.num_tokens = 0
        self.most_tokens = max(row.max_tokens for row in rows) - 1  # the last one is never read
        self.offset = max(len(row.prefix.token_ids) for row in rows) if lone else 0
        self.keys: list[Tensor] = []
        """(slots, K, capacity, D) a layer; the first own token stands at `offset`."""
        self.values: list[Tensor] = []
        self.mask: Tensor | None = None
        """(slots, 1, 1, tokens), additive; None: everything is seen."""
        if lone:
            self._take_prompts()
        self._arrange()

    def _take_prompts(self) -> None:
        prefixes = [row.prefix for row in self.rows]
        for blocks, name in ((self.keys, "keys"), (self.values, "values")):
            for of_rows in zip(*(getattr(prefix, name) for prefix in prefixes), strict=True):
                block = self._block(torch.stack([x[:, -1] for x in of_rows]))
                for slot, prompt in enumerate(of_rows):
                    block[slot, :, : self.offset - prompt.shape[1]] = 0  # hidden, but finite
                    block[slot, :, self.offset - prompt.shape[1] : self.offset] = prompt
                blocks.append(block)
        self.mask = self.keys[0].new_zeros(len(prefixes), 1, 1, self.offset + self.most_tokens)
        for slot, prefix in enumerate(prefixes):
            self.mask[slot, ..., : self.offset - len(prefix.token_ids)] = float("-inf")
            prefix.keys, prefix.values = [], []

    def remove(self, slot: int) -> None:
        """Take out a row; the last one moves into its slot."""
        last, end = len(self.rows) - 1, self.offset + self.num_tokens
        if slot != last:
            for block in (*self.keys, *self.values):
                block[slot, :, :end] = block[last, :, :end]
            if self.mask is not None:
                self.mask[slot] = self.mask[last]
        self.rows[slot] = self.rows[last]
        self.rows.pop()
        self._arrange()

    def _arrange(self) -> None:
        """Which slots continue which prompt, and where each slot's result stands among the parts' results."""
        slots: dict[Prefix, list[int]] = {}
        for slot, row in enumerate(self.rows):
            slots.setdefault(row.prefix, []).append(slot)
        order = [slot for part in slots.values() for slot in part]
        contiguous = order == sorted(order)
        self.parts = [
            Part(prefix, slice(part[0], part[-1] + 1) if contiguous else torch.tensor(part))
            for prefix, part in slots.items()
        ]
        self.places = None if contiguous else torch.tensor(order).argsort()

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append (n, K, D) a row; its tokens so far with the new one, (n, K, S, D)."""
        if layer == len(self.keys):
            self.keys.append(self._block(key))
            self.values.append(self._block(value))
        n, place = len(self.rows), self.offset + self.num_tokens
        both = []
        for blocks, new in ((self.keys, key), (self.values, value)):
            if place == blocks[layer].shape[2]:
                blocks[layer] = self._grown(blocks[layer])
            blocks[layer][:n, :, place] = new
            both.append(blocks[layer][:n, :, : place + 1])
        return both[0], both[1]

    def _block(self, new: Tensor) -> Tensor:
        n, heads, size = new.shape
        return new.new_empty(n, heads, self.offset + min(FIRST_TOKENS, self.most_tokens), size)

    def _grown(self, block: Tensor) -> Tensor:
        n, (_, heads, tokens, size) = len(self.rows), block.shape
        own = min(2 * (tokens - self.offset), self.most_tokens)
        grown = block.new_empty(n, heads, self.offset + own, size)
        grown[:, :, :tokens] = block[:n]
        return grown


class Cache:
    """The memory (`strop.models.attention.Memory`) of all rows being written."""

    def __init__(self):
        self.cohorts: list[Cohort] = []
        self._reading: list[Prefix] = []
        self._layer = 0
        self._joins = True
        """Every layer so far can be attended to in parts."""

    @property
    def rows(self) -> list[Row]:
        """Running rows in the order of the stream."""
        return [row for cohort in self.cohorts for row in cohort.rows]

    def begin_step(self, prompts: Sequence[Prefix]) -> None:
        """The next forward pass holds a token of each running row, then `prompts`."""
        self._reading, self._layer = list(prompts), 0

    def end_step(self) -> None:
        """The pass is over: what it computed belongs to the rows."""
        self._reading = []
        for cohort in self.cohorts:
            cohort.num_tokens += 1

    def enter(self, rows: Sequence[Row]) -> None:
        """New rows, their prompts read."""
        lone = [row for row in rows if row.prefix.num_rows == 1] if self._joins else []
        others = [row for row in rows if not (self._joins and row.prefix.num_rows == 1)]
        if others:
            self.cohorts.append(Cohort(others, lone=False))
        self.cohorts += [Cohort(part, lone=True) for part in _of_similar_length(lone)]

    def leave(self, done: set[Row]) -> None:
        """Drop rows."""
        for cohort in self.cohorts:
            for slot in reversed(range(len(cohort.rows))):
                if cohort.rows[slot] in done:
                    cohort.remove(slot)
        self.cohorts = [cohort for cohort in self.cohorts if cohort.rows]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
        """Attention of one layer over a step's stream, (1, N, H, V); called once a layer, in their order."""
        dtype, layer = compute_dtype(query), self._layer
        self._layer += 1
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        results, start = [], 0
        for cohort in self.cohorts:
            span = slice(start, start := start + len(cohort.rows))
            new = (x[0, :, span].transpose(0, 1) for x in (key, value))
            results.append(
                _attend(query[0, :, span].transpose(0, 1), cohort, layer, *cohort.write(layer, *new), scores)
            )
        if self._reading:
            results.append(self._read(query[:, :, start:], key[:, :, start:], value[:, :, start:], scores))
        return torch.cat(results)[None] if len(results) > 1 else results[0][None]

    def _read(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        self._joins &= _is_joined(query, value, scores)
        return read_prompts(self._reading, query, key, value, scores)


def read_prompts(prefixes: Sequence[Prefix], query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """(N, H, V): attention of one layer in prompts that stand one after the other, which keep their keys and values."""
    lengths = [len(prefix.token_ids) for prefix in prefixes]
    for prefix, k, v in zip(prefixes, key[0].split(lengths, 1), value[0].split(lengths, 1), strict=True):
        prefix.keys.append(k.clone(memory_format=torch.contiguous_format))
        prefix.values.append(v.clone(memory_format=torch.contiguous_format))
    return over_segments(query, key, value, Segments(tuple(lengths), (-1,) * len(lengths)), scores)[0]


def _of_similar_length(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by the length of their prompts, cut where it has grown too much."""
    parts: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.prefix.token_ids)):
        shortest = len(parts[-1][0].prefix.token_ids) if parts else 0
        if parts and len(row.prefix.token_ids) <= PADDING[0] * shortest + PADDING[1]:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


# ---- attention of a cohort's new tokens ----


def _attend(query: Tensor, cohort: Cohort, layer: int, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
    """(n, H, V) of queries (n, H, D); `keys`, `values` (n, K, S, D) are the cohort's own."""
    if cohort.mask is not None:
        mask = cohort.mask[: len(query), ..., : keys.shape[2]]
        return _flash(query.unflatten(1, (keys.shape[1], -1)), keys, values, scores, mask)[0].flatten(1, 2)
    longest = max(len(part.prefix.token_ids) for part in cohort.parts) + keys.shape[2]
    if not _is_joined(query, values, scores._replace(window=None)) or longest > (scores.window or longest):
        return _attend_row_by_row(query, cohort, layer, keys, values, scores)
    grouped = query.unflatten(1, (keys.shape[1], -1))
    own, own_normaliser = _flash(grouped, keys, values, scores)
    results, normalisers = [], []
    for part in cohort.parts:
        chosen = grouped[part.slots].transpose(0, 1)  # (K, rows, G, D)
        prompt = (x[layer][None] for x in (part.prefix.keys, part.prefix.values))
        result, normaliser = _flash(chosen.flatten(1, 2)[None], *prompt, scores)
        results.append(result.view(chosen.shape).transpose(0, 1))
        normalisers.append(normaliser.view(chosen.shape[:3]).transpose(0, 1))
    result, normaliser = torch.cat(results), torch.cat(normalisers)
    if cohort.places is not None:
        result, normaliser = result[cohort.places], normaliser[cohort.places]
    share = torch.sigmoid(normaliser - own_normaliser.view(normaliser.shape))[..., None]
    return torch.lerp(own, result, share.to(own.dtype)).flatten(1, 2)


def _is_joined(query: Tensor, value: Tensor, scores: Scores) -> bool:
    """A kernel computes these scores and says what its softmax divided by, so that parts can be joined."""
    plain = scores.softcap is None and scores.sinks is None and scores.window is None
    return plain and query.shape[-1] == value.shape[-1]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention to everything the mask leaves, and the logarithms (B, heads, queries) of its normalisers."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, attn_mask=mask, scale=scores.scaling)


def _attend_row_by_row(
    query: Tensor, cohort: Cohort, layer: int, keys: Tensor, values: Tensor, scores: Scores
) -> Tensor:
    """Like `_attend` for any scores: each part's keys joined, those out of the window left out."""
    result = values.new_empty(*query.shape[:2], values.shape[-1])
    for prefix, slots in cohort.parts:
        length = len(prefix.token_ids)
        first = 0 if scores.window is None else max(length + keys.shape[2] - scores.window, 0)
        joined = []
        for before, own in ((prefix.keys, keys[slots]), (prefix.values, values[slots])):
            before = before[layer][None, :, first:].expand(len(own), -1, -1, -1)
            joined.append(torch.cat([before, own[:, :, max(first - length, 0) :]], dim=2))
        result[slots] = _attend_one(query[slots][:, :, None], *joined, scores)[:, :, 0]
    return result


def _attend_one(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """(n, H, 1, V): the last token of n rows sees all keys it is given."""
    if scores.softcap is not None or scores.sinks is not None:
        return plain_attention(query, key, value, None, scores)
    enable_gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, scale=scores.scaling, enable_gqa=enable_gqa)
