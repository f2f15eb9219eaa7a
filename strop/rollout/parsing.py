"""Tool calls in what a model wrote, in the syntax that its chat template writes calls in.

A syntax is chosen by a round trip, not by a model's name: calls are rendered by the template, and the syntax that reads
exactly these calls from the text is the one. Templates with a syntax of their own around JSON are read by the marks
that they put before and behind it.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from strop.data.chat import Conversation, common_prefix
from strop.data.formats import Message
from strop.data.turns import ALPHA, BETA, end_of_turn

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of tools by name, as `{"type": "function", "function": {...}}`."""

NAME = re.compile(r'"name"\s*:\s*"([\w.-]{1,64})"')
NAMELESS = "unknown"
"""What a call is named that can't be read."""
TAG_BODY = re.compile(r"\s*<function=([\w.-]+)>(.*?)</function>\s*", re.DOTALL)
TAG_VALUE = re.compile(r"\s*<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
ARG_BODY = re.compile(r"\s*([\w.-]+)\s*(.*?)\s*", re.DOTALL)
ARG_VALUE = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
NAMED_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\])?\s*", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
CONSTANTS = {"True": True, "False": False, "None": None}


class ToolCall(NamedTuple):
    """A tool's name and its arguments by name; with an `error`, what was written instead of arguments."""

    name: str
    arguments: dict[str, Any] | str
    error: str | None = None

    @property
    def message(self) -> dict[str, Any]:
        """As an element of a message's `tool_calls`."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Reply(NamedTuple):
    """What is said beside the calls, and the calls in their order."""

    content: str
    calls: list[ToolCall]


Syntax = Callable[[str, Schemas], Reply]
"""Reads a turn without its end-of-turn marker. Calls that can't be read have an error; a text without any is content.
Schemas say what values are that the syntax writes as bare text."""


def read(text: str, syntax: Syntax, schemas: Schemas) -> Reply:
    """The reply in `text`. What is called in a thought isn't called; a thought goes on to the last `</think>`."""
    before, closed, said = text.rpartition("</think>")
    if "<think>" in said:
        return Reply(text, [])
    reply = syntax(said, schemas)
    return Reply((before + closed + reply.content).strip(), reply.calls) if reply.calls else Reply(text, [])


# ---- Values ----


class Unreadable(ValueError):
    """Why a call can't be read."""


