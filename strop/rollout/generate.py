"""Completions by transformers' `generate`, for models that take no packed stream: with a state, with an encoder.

With virtual tokens everything is read again at each token: peft looks for what `generate` has cached under another name
than transformers has for it, and puts the virtual tokens before each single one.

Tokens are drawn as everywhere in strop: `generate` is shown logits that leave it one choice. So a row's text follows
from its number and its prompt here too, and its log-probabilities are exact.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria

from strop.models.forward import base_model
from strop.rollout.rows import Prefix, Row, Stopping, seen_ids
from strop.rollout.sampling import draw_, uniforms
from strop.rollout.types import Sampling

CARRIED = ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "cache_implementation")
"""What of a model's generation config says how it is run, not how it is sampled."""


def run_by_generate(
    model: nn.Module, rows: Sequence[Row], sampling: Sampling, stopping: Stopping, max_rows: int, lockstep: bool
) -> None:
    """Write `rows` to their ends, at most `max_rows` at a time. `lockstep`: ranks make equally many forward passes."""
    base, rereads = base_model(model), has_virtual_tokens(model)
    batches = batches_of(rows, max_rows, rereads or bool(getattr(base, "_is_stateful", False)))
    num_batches = len(batches)
    if lockstep:
        count = torch.tensor(num_batches, device=next(model.parameters()).device)
        torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
        num_batches = int(count)
    with plain_generation(model, base, sampling.max_tokens):
        for i in range(num_batches):
            batch = batches[i] if i < len(batches) else [Row(0, 0, Prefix((0,)), 1)]
            writer = Writer(batch, sampling, stopping)
            if rereads:
                write(
                    writer, [Reader(lambda: nullcontext(model), caches=False)], lambda found: found[0], base, lockstep
                )
                continue
            _with_generate(model).generate(  # type: ignore[operator]
                **padded_inputs(batch, base),
                logits_processor=[writer],
                stopping_criteria=[Ends(writer)],
                synced_gpus=lockstep,
            )


def has_virtual_tokens(model: nn.Module) -> bool:
    """Whether an adapter puts virtual tokens before the prompt of a decoder."""
    adapters = getattr(_with_generate(model), "peft_config", {}).values()
    return not base_model(model).config.is_encoder_decoder and any(one.is_prompt_learning for one in adapters)


def refuse_virtual_tokens(model: nn.Module, what: str) -> None:
    """Raises ValueError for an adapter with which transformers' own `generate`, by which `what` writes, says what the
    model wouldn't."""
    if has_virtual_tokens(model) and "cache" in inspect.signature(base_model(model).forward).parameters:
        raise ValueError(
            f"{what} writes by transformers' generate, which with this peft puts the adapter's virtual tokens before "
            "each single token, so the text would not be the model's. Answers of `strop eval` and of rollouts are."
        )


def batches_of(rows: Sequence[Row], max_rows: int, stateful: bool) -> list[list[Row]]:
    """Rows of similar prompts; of equally long ones for a model that carries a state, which padding would enter, or has
    virtual tokens, behind which padding would be counted."""
    ordered = sorted(rows, key=lambda row: (len(row.prefix.token_ids), row.index))
    alike = [list(g) for _, g in groupby(ordered, lambda row: len(row.prefix.token_ids))] if stateful else [ordered]
    return [part[i : i + max_rows] for part in alike for i in range(0, len(part), max_rows)]


def padded_inputs(rows: Sequence[Row], base: PreTrainedModel) -> dict[str, Tensor]:
    """Prompts padded on the left, so that they end together; on the right for an encoder."""
    width = max(len(row.prefix.token_ids) for row in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for b, row in enumerate(rows):
        length = len(row.prefix.token_ids)
        place = slice(0, length) if base.config.is_encoder_decoder else slice(width - length, width)
        ids[b, place] = torch.tensor(row.prefix.token_ids)
        mask[b, place] = 1
    device = base.get_input_embeddings().weight.device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _with_generate(model: nn.Module) -> nn.Module:
    while not hasattr(model, "generate"):
        model = model.module  # type: ignore[assignment]
    return model


@contextmanager
def plain_generation(model: nn.Module, base: PreTrainedModel, max_tokens: int) -> Iterator[None]:
    """Inside, `generate` chooses the likeliest token of what it is shown, and stops where it is told to."""
    owners = {id(owner): owner for owner in (_with_generate(model), base) if "generation_config" in vars(owner)}
    own = {key: owner.generation_config for key, owner in owners.items()}
    carried = {name: getattr(base.generation_config, name, None) for name in CARRIED}
    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, use_cache=True, pad_token_id=0, **carried)
    try:
        for owner in owners.values():
            owner.generation_config = config
        yield
    finally:
        for key, owner in owners.items():
            owner.generation_config = own[key]


