"""A completion while it is written: what it continues, what it may still write, and when it ends."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from strop.models.forward import base_model
from strop.rollout.sampling import Draw
from strop.rollout.types import Completion, FinishReason, Sampling

SLACK = 8
"""Tokens decoded beyond the bytes of a stop text, so that no character is cut where it may begin."""


@dataclass(eq=False)
class Prefix:
    """A prompt that rows continue, and what has become of it."""

    token_ids: tuple[int, ...]
    num_rows: int = 0
    waiting: int = 0
    """Rows that have not begun to continue it."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of the rows that ended."""
    keys: list[Tensor] = field(default_factory=list)
    """(K, P, D) a layer, once it has been read."""
    values: list[Tensor] = field(default_factory=list)
    logits: Tensor | None = None
    """(V,) of the token after it, while rows wait for it."""

    @property
    def is_begun(self) -> bool:
        """Some row continues it, or has ended."""
        return self.waiting < self.num_rows

    def end(self, num_tokens: int) -> None:
        """A row has ended; after the last one, keys and values are let go."""
        self.lengths.append(num_tokens)
        if len(self.lengths) == self.num_rows:
            self.keys, self.values = [], []


@dataclass(eq=False)
class Row:
    """A completion being written."""

    index: int
    """Its place among the prompts of the call."""
    number: int
    """Its number in the run, which its random numbers follow from."""
    prefix: Prefix
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    sampled_logps: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def expected(self) -> float:
        """Tokens it will write, guessed by its siblings."""
        lengths = self.prefix.lengths
        return min(sum(lengths) / len(lengths), self.max_tokens) if lengths else self.max_tokens

    def completion(self, sampling: Sampling) -> Completion:
        assert self.finish_reason is not None
        sampled = self.sampled_logps if sampling.is_filtered else None
        return Completion(self.token_ids, self.logps, self.finish_reason, sampled)


def waiting_rows(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    numbers: Sequence[int] | None = None,
    max_tokens: Sequence[int] | None = None,
) -> list[Row]:
    """A row a prompt; equal prompts are one prefix. Raises ValueError for an empty prompt or budgets out of range."""
    numbers = range(len(prompts)) if numbers is None else numbers
    limits = [sampling.max_tokens] * len(prompts) if max_tokens is None else max_tokens
    prefixes: dict[tuple[int, ...], Prefix] = {}
    rows = []
    for index, (prompt, number, limit) in enumerate(zip(prompts, numbers, limits, strict=True)):
        if not len(prompt):
            raise ValueError(f"prompt {index} has no tokens: there is nothing to continue. Begin it with a token")
        if not 1 <= limit <= sampling.max_tokens:
            raise ValueError(
                f"max_tokens[{index}]={limit} is out of range: a row may have from 1 token to the sampling's "
                f"max_tokens={sampling.max_tokens}"
            )
        ids = tuple(prompt)
        prefix = prefixes.setdefault(ids, Prefix(ids))
        prefix.num_rows += 1
        prefix.waiting += 1
        rows.append(Row(index, number, prefix, limit))
    return rows


def seen_ids(rows: Sequence[Row], device: torch.device) -> Tensor:
    """(R, L): the ids of each row's prompt and completion, filled up by repetition."""
    whole = [[*row.prefix.token_ids, *row.token_ids] for row in rows]
    width = max(map(len, whole))
    return torch.tensor([ids + ids[:1] * (width - len(ids)) for ids in whole], device=device)


def end_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that ends a text of `model`: by its generation config, its config and its tokenizer."""
    base = base_model(model)
    owners = (getattr(base, "generation_config", None), getattr(base, "config", None), tokenizer)
    return frozenset(i for owner in owners for i in _ids(getattr(owner, "eos_token_id", None)))


def _ids(eos_token_id: int | Iterable[int] | None) -> list[int]:
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else [int(i) for i in eos_token_id]


class Stopping:
    """When a completion ends. Raises ValueError for stop texts without a tokenizer."""

    def __init__(self, sampling: Sampling, ends: frozenset[int], tokenizer: PreTrainedTokenizerBase | None):
        if sampling.stop and tokenizer is None:
            raise ValueError(f"stop={sampling.stop!r} is text, but the generator has no tokenizer. Give it one")
        self.ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else ends)
        self.texts = sampling.stop
        self.tokenizer = tokenizer
        self.tail = max((len(text.encode()) for text in self.texts), default=0) + SLACK

    def extend(self, rows: Sequence[Row], draw: Draw) -> set[Row]:
        """Give each row its token; the rows that end by it. Raises ValueError where no distribution was drawn from."""
        done = set()
        lists = zip(rows, draw.token_ids.tolist(), draw.logps.tolist(), draw.sampled_logps.tolist(), strict=True)
        for row, token, logp, sampled_logp in lists:
            if not math.isfinite(logp):
                raise ValueError(
                    f"row {row.index} can't go on after {len(row.token_ids)} tokens: the model's logits are no numbers "
                    "there (NaN or infinity). Its weights have diverged, or overflow in this precision or temperature"
                )
            row.token_ids.append(token)
            row.logps.append(logp)
            row.sampled_logps.append(sampled_logp)
            row.finish_reason = self.reason(row.token_ids, row.max_tokens)
            if row.finish_reason is not None:
                row.prefix.end(len(row.token_ids))
                done.add(row)
        return done

    def reason(self, token_ids: Sequence[int], max_tokens: int) -> FinishReason | None:
        """Why a completion of `token_ids` ends here; None if it goes on."""
        if token_ids[-1] in self.ids or self._has_stop_text(token_ids):
            return "stop"
        return "length" if len(token_ids) >= max_tokens else None

    def _has_stop_text(self, token_ids: Sequence[int]) -> bool:
        if not self.texts:
            return False
        assert self.tokenizer is not None
        text = self.tokenizer.decode(token_ids[-self.tail :], skip_special_tokens=False)
        return any(stop in text for stop in self.texts)