def _call(value: Any) -> ToolCall:
    """A call from its JSON object. Raises Unreadable."""
    if not isinstance(value, dict):
        raise Unreadable(f"a call is a JSON object with a name and arguments, not {json.dumps(value)[:80]}")
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name = value.get("name", value.get("function"))
    if not isinstance(name, str):
        raise Unreadable("the call has no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise Unreadable(f"the arguments are no JSON object but {json.dumps(arguments)[:80]}")
    return ToolCall(name, arguments)


def _json(text: str) -> Any:
    value, end = _json_at(text, 0)
    if text[end:].strip():
        raise Unreadable(f"there is more than one JSON value: {text[end:].strip()[:80]!r}")
    return value


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, white space skipped, and where it ends. Raises Unreadable."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text, start)
        return _writable(value), end
    except (ValueError, RecursionError) as error:  # ValueError: also of numbers too long for Python
        raise Unreadable(f"the call is no valid JSON ({error})") from error


def _writable(value: Any) -> Any:
    """`value`. Raises ValueError for half of a character (\\ud800), which no tokenizer and no file takes."""
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _json_calls(value: Any) -> list[ToolCall]:
    """The calls of a JSON object, or of a list of them."""
    return [_call(element) for element in (value if isinstance(value, list) else [value])]


def _malformed(body: str, error: Unreadable) -> ToolCall:
    found = NAME.search(body)
    return ToolCall(found[1] if found else NAMELESS, body.strip(), str(error))


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """The value that a bare text stands for: JSON, or Python's constants, unless the schema wants a string."""
    if schema.get("type") == "string":
        return text
    if text.strip() in CONSTANTS:
        return CONSTANTS[text.strip()]
    try:
        return _json(text)
    except Unreadable:
        return text


def _typed_arguments(name: str, values: Sequence[tuple[str, str]], schemas: Schemas) -> dict[str, Any]:
    known = schemas.get(name, {}).get("function", {}).get("parameters", {}).get("properties", {})
    return {key: _typed(text, known.get(key, {})) for key, text in values}


# ---- Syntaxes ----


def _tagged(text: str, opener: str, closer: str, calls_in: Callable[[str], list[ToolCall]]) -> Reply:
    """Calls between `opener` and `closer`, or the next opener if there is no closer; the rest is content."""
    content, *parts = text.split(opener)
    calls = []
    for part in parts:
        body, closed, rest = part.partition(closer) if closer else (part, "", "")
        content += rest
        try:
            if closer and not closed:
                raise Unreadable(f"the call is not closed by {closer}")
            calls += calls_in(body)
        except Unreadable as error:
            calls.append(_malformed(body, error))
    return Reply(content.strip(), calls)


def tool_call_json(text: str, schemas: Schemas) -> Reply:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a list of such objects: Hermes, Qwen, SmolLM."""
    return _tagged(text, "<tool_call>", "</tool_call>", _calls_in_json)


def function_tags(text: str, schemas: Schemas) -> Reply:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen's later models."""

    def calls_in(body: str) -> list[ToolCall]:
        found = TAG_BODY.fullmatch(body)
        if found is None:
            raise Unreadable("the call is not written as <function=name>...</function>")
        values = _pairs(TAG_VALUE, found[2], "<parameter=key>value</parameter>")
        return [ToolCall(found[1], _typed_arguments(found[1], values, schemas))]

    return _tagged(text, "<tool_call>", "</tool_call>", calls_in)


def argument_tags(text: str, schemas: Schemas) -> Reply:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM."""

    def calls_in(body: str) -> list[ToolCall]:
        found = ARG_BODY.fullmatch(body)
        if found is None:
            raise Unreadable("the call has no name")
        values = _pairs(ARG_VALUE, found[2], "<arg_key>key</arg_key><arg_value>value</arg_value>")
        return [ToolCall(found[1], _typed_arguments(found[1], values, schemas))]

    return _tagged(text, "<tool_call>", "</tool_call>", calls_in)


def _pairs(pattern: re.Pattern[str], text: str, form: str) -> list[tuple[str, str]]:
    rest = pattern.sub("", text).strip()
    if rest:
        raise Unreadable(f"arguments are written as {form}, not as {rest[:80]!r}")
    return [(key.strip(), value) for key, value in pattern.findall(text)]


def bracketed_calls(text: str, schemas: Schemas) -> Reply:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}`: Mistral."""

    def calls_in(body: str) -> list[ToolCall]:
        named = NAMED_CALL.match(body)
        if named is None or not body[named.end() :].startswith("{"):
            return _json_calls(_json(body))
        calls = []
        while named is not None:
            arguments, end = _json_at(body, named.end())
            calls.append(_call({"name": named[1], "arguments": arguments}))
            body = body[end:]
            named = NAMED_CALL.match(body)
        if body.strip():
            raise Unreadable(f"calls are written as name[ARGS]{{...}}, not as {body.strip()[:80]!r}")
        return calls

    return _tagged(text, "[TOOL_CALLS]", "", calls_in)


def bare_json(text: str, schemas: Schemas) -> Reply:
    """`{"name": ..., "parameters": {...}}` as the whole turn, several parted by semicolons: Llama 3. Behind
    `<|python_tag|>` as well, and there also `name.call(key="value")`.
    """
    content, tag, body = text.rpartition(PYTHON_TAG)
    body = body.strip()
    if not tag and not (body.startswith("{") and '"name"' in body):
        return Reply(text, [])
    try:
        calls = _python_call(body) if tag and not body.startswith("{") else list(_json_sequence(body))
    except Unreadable as error:
        calls = [_malformed(body, error)]
    return Reply(content.strip(), calls)


def _json_sequence(body: str) -> Iterator[ToolCall]:
    place = 0
    while place < len(body):
        value, end = _json_at(body, place)
        yield from _json_calls(value)
        rest = body[end:]
        place = end + len(rest) - len(rest.lstrip("; \n\r\t"))


def _python_call(body: str) -> list[ToolCall]:
    """A call with keywords in Python, of a function or of its method `call`."""
    try:
        call = _from_python(ast.parse(body, mode="eval").body)
        return [call._replace(name=call.name.removesuffix(".call"))]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f'behind {PYTHON_TAG} stands name.call(key="value"): {error}') from error


def between(opener: str, closer: str, calls_in: Callable[[str], list[ToolCall]]) -> Syntax:
    """Calls between the marks that a template puts there; without an opener, calls are the whole turn."""

    def syntax(text: str, schemas: Schemas) -> Reply:
        if opener:
            return _tagged(text, opener, closer, calls_in)
        if not text.strip().startswith(("{", "[")):
            return Reply(text, [])
        try:
            return Reply("", calls_in(text))
        except Unreadable as error:
            return Reply("", [_malformed(text, error)]) if '"name"' in text else Reply(text, [])

    return syntax


def _calls_in_json(body: str) -> list[ToolCall]:
    return _json_calls(_json(body))


def _calls_in_python(body: str) -> list[ToolCall]:
    """The calls of a list in Python, `[name(key="value"), ...]`."""
    try:
        calls = ast.parse(body.strip(), mode="eval").body
        if not isinstance(calls, ast.List):
            raise ValueError("it is no list of calls")
        return [_from_python(call) for call in calls.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f'calls are written as [name(key="value"), ...]: {error}') from error


