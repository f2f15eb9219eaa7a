"""Python functions as a model's tools: what it is told of them, and what its calls come to."""

import asyncio
import inspect
import json
import logging
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

from transformers.utils import get_json_schema

from strop.compat import suggestion
from strop.data.formats import Message
from strop.rewards.function import name_of
from strop.rewards.limits import Loop, within
from strop.rollout.parsing import ToolCall

logger = logging.getLogger(__name__)

TYPES: dict[str, Callable[[Any], bool]] = {
    "integer": lambda x: isinstance(x, int) and not isinstance(x, bool),
    "number": lambda x: isinstance(x, int | float) and not isinstance(x, bool),
    "string": lambda x: isinstance(x, str),
    "boolean": lambda x: isinstance(x, bool),
    "array": lambda x: isinstance(x, list),
    "object": lambda x: isinstance(x, dict),
    "null": lambda x: x is None,
}
"""What a JSON schema means by a type."""
GRACE = 1.0
"""Seconds that a coroutine may take longer than its time before its event loop counts as blocked."""


class ToolResult(NamedTuple):
    """What a call came to, as the message that the model is given."""

    name: str
    content: str
    failed: bool = False

    @property
    def message(self) -> Message:
        return {"role": "tool", "name": self.name, "content": self.content}


class Tool:
    """A function, plain or asynchronous, with its JSON schema.

    The schema is read from the signature and a docstring in Google's style. Raises ValueError where they don't say what
    a model needs to know.
    """

    def __init__(self, function: Callable[..., Any]):
        if not callable(function):
            raise ValueError(f"a tool is a function that the model may call, but {function!r} can't be called")
        self.function = function
        self.name = name_of(function)
        try:
            self.schema = get_json_schema(function)
            self.signature = inspect.signature(function)
        except Exception as error:  # whatever a docstring or a type hint leads to
            raise ValueError(_undescribed(self.name, error)) from error
        by_position = [p.name for p in self.signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
        if by_position:
            raise ValueError(f"tool {self.name} takes {by_position[0]} by position, but a model names its arguments")
        self.is_async = inspect.iscoroutinefunction(function)

    def bound_to(self, owner: Any) -> "Tool":
        """The same method of another instance."""
        tool = object.__new__(Tool)
        tool.__dict__ = self.__dict__ | {"function": getattr(owner, self.name)}
        return tool

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """Why the function can't be called with `arguments`; None if it can."""
        try:
            self.signature.bind(**arguments)
        except TypeError as error:
            return f"{self.name}: {error}"
        properties = self.schema["function"]["parameters"].get("properties", {})
        for name, value in arguments.items():
            if name in properties and not _fits(value, properties[name]):
                return f"{self.name}: {name} must be {_described(properties[name])}, not {json.dumps(value)[:80]}"
        return None


def _undescribed(name: str, error: Exception) -> str:
    return (
        f"tool {name} doesn't say what a model needs to know to call it ({type(error).__name__}: {error}). Write it as "
        "a function with a type for each argument and a docstring that says what it does and, under 'Args:', what each "
        "argument is"
    )


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is of the schema's type. What the schema doesn't say fits."""
    if value is None and schema.get("nullable"):
        return True
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "anyOf" in schema and not any(_fits(value, option) for option in schema["anyOf"]):
        return False
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    known = [TYPES[kind] for kind in types if kind in TYPES]
    if known and not any(test(value) for test in known):
        return False
    return not isinstance(value, list) or all(_fits(element, schema.get("items", {})) for element in value)


def _described(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {json.dumps(schema['enum'])}"
    if "anyOf" in schema:
        return " or ".join(map(_described, schema["anyOf"]))
    types = schema.get("type", "another value")
    types = [types] if isinstance(types, str) else list(types)
    inner = f" of {_described(schema['items'])}" if schema.get("items") else ""
    return " or ".join(types) + inner


class Toolbox:
    """The tools of one conversation by name. Raises ValueError for two of the same name."""

    def __init__(self, tools: Sequence[Tool]):
        self.tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self.tools:
                raise ValueError(f"there are two tools named {tool.name}; a call could mean either. Rename one")
            self.tools[tool.name] = tool

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the chat template tells the model."""
        return [tool.schema for tool in self.tools.values()]

    @property
    def by_name(self) -> dict[str, dict[str, Any]]:
        return {name: tool.schema for name, tool in self.tools.items()}

    def refusal(self, call: ToolCall) -> str | None:
        """Why a call can't be made; None if it can."""
        if call.error is not None or not isinstance(call.arguments, dict):
            return call.error
        if call.name not in self.tools:
            return (
                f"there is no tool {call.name!r}; there are {', '.join(self.tools)}.{suggestion(call.name, self.tools)}"
            )
        return self.tools[call.name].refusal(call.arguments)


class ToolRunner:
    """Makes calls, those of many conversations at once.

    `timeout` bounds each in seconds. Plain functions run in threads of their own then; what hangs outside Python is
    left behind there. An event loop that is blocked is left behind as well, and later calls have another.
    """

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None and timeout <= 0:
            raise ValueError(f"tool_timeout={timeout} leaves a tool no time; it must be above 0, or None for no limit")
        self.timeout = timeout
        self.loop: Loop | None = None
        self.failed: set[str] = set()
        """Tools whose first failure was reported."""

    def run(self, asked: Sequence[tuple[Toolbox, Sequence[ToolCall]]]) -> list[list[ToolResult]]:
        """What the calls of each conversation came to, in their order.

        Plain functions run first, one after the other; then all asynchronous ones together. A call that can't be made,
        raises, or takes too long comes to an error that the model is told.
        """
        results: list[list[Any]] = [[None] * len(calls) for _, calls in asked]
        later: list[tuple[int, int, ToolCall, Callable[[], Any]]] = []
        for i, (toolbox, calls) in enumerate(asked):
            for k, call in enumerate(calls):
                refusal = toolbox.refusal(call)
                if refusal is not None:
                    results[i][k] = _error(call, refusal)
                    continue
                tool = toolbox.tools[call.name]
                made = partial(tool.function, **call.arguments)  # type: ignore[arg-type]
                if tool.is_async:
                    later.append((i, k, call, made))
                else:
                    results[i][k] = self._outcome(call, partial(self._returned, made))
        waiting = [(i, k, call, self._submit(made())) for i, k, call, made in later]
        for i, k, call, future in waiting:
            results[i][k] = self._outcome(call, partial(self._awaited, future))
        return results

    def results(self, calls: Sequence[tuple[Callable[..., Any], Mapping[str, Any]]]) -> list[Any]:
        """What functions return for their arguments: plain ones in order, then coroutines together. Raises ValueError,
        with its name, for one whose time is over."""
        names = [name_of(function) for function, _ in calls]
        returned = [
            self._named(name, self._plain, partial(f, **given)) for name, (f, given) in zip(names, calls, strict=True)
        ]
        waiting = [self._submit(value) if inspect.iscoroutine(value) else None for value in returned]
        return [
            value if future is None else self._named(name, self._awaited, future)
            for name, value, future in zip(names, returned, waiting, strict=True)
        ]

    def _named(self, name: str, wait: Callable[[Any], Any], what: Any) -> Any:
        try:
            return wait(what)
        except TimeoutError as error:
            raise ValueError(f"{name} of an environment is {error} (tool_timeout)") from error

    def _plain(self, function: Callable[[], Any]) -> Any:
        """What a plain function returns."""
        return function() if self.timeout is None else within(function, self.timeout)

    def _returned(self, function: Callable[[], Any]) -> Any:
        """What a function returns, plain or an asynchronous one in a plain wrapper."""
        result = self._plain(function)
        return self._awaited(self._submit(result)) if inspect.iscoroutine(result) else result

    def _submit(self, coroutine: Any) -> Future[Any]:
        """Start a coroutine on the event loop that all share, so that what one keeps open serves the next."""
        self.loop = self.loop or Loop()
        return self.loop.submit(coroutine if self.timeout is None else self._bounded(coroutine))

    async def _bounded(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                return await coroutine
        except TimeoutError as error:
            raise self._late() if limit.expired() else error from None

    def _awaited(self, future: Future[Any]) -> Any:
        done, _ = wait([future], None if self.timeout is None else self.timeout + GRACE)
        if not done:
            self.loop = None
            raise self._late()
        return future.result()

    def _late(self) -> TimeoutError:
        return TimeoutError(f"not done within {self.timeout:g} s")

    def _outcome(self, call: ToolCall, function: Callable[[], Any]) -> ToolResult:
        try:
            return ToolResult(call.name, text_of_result(function(), call.name))
        except ImageResult:
            raise
        except (Exception, SystemExit) as error:  # the model may have had exit() run
            if call.name not in self.failed:
                self.failed.add(call.name)
                logger.warning(
                    "tool %s failed; the model is told so, later failures are only counted\n%s",
                    call.name,
                    _encodable(traceback.format_exc()),
                )
            return _error(call, f"{type(error).__name__}: {error}")


class ImageResult(ValueError):
    """A tool returned what no text can hold."""


def text_of_result(result: Any, name: str) -> str:
    """What a tool returned as text: dicts and lists as JSON, the texts of content blocks one below the other.

    Raises ImageResult for content blocks that are no text.
    """
    return _encodable(_text(result, name))


def _text(result: Any, name: str) -> str:
    if isinstance(result, list | tuple) and result and all(isinstance(b, Mapping) and "type" in b for b in result):
        others = sorted({str(block["type"]) for block in result} - {"text"})
        if others:
            raise ImageResult(f"tool {name} returned content of type {others[0]}; rollouts hold text only. Return text")
        return "\n".join(str(block.get("text", "")) for block in result)
    if isinstance(result, dict | list | tuple):
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


def _error(call: ToolCall, reason: str) -> ToolResult:
    return ToolResult(call.name, _encodable(json.dumps({"error": reason}, ensure_ascii=False)), failed=True)


def _encodable(text: str) -> str:
    """The text with question marks for halves of characters, which no tokenizer takes and no file."""
    return text.encode("utf-8", "replace").decode()