class Writer(LogitsProcessor):
    """Draws a token for each row that goes on, and leaves no other to choose."""

    def __init__(self, rows: Sequence[Row], sampling: Sampling, stopping: Stopping):
        self.rows, self.sampling, self.stopping = rows, sampling, stopping

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` (B, V) with a 0 at each row's token, -inf elsewhere."""
        places = [b for b, row in enumerate(self.rows) if row.finish_reason is None]
        rows = [self.rows[b] for b in places]
        only = torch.full_like(scores, float("-inf"))
        only[:, 0] = 0
        if rows:
            logits = scores[places].to(torch.promote_types(scores.dtype, torch.float32))
            logits = logits / (self.sampling.temperature or 1.0)
            at = uniforms(self.sampling.seed, [row.number for row in rows], [len(row.token_ids) for row in rows])
            seen = None if self.sampling.repetition_penalty == 1 else seen_ids(rows, scores.device)
            draw = draw_(logits, at, self.sampling, seen)
            self.stopping.extend(rows, draw)
            only[places, 0] = float("-inf")
            only[places, draw.token_ids] = 0
        return only


def write(
    writer: Writer,
    readers: Sequence["Reader"],
    mixed: Callable[[list[Tensor]], Tensor],
    base: PreTrainedModel,
    lockstep: bool = False,
) -> None:
    """Write the rows of `writer` to their ends by what is `mixed` of the logits of `readers`."""
    inputs = padded_inputs(writer.rows, base)
    while _goes_on(writer.rows, inputs["input_ids"].device, lockstep):
        logits = mixed([reader.next(**inputs) for reader in readers])
        tokens = writer(inputs["input_ids"], logits).argmax(-1, keepdim=True)
        more = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        inputs = {name: torch.cat([inputs[name], more[name]], -1) for name in inputs}


def _goes_on(rows: Sequence[Row], device: torch.device, lockstep: bool) -> bool:
    """Whether a row, in `lockstep` of any rank, has no end yet."""
    goes_on = any(row.finish_reason is None for row in rows)
    if lockstep:
        anywhere = torch.tensor(int(goes_on), device=device)
        torch.distributed.all_reduce(anywhere, torch.distributed.ReduceOp.MAX)
        return bool(anywhere)
    return goes_on


class Reader:
    """A model that reads what it is shown, and keeps what it has read."""

    def __init__(self, acting: Callable[[], AbstractContextManager[nn.Module]], caches: bool):
        self.acting, self.caches = acting, caches
        self.cache: Any = None
        self.num_read = 0

    def next(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, V), float32 or finer: logits of the token after `input_ids` (B, W), which grow from call to call."""
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        with self.acting() as model:
            device = next(model.parameters()).device
            named = inspect.signature(base_model(model).forward).parameters
            name = "cache" if "cache" in named else "past_key_values"
            options = {"position_ids": positions[:, self.num_read :].to(device), "logits_to_keep": 1, name: self.cache}
            output = model(
                input_ids=input_ids[:, self.num_read :].to(device),
                attention_mask=attention_mask.to(device),
                use_cache=self.caches,
                **{name: value for name, value in options.items() if name in named and value is not None},
            )
        if self.caches:
            self.cache, self.num_read = getattr(output, name), input_ids.shape[1]
        logits = output.logits[:, -1].to(input_ids.device)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Ends(StoppingCriteria):
    """Which rows of a `Writer` have ended."""

    def __init__(self, writer: Writer):
        self.writer = writer

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        """(B,) bool."""
        return torch.tensor([row.finish_reason is not None for row in self.writer.rows], device=input_ids.device)
