"""The generator on the training model itself: there are no weights to copy, and any model can be served.

Models that can be trained in the packed layout write by `strop.rollout.generator_stream`, whose first completions are
checked against a training forward; others, and those that fail the check, by transformers' `generate`.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from strop.data.collate import TokenRow, collate
from strop.models.attention import NAME
from strop.models.forward import base_model, packing_obstacle, refuse_beyond_positions
from strop.models.logps import logps
from strop.models.verify import TOLERANCES, coarsest_dtype, evaluating
from strop.rollout.generate import run_by_generate
from strop.rollout.generator_stream import Stream
from strop.rollout.rows import Row, Stopping, end_ids, waiting_rows
from strop.rollout.types import Completion, Sampling

logger = logging.getLogger(__name__)

CPU_MAX_ROWS = 64
DEFAULT_MAX_ROWS = 256
"""Rows running at a time, on a CPU and elsewhere. On one core products of 64 rows run at 97 GFLOP/s, of 32 at 88, of
8 at 60."""
CHECKED_ROWS = 2
"""Completions that a first round is checked on, the shortest."""


class InProcessGenerator:
    """A `Generator` on `model`, which may be in training: wrapped by PEFT, checkpointed, under autocast.

    While it generates the model is in evaluation mode; modes, attention and random states are put back. `max_rows` run
    at a time. Where weights are sharded over ranks, all ranks must call `generate` together.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_rows: int | None = None,
    ):
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self._take(model)

    def sync(self, model: nn.Module) -> None:
        """From now on, write with the weights of `model`, as they are whenever `generate` is called."""
        if model is not self.model:
            self._take(model)

    def _take(self, model: nn.Module) -> None:
        self.model, self._checked = model, False
        self.obstacle = serving_obstacle(model)
        if self.obstacle is not None:
            self._say_so()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        rows: Sequence[int] | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> list[Completion]:
        """One completion a prompt, in order (`strop.rollout.types.Generator`)."""
        stopping = Stopping(sampling, end_ids(self.model, self.tokenizer), self.tokenizer)
        with evaluating(self.model):
            written = waiting_rows(prompts, sampling, rows, max_tokens)
            longest = max((len(row.prefix.token_ids) + row.max_tokens for row in written), default=0)
            refuse_beyond_positions(self.model, longest, "generate")
            if self.obstacle is None:
                self._run_stream(written, sampling, stopping)
            if self.obstacle is not None:
                written = waiting_rows(prompts, sampling, rows, max_tokens)
                run_by_generate(self.model, written, sampling, stopping, self._max_rows(), is_sharded(self.model))
        return [row.completion(sampling) for row in written]

    def _run_stream(self, rows: list[Row], sampling: Sampling, stopping: Stopping) -> None:
        lockstep = is_sharded(self.model)
        with strop_attention(base_model(self.model)):
            Stream(without_replicas(self.model), rows, sampling, stopping, self._max_rows()).run(lockstep)
            if rows and not self._checked and not lockstep:  # a verdict of one rank would part it from the others
                self._check(rows, sampling)

    def _check(self, rows: list[Row], sampling: Sampling) -> None:
        """Compare the log-probabilities of some rows with those of a training forward."""
        some = sorted(rows, key=lambda row: len(row.token_ids))[:CHECKED_ROWS]
        found = torch.tensor([x for row in some for x in row.logps])
        expected = training_logps(without_replicas(self.model), some, sampling.temperature or 1.0).cpu()
        difference = (found - expected).abs()
        most, most_on_average = TOLERANCES[coarsest_dtype(self.model)]
        self._checked = bool(difference.max() <= most and difference.mean() <= most_on_average)
        if not self._checked:
            self.obstacle = (
                f"{type(base_model(self.model)).__name__} written in a stream says other log-probabilities than in "
                f"training, {difference.max():.2g} at most and {difference.mean():.2g} on average"
            )
            self._say_so()

    def _max_rows(self) -> int:
        device = next(self.model.parameters()).device.type
        return self.max_rows or (CPU_MAX_ROWS if device == "cpu" else DEFAULT_MAX_ROWS)

    def _say_so(self) -> None:
        logger.warning("%s: completions are written by transformers' generate, which is slower", self.obstacle)


def serving_obstacle(model: nn.Module) -> str | None:
    """Why `model` can't write in a packed stream, None if it can."""
    obstacle = packing_obstacle(model)
    if obstacle is not None:
        return obstacle
    base = base_model(model)
    if getattr(base.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):  # type: ignore[union-attr, operator]
        return f"{type(base).__name__} shares keys and values between layers"
    return None


def without_replicas(model: nn.Module) -> nn.Module:
    """`model` out of the wrappers that would wait for other ranks, or compile, at each forward pass."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def is_sharded(model: nn.Module) -> bool:
    """Single parameters of `model` lie in parts on several ranks, so that every forward pass needs all of them."""
    return any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters()) or any(
        type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()
    )


def training_logps(model: nn.Module, rows: Sequence[Row], temperature: float) -> torch.Tensor:
    """(tokens,): what a packed training forward says of the rows' tokens, one row after the other."""
    token_rows = [
        TokenRow([*row.prefix.token_ids, *row.token_ids], [-100] * len(row.prefix.token_ids) + row.token_ids)
        for row in rows
    ]
    device = next(model.parameters()).device
    batch = collate(token_rows, "packed", pad_token_id=0)
    batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    return logps(model, batch, temperature=temperature).logps[batch["completion_mask"].bool()]


@contextmanager
def strop_attention(base: PreTrainedModel) -> Iterator[None]:
    """`base` attends by strop's attention, afterwards as before."""
    own = base.config._attn_implementation
    if own == NAME:
        yield
        return
    base.set_attn_implementation(NAME)
    try:
        yield
    finally:
        base.set_attn_implementation(own)
