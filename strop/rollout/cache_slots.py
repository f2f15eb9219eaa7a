"""Keys and values of rows that are being written, where each call of a kernel costs: one block a layer for all rows.

A row has a slot, in which its prompt and what it wrote stand from the first position on. So a step is one call of
attention a layer, under a mask of what each row has, however many prompts there are and whenever rows entered. The
price: a prompt stands in the slot of each of its rows.

Shapes: n rows, H query heads, K key heads, D of a head, S positions.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.models.attention_pieces import Scores, compute_dtype, plain_attention
from strop.models.segments import Segments
from strop.rollout.cache import read_prompts
from strop.rollout.rows import Prefix, Row

FIRST_TOKENS = 128
"""Positions behind the longest prompt that slots begin with; doubled when full."""


class SlotCache:
    """The memory (`strop.models.attention.Memory`) of all rows being written; like `strop.rollout.cache.Cache`."""

    def __init__(self):
        self.rows: list[Row] = []
        """Running rows in the order of the stream and of their slots."""
        self.keys: list[Tensor] = []
        """(slots, K, S, D) a layer. What lies behind a row's last position is finite and never seen."""
        self.values: list[Tensor] = []
        self._reading: list[Prefix] = []
        self._layer = 0
        self._places: list[int] = []
        self._made: dict[tuple, Tensor] = {}
        """Places and masks of this step."""

    def begin_step(self, prompts: Sequence[Prefix]) -> None:
        """The next forward pass holds a token of each running row, then `prompts`."""
        self._reading, self._layer, self._made = list(prompts), 0, {}
        self._places = [len(row.prefix.token_ids) + len(row.token_ids) - 1 for row in self.rows]
        if self.rows and max(self._places) >= self.keys[0].shape[2]:
            self._reserve(len(self.rows), 2 * max(self._places))

    def end_step(self) -> None:
        """The pass is over."""
        self._reading = []

    def enter(self, rows: Sequence[Row]) -> None:
        """New rows, their prompts read."""
        if not rows:
            return
        start = len(self.rows)
        self.rows += rows
        self._reserve(len(self.rows), max(len(row.prefix.token_ids) for row in rows) + FIRST_TOKENS)
        for prefix, siblings in groupby(rows, lambda row: row.prefix):
            slots = slice(start, start := start + len(list(siblings)))
            for blocks, prompts in ((self.keys, prefix.keys), (self.values, prefix.values)):
                for block, prompt in zip(blocks, prompts, strict=True):
                    block[slots, :, : prompt.shape[1]] = prompt
        for row in rows:
            if not row.prefix.waiting:
                row.prefix.keys, row.prefix.values = [], []

    def leave(self, done: set[Row]) -> None:
        """Drop rows; the last ones move into their slots."""
        kept = [slot for slot, row in enumerate(self.rows) if row not in done]
        count = len(kept)
        if count == len(self.rows):
            return
        free = sorted(set(range(count)) - set(kept))
        moved = [slot for slot in kept if slot >= count]
        for to, slot in zip(free, moved, strict=True):
            self.rows[to] = self.rows[slot]
        del self.rows[count:]
        if not count:
            self.keys, self.values = [], []
        elif moved:
            for block in (*self.keys, *self.values):
                block[free] = block[moved]

    def _reserve(self, slots: int, positions: int) -> None:
        """Room for so many slots, and positions as far as rows may need them."""
        most = max(len(row.prefix.token_ids) + row.max_tokens - 1 for row in self.rows)  # the last one is never read
        if not self.keys:
            own = self.rows[0].prefix
            self.keys, self.values = (
                [x.new_zeros(0, len(x), 0, x.shape[2]) for x in y] for y in (own.keys, own.values)
            )
        held, size = self.keys[0].shape[0], self.keys[0].shape[2]
        if slots <= held and min(positions, most) <= size:
            return
        size = max(size, min(positions, most))
        self.keys, self.values = (
            [_grown(block, max(slots, held), size) for block in x] for x in (self.keys, self.values)
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
        """Attention of one layer over a step's stream, (1, N, H, V); called once a layer, in their order."""
        dtype, running = compute_dtype(query), len(self.rows)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        results = []
        if running:
            new = (x[0, :, :running].transpose(0, 1) for x in (query, key, value))
            results.append(self._attend(*new, scores))
        if self._reading:
            new = (x[:, :, running:] for x in (query, key, value))
            results.append(read_prompts(self._reading, *new, scores))
        self._layer += 1
        return torch.cat(results)[None] if len(results) > 1 else results[0][None]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """(n, H, V) of the rows' new tokens: queries (n, H, D), keys and values (n, K, D)."""
        n, seen = len(query), max(self._places) + 1
        slots, places = self._step_tensor("slots", query), self._step_tensor("places", query)
        both = []
        for blocks, new in ((self.keys, key), (self.values, value)):
            block = blocks[self._layer]
            block[slots, :, places] = new
            both.append(block[:n, :, :seen])
        mask = self._mask(query, seen, scores.window)
        if scores.softcap is not None or scores.sinks is not None:
            return plain_attention(query[:, :, None], *both, mask, scores)[:, :, 0]
        grouped = query.unflatten(1, (key.shape[1], -1))  # the heads of a key head as queries of one
        return F.scaled_dot_product_attention(grouped, *both, attn_mask=mask, scale=scores.scaling).flatten(1, 2)

    def _step_tensor(self, name: str, like: Tensor) -> Tensor:
        key = (name, like.device)
        if key not in self._made:
            self._made[key] = torch.tensor(
                self._places if name == "places" else range(len(self.rows)), device=like.device
            )
        return self._made[key]

    def _mask(self, like: Tensor, seen: int, window: int | None) -> Tensor:
        """(n, 1, 1, seen), additive: each row's positions up to its own, of which the last `window`."""
        key = (window, like.dtype, like.device)
        if key not in self._made:
            at = torch.arange(seen, device=like.device)
            last = self._step_tensor("places", like)[:, None]
            visible = at <= last if window is None else (at <= last) & (at > last - window)
            mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
            self._made[key] = mask.masked_fill_(~visible, float("-inf"))[:, None, None]
        return self._made[key]


def _grown(block: Tensor, slots: int, positions: int) -> Tensor:
    held, heads, size, width = block.shape
    grown = block.new_zeros(slots, heads, positions, width)
    grown[:held, :, :size] = block
    return grown
