"""Rows to the tokens of a prompt, and what a model wrote to the words that rewards read."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.data.chat import ChatTemplate, open_prompt
from strop.data.formats import messages_of, refuse_images
from strop.rewards.texts import Words

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoder:
    """Writes a row's prompt in tokens: messages by the chat template, texts as the tokenizer reads a text.

    A conversation that ends with the assistant's turn is continued. A row without a `prompt` may have its `input_ids`.
    Raises ValueError for rows without either, and for prompts that are empty.
    """

    tokenizer: PreTrainedTokenizerBase
    template_options: dict[str, Any] = field(default_factory=dict)
    """Arguments for the chat template; a row's own `chat_template_kwargs` come on top."""
    max_prompt_length: int | None = None
    overlong: str = "truncate"
    """What becomes of longer prompts: "truncate" keeps their end, "drop" (by `fitting`), "error"."""
    keep_special_tokens: bool = False
    """Show rewards special tokens as well."""

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.template_options)

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """The row's prompt in tokens, of which the last `max_prompt_length` are kept."""
        ids = self.whole_prompt_ids(row)
        if self.max_prompt_length is None or len(ids) <= self.max_prompt_length:
            return ids
        if self.overlong == "error":
            raise ValueError(
                f"the prompt {str(self.prompt_words(row))[:80]!r} has {len(ids)} tokens, more than max_prompt_length="
                f'{self.max_prompt_length}. Raise it, or set overlong="truncate" or "drop"'
            )
        return ids[-self.max_prompt_length :]

    def fitting(self, rows: Any, name: str) -> Any:
        """`rows`, a data set or a stream, without those whose prompts are dropped. Raises ValueError where none is
        left, and, of a data set, for prompts that are too long with `overlong="error"`."""
        if self.max_prompt_length is None or self.overlong == "truncate":
            return rows
        if self.overlong == "error":
            for row in rows if hasattr(rows, "__len__") else ():
                self.prompt_ids(row)
            return rows
        limit = self.max_prompt_length
        kept = rows.filter(lambda row: len(self.whole_prompt_ids(row)) <= limit)
        if hasattr(rows, "__len__"):
            if not len(kept):
                raise ValueError(f"every prompt of the {name} data set is longer than max_prompt_length={limit}")
            if len(kept) < len(rows):
                logger.warning(
                    "%s: %d of %d prompts are longer than %d tokens and were dropped",
                    name, len(rows) - len(kept), len(rows), limit,
                )  # fmt: skip
        return kept

    def whole_prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """The row's prompt in tokens, however long."""
        refuse_images(row, "training on rollouts")
        prompt = row.get("prompt")
        if prompt is None and row.get("input_ids"):
            ids = list(row["input_ids"])
            inside = row.get("attention_mask") or [1] * len(ids)
            ids = [token for token, is_real in zip(ids, inside, strict=True) if is_real]
        elif isinstance(prompt, str):
            ids = self._text_ids(prompt)
        elif isinstance(prompt, Sequence) and len(prompt):
            text = open_prompt(self.template.conversation(row), messages_of(prompt, self.template.roles))
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
        else:
            raise ValueError(
                f"the prompt is {prompt!r}, but a rollout begins with a text or a list of messages in the column "
                f"'prompt'; the row has {sorted(row)}"
            )
        if not ids:
            raise ValueError(f"the prompt {prompt!r} has no tokens: there is nothing to continue. Drop the row")
        return ids

    def _text_ids(self, text: str) -> list[int]:
        ids = self.tokenizer(text).input_ids
        return ids[:-1] if self._ends_texts and ids[-1:] == [self.tokenizer.eos_token_id] else ids

    @cached_property
    def _ends_texts(self) -> bool:
        """Whether the tokenizer puts its end token behind every text, where a prompt has to go on."""
        return self.tokenizer("a").input_ids[-1:] == [self.tokenizer.eos_token_id]

    def prompt_words(self, row: dict[str, Any]) -> Words:
        """The prompt as rewards get it."""
        if row.get("prompt") is None and row.get("input_ids"):
            return self.tokenizer.decode(self.whole_prompt_ids(row), skip_special_tokens=not self.keep_special_tokens)
        return row["prompt"]

    def words(self, row: dict[str, Any], token_ids: Sequence[int]) -> Words:
        """What was written, as rewards get it: a text after a text, one message of the assistant after messages."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=not self.keep_special_tokens)
        return text if isinstance(row.get("prompt") or "", str) else [{"role": "assistant", "content": text}]
