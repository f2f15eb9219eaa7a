"""Continuous batching on a model that takes packed streams: one round of generation.

A step is one forward pass over a token of each running row and the prompts of rows that enter. Rows leave when they
end; waiting ones enter: first those of prompts that are begun, of them those expected to write most. The head sees the
last position of each row only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from strop.models.forward import base_model, forward, stand_in
from strop.models.head import is_plain_linear
from strop.models.logps import PROBE, logit_transform, output_embedding, verify_transform
from strop.models.segments import Segments
from strop.rollout.cache import Cache
from strop.rollout.cache_slots import SlotCache
from strop.rollout.rows import Prefix, Row, Stopping, seen_ids
from strop.rollout.sampling import CHUNK, Draw, draw_, padded_size, uniforms
from strop.rollout.types import Sampling

PREFILL_TOKENS = 4096
"""Tokens of new prompts a step; one prompt at least."""
ENTRANCE = 8
"""Rows enter when an eighth of the places is free: those that enter together are served together."""


class Stream:
    """Writes `rows` to their ends, `max_rows` at a time."""

    def __init__(self, model: nn.Module, rows: Sequence[Row], sampling: Sampling, stopping: Stopping, max_rows: int):
        self.sampling, self.stopping, self.max_rows = sampling, stopping, max_rows
        self.waiting = list(rows)
        self.device = base_model(model).get_input_embeddings().weight.device  # type: ignore[operator, union-attr]
        self.cache = cache_on(self.device)
        self.head = Head(model, sampling.temperature or 1.0)

    def run(self, lockstep: bool = False) -> None:
        """Write all rows. `lockstep`: all ranks make the same number of forward passes, as sharded weights need."""
        while self._goes_on(lockstep):
            self._step(self._entering(), idle=lockstep)

    def _goes_on(self, lockstep: bool) -> bool:
        left = bool(self.waiting or self.cache.rows)
        if not lockstep:
            return left
        flag = torch.tensor(int(left), device=self.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)

    def _entering(self) -> list[Row]:
        """Rows that enter now. Prompts that are begun come first: there are never more of them than places and one, so
        neither are keys and values."""
        free = self.max_rows - len(self.cache.rows)
        if not self.waiting or free < min(len(self.waiting), max(self.max_rows // ENTRANCE, 1)):
            return []
        self.waiting.sort(key=lambda row: (not row.prefix.is_begun, -row.expected, row.index))
        count, unread = 0, dict[Prefix, int]()
        for row in self.waiting[:free]:
            if row.prefix.logits is None:
                unread[row.prefix] = len(row.prefix.token_ids)
            if len(unread) > 1 and sum(unread.values()) > PREFILL_TOKENS:
                break
            count += 1
        entering, self.waiting = self.waiting[:count], self.waiting[count:]
        return entering

    def _step(self, entering: Sequence[Row], idle: bool) -> None:
        """One token for each running and entering row. With `idle` there is a forward pass even if nothing runs."""
        running = self.cache.rows
        prompts = list(dict.fromkeys(row.prefix for row in entering if row.prefix.logits is None))
        logits = self._logits(running, prompts, idle)
        if entering:
            logits = self._with_entering(logits, len(running), prompts, entering)
        rows = [*running, *entering]
        if not rows:
            return
        draw = self._draw(logits, rows)
        done = self.stopping.extend(rows, draw)
        self.cache.leave(done)
        self.cache.enter([row for row in entering if row not in done])

    def _logits(self, running: Sequence[Row], prompts: Sequence[Prefix], idle: bool) -> Tensor:
        """(running + prompts, V): logits after each running row's last token and each prompt's."""
        reading = [Prefix((0,))] if idle and not running and not prompts else prompts
        if not running and not reading:
            return torch.empty(0)
        ids = [row.token_ids[-1] for row in running]
        positions = [len(row.prefix.token_ids) + len(row.token_ids) - 1 for row in running]
        last = list(range(len(running)))
        for prefix in reading:
            ids += prefix.token_ids
            positions += range(len(prefix.token_ids))
            last.append(len(ids) - 1)
        lengths = (*(1 for _ in running), *(len(prefix.token_ids) for prefix in reading))
        self.cache.begin_step(reading)
        batch = {
            "input_ids": torch.tensor([ids], device=self.device),
            "position_ids": torch.tensor([positions], device=self.device),
            "segments": Segments(lengths, (-1,) * len(lengths)),
            "model_kwargs": {"memory": self.cache},
        }
        logits = self.head.logits(batch, last if reading else None)
        self.cache.end_step()
        return logits

    def _with_entering(
        self, logits: Tensor, num_running: int, prompts: Sequence[Prefix], entering: Sequence[Row]
    ) -> Tensor:
        """(rows, V): logits of running rows, then of those that enter, each with its prompt's."""
        found = dict(zip(prompts, logits[num_running:], strict=False))
        for row in entering:
            row.prefix.waiting -= 1
        own = [found.get(row.prefix, row.prefix.logits) for row in entering]
        result = torch.stack([*logits[:num_running], *own])  # type: ignore[list-item]
        for prefix in {row.prefix for row in entering}:
            if not prefix.waiting:
                prefix.logits = None
            elif prefix.logits is None:
                prefix.logits = found[prefix].clone()
        return result

    def _draw(self, logits: Tensor, rows: Sequence[Row]) -> Draw:
        at = uniforms(self.sampling.seed, [row.number for row in rows], [len(row.token_ids) for row in rows])
        seen = None if self.sampling.repetition_penalty == 1 else seen_ids(rows, logits.device)
        return draw_(logits, at, self.sampling, seen)


