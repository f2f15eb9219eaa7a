"""Rows to the tokens of a prompt, and what a model wrote to the words that rewards read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.data.chat import ChatTemplate, open_prompt
from strop.data.formats import messages_of, refuse_images
from strop.rewards.texts import Words


@dataclass(frozen=True)
class Encoder:
    """Writes a row's prompt in tokens: messages by the chat template, texts as the tokenizer reads a text.

    A conversation that ends with the assistant's turn is continued. Raises ValueError for rows without a prompt, and
    for prompts that are empty.
    """

    tokenizer: PreTrainedTokenizerBase
    template_options: dict[str, Any] = field(default_factory=dict)
    """Arguments for the chat template; a row's own `chat_template_kwargs` come on top."""
    max_prompt_length: int | None = None
    keep_special_tokens: bool = False
    """Show rewards special tokens as well."""

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.template_options)

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """The row's prompt in tokens, of which the last `max_prompt_length` are kept."""
        ids = self.whole_prompt_ids(row)
        return ids if self.max_prompt_length is None else ids[-self.max_prompt_length :]

    def whole_prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """The row's prompt in tokens, however long."""
        refuse_images(row, "training on rollouts")
        prompt = row.get("prompt")
        if isinstance(prompt, str):
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

    def words(self, row: dict[str, Any], token_ids: Sequence[int]) -> Words:
        """What was written, as rewards get it: a text after a text, one message of the assistant after messages."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=not self.keep_special_tokens)
        return text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
