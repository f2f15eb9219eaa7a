"""Rewards for the form of a completion: thoughts in tags, a pattern, JSON, XML. 1.0 where it holds, else 0.0."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex  # `re` can't be stopped, and nothing else runs while it searches

from strop.rewards.texts import Words, texts_of

FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.S)
"""A fenced block of Markdown."""
SECONDS = 1.0
"""Time for a text to match a pattern."""


def think_format_reward(completions: Sequence[Words], **kwargs: Any) -> list[float]:
    """1.0 for completions that begin with their only "<think>" and close it by "</think>", else 0.0."""
    return [float(_thinks_first(text)) for text in texts_of(completions)]


def _thinks_first(text: str) -> bool:
    return text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text


@dataclass(frozen=True)
class _RegexReward:
    pattern: str
    whole: bool

    __name__ = "regex_reward"

    def __call__(self, completions: Sequence[Words], **kwargs: Any) -> list[float]:
        return [float(self.matches(text)) for text in texts_of(completions)]

    def matches(self, text: str) -> bool:
        match = regex.fullmatch if self.whole else regex.search
        try:
            return match(self.pattern, text, regex.S, timeout=SECONDS, concurrent=True) is not None
        except TimeoutError:
            return False


def regex_reward(pattern: str, whole: bool = True) -> _RegexReward:
    """A reward that is 1.0 for completions that `pattern` matches, from beginning to end if `whole`.

    "." matches newlines too. A text that takes longer than a second, as (a+)+b may with many a, doesn't match. Raises
    ValueError for what is no regular expression.
    """
    try:
        regex.compile(pattern, regex.S)
    except regex.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from error
    return _RegexReward(pattern, whole)


@dataclass(frozen=True)
class _JSONReward:
    schema: Mapping[str, Any] | None
    fenced: bool

    __name__ = "json_reward"

    def __call__(self, completions: Sequence[Words], **kwargs: Any) -> list[float]:
        holds = (lambda value: True) if self.schema is None else validator(self.schema).is_valid
        return [float(self.is_valid(text, holds)) for text in texts_of(completions)]

    def is_valid(self, text: str, holds: Any) -> bool:
        blocks = FENCE.findall(text) if self.fenced else []
        try:
            return holds(json.loads(blocks[-1] if blocks else text, parse_constant=_refuse))
        except (ValueError, RecursionError):
            return False


def json_reward(schema: Mapping[str, Any] | None = None, fenced: bool = True) -> _JSONReward:
    """A reward that is 1.0 for completions that are JSON and obey the JSON schema, if there is one.

    NaN and Infinity are no JSON. With `fenced`, the last fenced block counts where there is one. Raises ValueError for
    a schema that is none, and if jsonschema is missing.
    """
    if schema is not None:
        validator(schema)
    return _JSONReward(schema, fenced)


def validator(schema: Mapping[str, Any]) -> Any:
    """What tells if a value obeys `schema`, by the draft that the schema names, or else the latest."""
    try:
        import jsonschema
    except ImportError as error:
        raise ValueError("JSON schemas need jsonschema, which is not installed: pip install strop[rewards]") from error
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"schema={schema!r} is no JSON schema: {error.message}") from error
    return kind(schema)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@dataclass(frozen=True)
class _XMLReward:
    tags: tuple[str, ...]
    pattern: re.Pattern = field(repr=False)

    __name__ = "xml_reward"

    def __call__(self, completions: Sequence[Words], **kwargs: Any) -> list[float]:
        return [float(self._holds(text)) for text in texts_of(completions)]

    def _holds(self, text: str) -> bool:
        once = all(text.count(mark) == 1 for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>"))
        return once and self.pattern.fullmatch(text) is not None


def xml_reward(tags: Sequence[str] = ("reasoning", "answer")) -> _XMLReward:
    """A reward that is 1.0 for completions that are these elements one after the other, each once, and nothing but
    white space between and around them. What is inside them is free.

    Raises ValueError for no tag, a tag twice, and for what is no name of a tag.
    """
    names = (tags,) if isinstance(tags, str) else tuple(tags)
    wrong = [name for name in names if not re.fullmatch(r"[A-Za-z_][\w.-]*", name) or names.count(name) > 1]
    if wrong or not names:
        raise ValueError(f"tags={list(names)} must be different names of tags, at least one, without brackets.")
    elements = r"\s*".join(rf"<{re.escape(name)}>.*?</{re.escape(name)}>" for name in names)
    return _XMLReward(names, re.compile(rf"\s*{elements}\s*", re.S))
