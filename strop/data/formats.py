"""What a row is: text, messages, prompt + completion or tokens, and how the dialects of each become one.

    tokens             {"input_ids": [...]} with "labels", "completion_mask" and "assistant_masks" as it likes
    prompt_completion  {"prompt": "...", "completion": "..."}, or both as lists of messages
    messages           {"messages": [{"role", "content"}, ...]}, or "conversations" of those or of {"from", "value"}
    text               {"text": "..."}, or another column named by `dataset_text_field`; a list of messages there
    counts as messages

A row with the columns of several is the first of them in this order, except that a `dataset_text_field` other than
"text" wins over all but tokens. Conversations may bring `tools` (a list or a JSON string) and `chat_template_kwargs`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from typing import Any, Literal

Row = Mapping[str, Any]
Message = dict[str, Any]
Kind = Literal["tokens", "prompt_completion", "messages", "text"]

CHECKED_ROWS = 100
"""Rows that are looked at before anything is done to a data set."""

MESSAGE_COLUMNS = ("prompt", "chosen", "rejected", "completion", "messages")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
"""ShareGPT's names for roles that chat templates know under another."""

EXPECTED = (
    "a text column, messages, conversations, prompt + completion, or input_ids (with labels, completion_mask or "
    "assistant_masks)"
)


@dataclass(frozen=True)
class Format:
    """How the rows of a data set are written."""

    kind: Kind
    columns: tuple[str, ...]
    """The columns that hold the row."""
    conversational: bool = False

    def __str__(self) -> str:
        written = "messages" if self.conversational else "token ids" if self.kind == "tokens" else "plain text"
        return f"{self.kind} in {' + '.join(self.columns)} ({written})"


def format_of(row: Row, text_field: str = "text") -> Format:
    """The format of one row. Raises ValueError that lists found and expected columns where there is none."""
    found = {name for name, value in row.items() if value is not None}
    if "input_ids" in found:
        return Format(
            "tokens", tuple(c for c in ("input_ids", "labels", "completion_mask", "assistant_masks") if c in found)
        )
    refuse_images(row)
    if text_field != "text":
        if text_field not in row:
            raise ValueError(_no_text_field(row, text_field))
        if text_field in found:
            return _text_format(row, text_field)
    if {"prompt", "completion"} <= found:
        return _prompt_completion_format(row)
    for column in ("messages", "conversations"):
        if column in found:
            return Format("messages", (column,), conversational=True)
    if text_field in found:
        return _text_format(row, text_field)
    raise ValueError(_no_format(row, found, text_field))


def _text_format(row: Row, text_field: str) -> Format:
    if isinstance(row[text_field], str):
        return Format("text", (text_field,))
    if _is_message_list(row[text_field]):
        return Format("messages", (text_field,), conversational=True)
    raise ValueError(f"column {text_field!r} holds {_shown(row[text_field])}, neither a string nor a list of messages")


def _prompt_completion_format(row: Row) -> Format:
    lists = [isinstance(row[column], list | tuple) for column in ("prompt", "completion")]
    if lists[0] != lists[1]:
        raise ValueError(
            f"prompt is {_shown(row['prompt'])} but completion is {_shown(row['completion'])}: where the prompt ends "
            f"could "
            "not be told. Write both as strings or both as lists of messages"
        )
    return Format("prompt_completion", ("prompt", "completion"), conversational=lists[0])


def _no_text_field(row: Row, text_field: str) -> str:
    near = get_close_matches(text_field, list(row), n=1)
    hint = f"did you mean {near[0]!r}?" if near else 'leave it at "text" if the rows are no plain text'
    return f"dataset_text_field={text_field!r} is none of the columns {sorted(row)}; {hint}"


def _no_format(row: Row, found: set[str], text_field: str) -> str:
    message = f"no text to train on in the columns {sorted(row)}; expected {EXPECTED}."
    if {"chosen", "rejected"} & found:
        return f"{message} These look like preference pairs, which are for DPOTrainer or RewardTrainer"
    if "prompt" in found:
        return f"{message} There is a prompt but no completion: add it, or name a text column with dataset_text_field"
    if text_field in row:
        return f"{message} {text_field!r} is empty (None)"
    near = get_close_matches(text_field, sorted(found), n=1)
    strings = [name for name in row if isinstance(row[name], str)]
    candidate = near or strings[:1]
    return message + (f" Did you mean dataset_text_field={candidate[0]!r}?" if candidate else "")


