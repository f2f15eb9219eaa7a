"""What a model answers to the prompts of rows, and what rewards say of it."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from strop.data.formats import Row, maybe_convert_to_chatml
from strop.data.prompts import maybe_extract_prompt
from strop.data.turns import stop_token_ids
from strop.models.forward import base_model, learned_positions
from strop.rewards.function import HIDDEN
from strop.rewards.scoring import RewardFunctions
from strop.rewards.texts import Words
from strop.rollout.encode import Encoder
from strop.rollout.generator import InProcessGenerator
from strop.rollout.types import FinishReason, Sampling

logger = logging.getLogger(__name__)

PIECE = 512
"""Answers that are tokens at a time."""


@dataclass(frozen=True)
class Answer:
    """One answer to the prompt of a row."""

    row: int
    sample: int
    prompt: Words
    completion: Words
    num_tokens: int
    finish_reason: FinishReason
    """"length" for an answer that was cut off."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """By name; None where a reward doesn't apply."""


def asked(row: Row, index: int) -> dict[str, Any]:
    """The row with its `prompt`: of messages all before the last answer, of pairs what they share. Raises ValueError
    for a row without one."""
    found = maybe_extract_prompt(maybe_convert_to_chatml(row))
    messages = found.get("messages")
    if found.get("prompt") is None and messages and len(messages) > 1:
        found["prompt"] = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    elif found.get("prompt") is None and messages:
        found["prompt"] = messages
    if found.get("prompt") is None:
        raise ValueError(
            f"row {index} has {sorted(row)}, but no prompt to answer: a column prompt (a text, or messages) or "
            'messages. Rename yours, e.g. --dataset_columns \'{"question": "prompt"}\'.'
        )
    return found


def answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    rewards: RewardFunctions | None,
    sampling: Sampling,
    num_samples: int = 1,
    template_options: Mapping[str, Any] | None = None,
    max_rows: int | None = None,
    keep: Callable[[Sequence[Answer]], None] = lambda some: None,
) -> list[list[Answer]]:
    """`num_samples` answers to each row's prompt, a piece at a time; `keep` is given each piece as it is there.

    What is sampled follows from the seed, the row's number and the sample's, whatever else is answered. Raises
    ValueError for rows without a prompt.
    """
    generator = InProcessGenerator(model, tokenizer, max_rows=max_rows)
    encoder = Encoder(tokenizer, dict(template_options or {}))
    if tokenizer.chat_template:
        ends = {*sampling.stop_token_ids, *stop_token_ids(tokenizer)}
        sampling = Sampling(**{**vars(sampling), "stop_token_ids": tuple(sorted(ends))})
    refuse_long_prompts(model, encoder, rows, sampling.max_tokens)
    found: list[list[Answer]] = []
    step = max(1, PIECE // num_samples)
    for start in range(0, len(rows), step):
        part = [asked(row, start + i) for i, row in enumerate(rows[start : start + step])]
        numbers = range(start * num_samples, (start + len(part)) * num_samples)
        own = [row for row in part for _ in range(num_samples)]
        ids = [prompt for row in part for prompt in [encoder.prompt_ids(row)] * num_samples]
        written = generator.generate(ids, sampling, rows=numbers)
        words = [encoder.words(row, one.token_ids) for row, one in zip(own, written, strict=True)]
        judged = rewarded(rewards, own, words, [one.token_ids for one in written])
        piece = [
            Answer(
                number // num_samples, number % num_samples, row["prompt"], text, len(one.token_ids),
                one.finish_reason, values,
            )
            for number, row, text, one, values in zip(numbers, own, words, written, judged, strict=True)
        ]  # fmt: skip
        keep(piece)
        found += [piece[i : i + num_samples] for i in range(0, len(piece), num_samples)]
        logger.info("answered %d of %d prompts", len(found), len(rows))
    return found


def refuse_long_prompts(model: nn.Module, encoder: Encoder, rows: Sequence[Row], max_new_tokens: int) -> None:
    """Raises ValueError, before anything is answered, for a prompt that leaves an answer no room among the positions
    that the model has learned; warns of one beyond those it was trained on."""
    base = base_model(model)
    if not isinstance(base, PreTrainedModel) or base.config.is_encoder_decoder:
        return
    learned = learned_positions(base)
    known = learned or getattr(base.config.get_text_config(), "max_position_embeddings", None) or math.inf
    for index, row in enumerate(rows):
        length = len(encoder.prompt_ids(asked(row, index)))
        if length + max_new_tokens <= known:
            continue
        text = (
            f"the prompt of row {index} has {length} tokens, with max_new_tokens={max_new_tokens} beyond the {known} "
            f"positions of {type(base).__name__}. Lower max_new_tokens, or leave such rows out."
        )
        if learned:
            raise ValueError(text)
        logger.warning("%s It was not trained on so long rows", text)
        return


def rewarded(
    rewards: RewardFunctions | None, rows: Sequence[Row], words: Sequence[Words], ids: Sequence[Sequence[int]]
) -> list[dict[str, float | None]]:
    """What each function says of each answer, by name."""
    if rewards is None:
        return [{} for _ in rows]
    scores = rewards.score([row["prompt"] for row in rows], words, ids, columns_of(rows))
    return [
        {name: None if math.isnan(value) else value for name, value in zip(scores.names, line, strict=True)}
        for line in scores.values.tolist()
    ]


def columns_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """What functions are given of the rows besides prompt and completion; None where a row lacks a column."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names if name not in HIDDEN}
