"""Chat templates: rendering rows exactly as `tokenizer.apply_chat_template` does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from strop.data.formats import (
    MESSAGE_COLUMNS,
    Message,
    Row,
    is_conversational,
    messages_of,
    roles_known_to,
    template_kwargs_of,
    tools_of,
)

RENDERABLE = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
)
"""The sets of conversational columns that `apply_chat_template` knows what to do with."""


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template.

    Raises ValueError for a tokenizer that has none, and, when a template refuses some messages, with its reason.
    """

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the template in every row; a row's own come on top."""

    def __post_init__(self):
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"the rows are conversations but the tokenizer of {self.model} has no chat template to write them "
                f"with. Set "
                "chat_template_path to a .jinja file or to a chat model whose template to adopt"
            )

    @property
    def model(self) -> str:
        """Where the tokenizer comes from, for messages."""
        return self.tokenizer.name_or_path or type(self.tokenizer).__name__

    def __str__(self) -> str:
        return f"the chat template of {self.model} ({self.source(None)[:80]!r})"

    def source(self, tools: list[dict] | None) -> str:
        """The template's text; some tokenizers have another one for rows with tools."""
        return self.tokenizer.get_chat_template(None, tools)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """What templates may refer to by name: bos_token and the like."""
        return self.tokenizer.special_tokens_map

    @cached_property
    def roles(self) -> frozenset[str]:
        """The roles that rows may use."""
        return roles_known_to(self.source(None))

    @cached_property
    def specials(self) -> tuple[str, ...]:
        """The added tokens that are more than white space, the longest first: what can mark the end of a turn."""
        tokens = {str(token) for token in self.tokenizer.get_added_vocab()} | set(self.tokenizer.all_special_tokens)
        return tuple(sorted((token for token in tokens if token.strip()), key=len, reverse=True))

    def conversation(self, row: Row) -> "Conversation":
        """What of a row applies to all its messages."""
        return Conversation(self, tools_of(row), {**self.options, **template_kwargs_of(row)})


@dataclass(frozen=True)
class Conversation:
    """A chat template with the tools and template arguments of one row."""

    template: ChatTemplate
    tools: list[dict] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def render(self, messages: list[Message], generation_prompt: bool = False) -> str:
        """The text of `messages`, followed by the header of the assistant's next turn if `generation_prompt`."""
        return self._render(messages, add_generation_prompt=generation_prompt)[0][0]

    def render_marked(self, messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text and the character spans between the template's {% generation %} markers."""
        texts, spans = self._render(messages, return_assistant_tokens_mask=True)
        return texts[0], [(start, end) for start, end in spans[0] if start < end]

    def _render(self, messages: list[Message], **how):
        given = {**self.template.special_tokens, **self.options}
        try:
            return render_jinja_template(
                [messages], tools=self.tools, chat_template=self.template.source(self.tools), **(given | how)
            )
        except Exception as error:
            roles = " ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"{self.template} can't render the roles [{roles}]: {type(error).__name__}: {error}. Change the row "
                f"or the template"
            ) from error


def maybe_apply_chat_template(
    example: Row, processing_class: PreTrainedTokenizerBase, tools: list | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """`apply_chat_template` for conversational rows; others come back as they are."""
    if not is_conversational(example):
        return dict(example)
    return apply_chat_template(example, processing_class, tools, **template_kwargs)


def apply_chat_template(
    example: Row, processing_class: PreTrainedTokenizerBase, tools: list | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """The row with its messages rendered to text; other columns stay.

    `messages` become `text`. A prompt ends with the assistant's header, or openly if its last message is the
    assistant's. A completion (chosen, rejected) is what its rendering after the prompt has more than the prompt's.
    Raises ValueError for a set of conversational columns not in `RENDERABLE`.
    """
    columns = {column for column in MESSAGE_COLUMNS if column in example}
    if columns not in RENDERABLE:
        known = "; ".join(" + ".join(sorted(known)) for known in RENDERABLE)
        raise ValueError(f"can't render a row with the columns {sorted(columns)} to text; known are: {known}")
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    template = ChatTemplate(tokenizer, template_kwargs)
    messages = {column: messages_of(example[column], template.roles) for column in columns}
    conversation = template.conversation({**example, "tools": tools or example.get("tools")})
    rest = {key: value for key, value in example.items() if key not in columns}
    if "messages" in columns:
        return rest | {"text": conversation.render(messages["messages"])}
    if "prompt" not in columns:
        return rest | {column: conversation.render(messages[column]) for column in sorted(columns)}
    prompt = open_prompt(conversation, messages["prompt"])
    completions = sorted(columns - {"prompt"})
    texts = {column: conversation.render(messages["prompt"] + messages[column]) for column in completions}
    return rest | {"prompt": prompt} | {c: text[common_prefix(prompt, text) :] for c, text in texts.items()}


def open_prompt(conversation: Conversation, prompt: list[Message]) -> str:
    """The prompt's text, after which the assistant goes on: with its next turn, or with its last one if that is it."""
    if prompt[-1]["role"] != "assistant":
        return conversation.render(prompt, generation_prompt=True)
    return conversation._render(prompt, continue_final_message=True)[0][0]


def common_prefix(a: str, b: str) -> int:
    """How many characters `a` and `b` begin with in common."""
    same, bound = 0, min(len(a), len(b))
    if a[:bound] == b[:bound]:
        return bound
    while bound - same > 1:
        middle = (same + bound) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            bound = middle
    return same