def _from_python(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("it is no call with keywords only")
    return ToolCall(ast.unparse(call.func), _writable({str(k.arg): ast.literal_eval(k.value) for k in call.keywords}))


SYNTAXES: dict[str, Syntax] = {
    "tool_call_json": tool_call_json,
    "function_tags": function_tags,
    "argument_tags": argument_tags,
    "bracketed_calls": bracketed_calls,
    "bare_json": bare_json,
}


# ---- Which one a template writes ----

PROBE_NAME = "look_up"
PROBES = ({"first": ALPHA, "second": 7}, {"first": BETA, "second": [1, 2]})
PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "first": {"type": "string", "description": "A word."},
                "second": {"description": "A value."},
            },
            "required": ["first", "second"],
        },
    },
}


def syntax_of(conversation: Conversation) -> Syntax:
    """The syntax in which a chat template writes calls, by a round trip.

    Raises ValueError, naming the template, where it writes no calls or in a syntax that isn't known.
    """
    turns = [_rendered(conversation, [probe]) for probe in PROBES]
    if not all(PROBE_NAME in turn for turn in turns):
        raise ValueError(
            f"{conversation.template} writes no tool calls, so a model could not be shown its own. Use a chat template "
            "for tools (chat_template_path)"
        )
    expected = [([probe], turn) for probe, turn in zip(PROBES, turns, strict=True)]
    with suppress(ValueError):  # some templates refuse several calls in a turn
        expected.append((list(PROBES), _rendered(conversation, list(PROBES))))
    end_id = end_of_turn(conversation.template.tokenizer)
    end = "" if end_id is None else conversation.template.tokenizer.decode([end_id])
    for syntax in (*SYNTAXES.values(), *_learned([turn.removesuffix(end) for turn in turns])):
        if all(_reads(syntax, turn, probes, conversation) for probes, turn in expected):
            return syntax
    raise ValueError(
        f"{conversation.template} writes tool calls in a syntax that strop doesn't read: {turns[0][:200]!r}. Known are "
        f"{', '.join(SYNTAXES)} and JSON between marks; use a template that writes one of them (chat_template_path)"
    )


def assistant_calling(calls: Sequence[tuple[str, Any]], content: str = "") -> Message:
    """The message of an assistant that calls tools by name with arguments; ids are what Mistral takes for ids."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": f"call{k:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for k, (name, arguments) in enumerate(calls)
        ],
    }


def _rendered(conversation: Conversation, probes: list[dict[str, Any]]) -> str:
    """What the template writes for an assistant's turn with these calls, to its end."""
    question = [{"role": "user", "content": "A question."}]
    before = conversation.render(question, generation_prompt=True)
    text = conversation.render([*question, assistant_calling([(PROBE_NAME, probe) for probe in probes])])
    return text[common_prefix(before, text) :].rstrip()


def _without_ends(turn: str, conversation: Conversation) -> Iterator[str]:
    """The turn with ever fewer of the added tokens at its end: which of them belong to a call isn't known."""
    yield turn
    specials = conversation.template.specials
    while (token := next((token for token in specials if turn.endswith(token)), None)) is not None:
        turn = turn[: -len(token)].rstrip()
        yield turn


def _reads(syntax: Syntax, turn: str, probes: list[dict[str, Any]], conversation: Conversation) -> bool:
    calls = [ToolCall(PROBE_NAME, probe) for probe in probes]
    read_from = (read(text, syntax, {PROBE_NAME: PROBE_SCHEMA}).calls for text in _without_ends(turn, conversation))
    return calls in read_from


def _learned(turns: Sequence[str]) -> Iterator[Syntax]:
    """Calls in JSON or Python between the marks that stand around them in each of `turns`."""
    for calls_in in (_calls_in_json, _calls_in_python):
        marks = {_marks(turn.rpartition("</think>")[2], calls_in) for turn in turns}
        if len(marks) == 1 and (found := marks.pop()) is not None:
            yield between(*found, calls_in)


def _marks(said: str, calls_in: Callable[[str], list[ToolCall]]) -> tuple[str, str] | None:
    """What stands before and behind the first part of `said` that is calls of the probe."""
    for start, opening in enumerate(said):
        for end in range(len(said), start, -1) if opening in "{[" else ():
            if said[end - 1] == {"{": "}", "[": "]"}[opening] and _is_probe(said[start:end], calls_in):
                return said[:start].strip(), said[end:].strip()
    return None


def _is_probe(body: str, calls_in: Callable[[str], list[ToolCall]]) -> bool:
    try:
        return [call.name for call in calls_in(body)] == [PROBE_NAME]
    except Unreadable:
        return False
