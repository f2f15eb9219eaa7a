"""Keys and values of rows that are being written: each prompt once, nothing padded.

A step's stream is one token of each running row, then the prompts of new rows. Rows that enter together are a cohort;
their own tokens stand in one block a layer, of one length for all, so no mask is needed. What their queries see:

    prompt   keys of the prompt, kept once, met by the queries of all its rows as one product
    own      the cohort's block

Both parts are softmaxes of their own, joined by the weights their normalisers give them (arXiv:2402.05099, section 3).

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


class Part(NamedTuple):
    """The rows of one cohort that continue the same prompt."""

    prefix: Prefix
    slots: Tensor | slice


class Cohort:
    """Rows that entered at the same step, in the order of their slots, and the keys and values of what they wrote."""

    def __init__(self, rows: Sequence[Row], most_tokens: int):
        self.rows = list(rows)
        self.num_tokens = 0
        self.most_tokens = most_tokens
        self.keys: list[Tensor] = []
        """(slots, K, capacity, D) a layer."""
        self.values: list[Tensor] = []
        self._arrange()

    def remove(self, slot: int) -> None:
        """Take out a row; the last one moves into its slot."""
        last = len(self.rows) - 1
        if slot != last:
            for block in (*self.keys, *self.values):
                block[slot, :, : self.num_tokens] = block[last, :, : self.num_tokens]
        self.rows[slot] = self.rows[last]
        self.rows.pop()
        self._arrange()

    def _arrange(self) -> None:
        """Which slots continue which prompt, and where each slot's result stands among the parts' results."""
        slots: dict[int, list[int]] = {}
        for slot, row in enumerate(self.rows):
            slots.setdefault(id(row.prefix), []).append(slot)
        order = [slot for part in slots.values() for slot in part]
        contiguous = order == sorted(order)
        self.parts = [
            Part(
                self.rows[part[0]].prefix,
                slice(part[0], part[-1] + 1) if contiguous else torch.tensor(part),
            )
            for part in slots.values()
        ]
        self.places = None if contiguous else torch.tensor(order).argsort()

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append (n, K, D) a row; its tokens so far with the new one, (n, K, S, D)."""
        if layer == len(self.keys):
            self.keys.append(self._block(key))
            self.values.append(self._block(value))
        n, place = len(self.rows), self.num_tokens
        both = []
        for blocks, new in ((self.keys, key), (self.values, value)):
            if place == blocks[layer].shape[2]:
                blocks[layer] = self._grown(blocks[layer])
            blocks[layer][:n, :, place] = new
            both.append(blocks[layer][:n, :, : place + 1])
        return both[0], both[1]

    def _block(self, new: Tensor) -> Tensor:
        n, heads, size = new.shape
        return new.new_empty(n, heads, min(FIRST_TOKENS, self.most_tokens), size)

    def _grown(self, block: Tensor) -> Tensor:
        _, heads, tokens, size = block.shape
        grown = block.new_empty(len(self.rows), heads, min(2 * tokens, self.most_tokens), size)
        grown[:, :, :tokens] = block[: len(self.rows)]
        return grown


class Cache:
    """The memory (`strop.models.attention.Memory`) of all rows being written."""

    def __init__(self):
        self.cohorts: list[Cohort] = []
        self._reading: list[Prefix] = []
        self._layer = 0

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

    def enter(self, rows: Sequence[Row], most_tokens: int) -> None:
        """New rows, their prompts read; each writes at most `most_tokens`."""
        self.cohorts.append(Cohort(rows, most_tokens))

    def leave(self, done: set[int]) -> None:
        """Drop the rows at these places of the stream."""
        start = sum(len(cohort.rows) for cohort in self.cohorts)
        for cohort in reversed(self.cohorts):
            start -= len(cohort.rows)
            for slot in sorted((i - start for i in done if start <= i < start + len(cohort.rows)), reverse=True):
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
        lengths = [len(prefix.token_ids) for prefix in self._reading]
        parts = zip(self._reading, key[0].split(lengths, 1), value[0].split(lengths, 1), strict=True)
        for prefix, k, v in parts:
            prefix.keys.append(k.clone(memory_format=torch.contiguous_format))
            prefix.values.append(v.clone(memory_format=torch.contiguous_format))
        return over_segments(query, key, value, Segments(tuple(lengths), (-1,) * len(lengths)), scores)[0]


# ---- attention of a cohort's new tokens ----


def _attend(query: Tensor, cohort: Cohort, layer: int, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
    """(n, H, V) of queries (n, H, D); `keys`, `values` (n, K, S, D) are the cohort's own."""
    longest = max(len(part.prefix.token_ids) for part in cohort.parts) + keys.shape[2]
    windowed = scores.window is not None and scores.window < longest
    if windowed or scores.softcap is not None or scores.sinks is not None or not _has_normalisers(query, values):
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


def _has_normalisers(query: Tensor, values: Tensor) -> bool:
    """A kernel says of these what its softmax divided by."""
    return query.device.type == "cpu" and query.shape[-1] == values.shape[-1]


def _flash(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention without a mask, and the logarithms (B, heads, queries) of its normalisers."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scores.scaling)


def _attend_row_by_row(
    query: Tensor, cohort: Cohort, layer: int, keys: Tensor, values: Tensor, scores: Scores
) -> Tensor:
    """Like `_attend` for any scores and device: each part's keys joined, those out of the window left out."""
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