def detect(rows: Iterable[Row], text_field: str = "text", name: str = "train") -> Format:
    """The format all `rows` share. Raises ValueError naming the row that has none, or another than the first row's."""
    first: Format | None = None
    for index, row in enumerate(rows):
        found = at_row(index, name, format_of, row, text_field)
        first = first or found
        if _shape(found) != _shape(first):
            raise ValueError(
                f"{name} row {index} is {found}, but row 0 is {first}: how a data set is prepared can't change from "
                f"row to row. "
                "Split it in two and mix the prepared parts, or write all rows alike"
            )
    if first is None:
        raise ValueError(f"the {name} data set has no rows")
    return first


def _shape(found: Format) -> tuple:
    return (
        (found.kind, found.conversational)
        if found.kind == "tokens"
        else (found.kind, found.conversational, found.columns)
    )


def at_row(index: int, name: str, function, *arguments):
    """`function(*arguments)`, whose ValueError comes to name the row."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f"{name} row {index}: {error}") from error


def refuse_images(row: Row, method: str = "supervised fine-tuning") -> None:
    """Raise ValueError for a row with pictures, which `method` can't use."""
    columns = [c for c in ("image", "images") if row.get(c) is not None and row[c] != []]
    if columns:
        raise ValueError(
            f"column {columns[0]!r} holds images, which {method} does not prepare; training on the text alone would "
            "teach answers about pictures the model never sees. Remove the column if the text stands on its own"
        )


# Conversations


def is_conversational(example: Row) -> bool:
    """Whether any of prompt, completion, chosen, rejected or messages is a list of messages with a role."""
    return any(_is_message_list(example.get(column), "role") for column in MESSAGE_COLUMNS)


def is_conversational_from_value(example: Row) -> bool:
    """Whether `conversations` is a ShareGPT-style list of {"from", "value"}."""
    return _is_message_list(example.get("conversations"), "from", "value")


def maybe_convert_to_chatml(example: Row) -> dict[str, Any]:
    """The row with {"from", "value"} turned into {"role", "content"} and `conversations` renamed to `messages`.

    ShareGPT's roles get the names that chat templates know: human is user, gpt is assistant (`SHAREGPT_ROLES`).
    """
    converted = dict(example)
    for column in (*MESSAGE_COLUMNS, "conversations"):
        if isinstance(converted.get(column), list | tuple):
            converted[column] = [_from_sharegpt(message) for message in converted[column]]
    if "conversations" in converted:
        converted["messages"] = converted.pop("conversations")
    return converted


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, Mapping) or "from" not in message or "value" not in message:
        return message
    role = SHAREGPT_ROLES.get(message["from"], message["from"])
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": role, "content": message["value"], **rest}


def remove_none_values(example: Any) -> Any:
    """A copy without the keys whose value is None, at any depth.

    Arrow gives all dicts of a column the same keys and fills in None, which templates would print. None inside a list
    stays.
    """
    if isinstance(example, Mapping):
        return {key: remove_none_values(value) for key, value in example.items() if value is not None}
    if isinstance(example, list | tuple):
        return [remove_none_values(item) for item in example]
    return example


def messages_of(value: Any, known_roles: frozenset[str] = frozenset(ROLES)) -> list[Message]:
    """A column's messages with role and content, ShareGPT's dialect and Arrow's None keys gone.

    Raises ValueError for an empty list, something that is no message, and a role that is not in `known_roles`.
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list of messages, found {_shown(value)}")
    if not value:
        raise ValueError("the list of messages is empty: there is nothing to train on. Drop the row")
    messages = [_from_sharegpt(remove_none_values(message)) for message in value]
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError(f'message {index} is {_shown(message)}; expected {{"role": ..., "content": ...}}')
        if message["role"] not in known_roles:
            raise ValueError(f"message {index} has {_unknown_role(message['role'], known_roles)}")
    return messages


def roles_known_to(chat_template: str | None) -> frozenset[str]:
    """The usual roles, and every word the template has in quotes, where it would compare a role of its own."""
    return frozenset(ROLES) | frozenset(re.findall(r"""['"](\w+)['"]""", chat_template or ""))


