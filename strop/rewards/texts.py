"""The words of a completion, whichever way it is written."""

from collections.abc import Mapping, Sequence
from typing import Any

Words = str | Sequence[Mapping[str, Any]]
"""A text, or messages."""


def text_of(completion: Words) -> str:
    """The completion as text: of messages, what the last assistant message says; "" if it only calls tools.

    Messages without a role count as the assistant's. Raises ValueError for anything else.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(message, Mapping) for message in completion):
        spoken = [message for message in completion if message.get("role", "assistant") == "assistant"]
        return _content(spoken[-1].get("content")) if spoken else ""
    raise ValueError(f"a completion is a text or a list of messages, not {type(completion).__name__}")


def texts_of(completions: Sequence[Words]) -> list[str]:
    """`text_of` each completion."""
    return [text_of(completion) for completion in completions]


def conversation_text(words: Words) -> str:
    """All that is said, for somebody who reads it: a text as it is, messages one below the other with their roles."""
    if isinstance(words, str):
        return words
    return "\n\n".join(f"{message.get('role', 'assistant')}: {_content(message.get('content'))}" for message in words)


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
