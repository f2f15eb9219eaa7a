"""Generators on the reference policy, and on a mixture of it and the policy in training."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from strop.models.forward import base_model, packing_obstacle, refuse_beyond_positions
from strop.models.reference import Computed, ModelNow
from strop.rollout.encode import Encoder
from strop.rollout.episodes import SingleTurn
from strop.rollout.generate import Reader, Writer, batches_of, write
from strop.rollout.generator import InProcessGenerator
from strop.rollout.rows import Row, Stopping, end_ids, waiting_rows
from strop.rollout.types import Completion, Generator, Rollout, Sampling


class PairedTurns(SingleTurn):
    """Two answers to a prompt: those of even numbers by `generator`, those of odd ones by what `other` gives."""

    def __init__(self, generator: Generator, other: Callable[[], Generator], encoder: Encoder):
        super().__init__(generator, encoder)
        self.other = other

    def roll_out(self, rows: Sequence[dict[str, Any]], numbers: Sequence[int], sampling: Sampling) -> list[Rollout]:
        """One rollout a row, in order."""
        found: dict[int, Rollout] = {}
        for parity, episodes in enumerate(SingleTurn(one, self.encoder) for one in (self.generator, self.other())):
            own = [i for i, number in enumerate(numbers) if number % 2 == parity]
            played = episodes.roll_out([rows[i] for i in own], [numbers[i] for i in own], sampling)
            found |= dict(zip(own, played, strict=True))
        return [found[i] for i in range(len(rows))]


class ReferenceGenerator:
    """A `Generator` on a reference of any kind: its adapter off, or its weights in place, while it writes."""

    def __init__(self, reference: Computed, tokenizer: PreTrainedTokenizerBase | None = None):
        self.reference = reference
        self.writer = InProcessGenerator(reference.model, tokenizer)

    def sync(self, model: nn.Module) -> None:
        """Nothing: the reference doesn't follow the policy."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        rows: Sequence[int] | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> list[Completion]:
        """One completion a prompt, in order (`strop.rollout.types.Generator`)."""
        with self.reference.acting():
            return self.writer.generate(prompts, sampling, rows=rows, max_tokens=max_tokens)


class MixtureGenerator:
    """A `Generator` on the geometric mixture of a policy and its reference (arXiv:2312.00886, section 5), normalised
    token by token: softmax(c log ref + (1 - c) log pi), of which the temperature is taken.

    `coef` says c whenever something is written: 0 is the policy, 1 the reference. Each token is a forward pass of both.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: Computed,
        coef: Callable[[], float],
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_rows: int = 64,
    ):
        self.model, self.reference, self.coef = model, reference, coef
        self.tokenizer, self.max_rows = tokenizer, max_rows

    def sync(self, model: nn.Module) -> None:
        """From now on, mix in the weights of `model`."""
        self.model = model

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        rows: Sequence[int] | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> list[Completion]:
        """One completion a prompt, in order (`strop.rollout.types.Generator`); log-probabilities are the mixture's."""
        stopping = Stopping(sampling, end_ids(self.model, self.tokenizer), self.tokenizer)
        written = waiting_rows(prompts, sampling, rows, max_tokens)
        longest = max((len(row.prefix.token_ids) + row.max_tokens for row in written), default=0)
        for model in (self.model, self.reference.model):
            refuse_beyond_positions(model, longest, "generate")
        caches = packing_obstacle(self.model) is None and packing_obstacle(self.reference.model) is None
        for batch in batches_of(written, self.max_rows, not caches):
            self._write(batch, sampling, stopping, caches)
        return [row.completion(sampling) for row in written]

    def _write(self, rows: Sequence[Row], sampling: Sampling, stopping: Stopping, caches: bool) -> None:
        coef = self.coef()
        readers = [Reader(acting, caches) for acting in (ModelNow(self.model).acting, self.reference.acting)]
        writer = Writer(rows, sampling, stopping)
        write(writer, readers, lambda found: (1 - coef) * found[0] + coef * found[1], base_model(self.model))