def cache_on(device: torch.device) -> Cache | SlotCache:
    """Many small products on a CPU, few large ones elsewhere."""
    return Cache() if device.type == "cpu" else SlotCache()


class Head:
    """Logits at some positions of a stream, divided by a temperature, in one buffer that is used again."""

    def __init__(self, model: nn.Module, temperature: float):
        self.model, self.base = model, base_model(model)
        self.module = output_embedding(self.base)
        self.call = self.module.forward
        self.transform = logit_transform(self.base, temperature)
        self.buffer = torch.empty(0, 0)
        self.wanted: Tensor | None = None
        self.results: list[Tensor] = []

    def logits(self, batch: dict, wanted: list[int] | None) -> Tensor:
        """(wanted, V) of one forward pass, V rounded up to whole chunks by -inf; None: of all positions.

        Raises ValueError if the model doesn't call its head once.
        """
        self.results.clear()
        self.wanted = None if wanted is None else torch.tensor(wanted)
        with stand_in(self.module, self._stand_in):
            output = forward(self.model, batch)
        if len(self.results) != 1:
            raise ValueError(
                f"{type(self.base).__name__} called its output embedding {len(self.results)} times in one forward "
                "pass, so it can't be told which logits are the next token's"
            )
        verify_transform(self.base, output.logits)
        return self.results[0]

    def _stand_in(self, hidden: Tensor) -> Tensor:
        states = hidden[0] if self.wanted is None else hidden[0].index_select(0, self.wanted.to(hidden.device))
        weight = self.module.weight
        autocast = torch.is_autocast_enabled(hidden.device.type)
        direct = is_plain_linear(self.module) and weight.dtype == states.dtype and not autocast
        if direct and weight.dtype in (torch.float32, torch.float64):
            logits = self._products(states)
        else:
            raw = self.call(states)
            logits = self._buffer(len(states), raw.shape[-1], torch.promote_types(raw.dtype, torch.float32), raw.device)
            logits[:, : raw.shape[-1]] = raw
        self.results.append(self.transform.apply_(logits))
        return hidden.new_full((*hidden.shape[:-1], 1), PROBE)

    def _products(self, states: Tensor) -> Tensor:
        """A part of the vocabulary at a time: a fifth faster for 32 rows on a CPU, where such a part stays near."""
        assert isinstance(self.module, nn.Linear)
        weight, bias = self.module.weight, self.module.bias
        vocab_size = len(weight)
        logits = self._buffer(len(states), vocab_size, weight.dtype, weight.device)
        size = CHUNK if weight.device.type == "cpu" else vocab_size
        for start in range(0, vocab_size, size):
            part = slice(start, min(start + size, vocab_size))
            torch.mm(states, weight[part].t(), out=logits[:, part])
            if bias is not None:
                logits[:, part] += bias[part]
        return logits

    def _buffer(self, rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if len(self.buffer) < rows:
            self.buffer = torch.empty(rows, padded_size(vocab_size), dtype=dtype, device=device)
        buffer = self.buffer[:rows]
        buffer[:, vocab_size:] = float("-inf")
        return buffer