def _unknown_role(role: Any, known_roles: Iterable[str]) -> str:
    near = get_close_matches(str(role), sorted(known_roles), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"usual are {', '.join(ROLES)}"
    return f"the role {role!r}, which neither the chat template nor convention knows; {hint}"


def tools_of(row: Row) -> list[dict] | None:
    """The row's tools as JSON schemas; None for none. Raises ValueError for a string that is no JSON."""
    tools = _json("tools", row.get("tools"))
    return remove_none_values(tools) if tools else None


def template_kwargs_of(row: Row) -> dict[str, Any]:
    """The row's own arguments for the chat template, e.g. {"enable_thinking": False}."""
    options = _json("chat_template_kwargs", row.get("chat_template_kwargs"))
    return remove_none_values(options) if options else {}


def _json(column: str, value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"column {column!r} is a string but no JSON ({error}): {value[:80]!r}") from error


def _is_message_list(value: Any, *keys: str) -> bool:
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], Mapping):
        return False
    return all(key in value[0] for key in keys) if keys else bool({"role", "from"} & set(value[0]))


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


# Checks


@dataclass
class Check:
    """What `validate` found in a data set."""

    columns: tuple[str, ...]
    format: Format | None = None
    rows: int = 0
    errors: list[str] = field(default_factory=list)
    """What keeps rows from being prepared, each with its row number."""
    empty_answers: list[int] = field(default_factory=list)
    """Rows whose answer holds nothing."""

    @property
    def ok(self) -> bool:
        return not self.errors and not self.empty_answers

    def __str__(self) -> str:
        lines = [f"columns found: {', '.join(self.columns)}"]
        lines += [f"format: {self.format}" if self.format else f"format: none; expected {EXPECTED}"]
        lines += [f"error: {error}" for error in self.errors]
        if self.empty_answers:
            lines.append(f"empty answers in rows {', '.join(map(str, self.empty_answers[:10]))}")
        return "\n".join([*lines, f"{self.rows} rows checked, {'all good' if self.ok else 'see above'}"])


def validate(
    dataset: Iterable[Row], text_field: str = "text", chat_template: str | None = None, limit: int | None = CHECKED_ROWS
) -> Check:
    """Look at the first `limit` rows (all if None) and list what is wrong, with row numbers, without raising."""
    rows = list(islice(dataset, limit))
    check = Check(columns=tuple(dict.fromkeys(name for row in rows for name in row)), rows=len(rows))
    roles = roles_known_to(chat_template)
    for index, row in enumerate(rows):
        try:
            found = format_of(row, text_field)
            check.format = check.format or found
            if _shape(found) != _shape(check.format):
                raise ValueError(f"is {found}, but the first good row is {check.format}")
            if _answer_is_empty(row, found, roles):
                check.empty_answers.append(index)
        except ValueError as error:
            check.errors.append(f"row {index}: {error}")
    return check


def _answer_is_empty(row: Row, found: Format, roles: frozenset[str]) -> bool:
    """Whether what is to be learned is empty. Raises ValueError for messages that are none."""
    if found.kind == "tokens":
        return not len(row["input_ids"])
    answer = row[found.columns[-1]]
    if not found.conversational:
        if not all(isinstance(row[column], str) for column in found.columns):
            raise ValueError(f"expected strings in {' and '.join(found.columns)}, found {_shown(answer)}")
        return not answer.strip()
    if found.kind == "prompt_completion":
        messages_of(row["prompt"], roles)
    return bool(silent_turns(messages_of(answer, roles)))


def silent_turns(messages: list[Message]) -> list[int]:
    """The assistant's turns that hold nothing: no content, and no tool call or reasoning beside it."""
    return [k for k, message in enumerate(messages) if message["role"] == "assistant" and not _says_something(message)]


def _says_something(message: Message) -> bool:
    parts = message.get("content")
    parts = parts if isinstance(parts, list) else [parts]
    return any(map(_is_filled, parts)) or any(
        value for key, value in message.items() if key not in ("role", "content", "name")
    )


def _is_filled(part: Any) -> bool:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    return bool(text.strip() if isinstance(text, str) else text)
