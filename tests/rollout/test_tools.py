"""Functions as tools: refused before a run where a model could not know them, and never a reason for it to end."""

import asyncio
import json
import logging
import threading
import time
from typing import Literal

import pytest

from strop.rollout import tools
from strop.rollout.parsing import ToolCall
from strop.rollout.tools import Tool, Toolbox, ToolRunner


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: A number.
        b: Another one.
    """
    return a * b


def weather(city: str, unit: Literal["C", "F"] = "C", days: list[int] | None = None) -> dict:
    """Tells the weather.

    Args:
        city: Where.
        unit: Degrees.
        days: Days from today.
    """
    return {"city": city, "degrees": 7, "unit": unit}


def fails(a: int) -> int:
    """Fails.

    Args:
        a: A number.
    """
    raise KeyError("bad")


async def late(seconds: float) -> str:
    """Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"{seconds:g} s later"


BOX = Toolbox([Tool(f) for f in (multiply, weather, fails, late)])


def outcome(name: str, arguments: dict | str, error: str | None = None):
    ((result,),) = ToolRunner().run([(BOX, [ToolCall(name, arguments, error)])])
    return result


def test_schemas_come_from_signatures_and_docstrings():
    schema = Tool(multiply).schema["function"]
    assert schema["name"] == "multiply"
    assert schema["parameters"]["properties"]["a"] == {"type": "integer", "description": "A number."}
    assert schema["parameters"]["required"] == ["a", "b"]


def undocumented(a: int):
    return a


def untyped(a):
    """Does it.

    Args:
        a: A number.
    """


def by_position(a: int, /):
    """Does it.

    Args:
        a: A number.
    """


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (undocumented, "tool undocumented doesn't say .*no docstring"),
        (lambda a: a, "no docstring"),
        (untyped, "tool untyped doesn't say"),
        (by_position, "tool by_position takes a by position"),
        (3, "3 can't be called"),
    ],
)
def test_functions_that_a_model_could_not_know_are_refused(function, reason):
    with pytest.raises(ValueError, match=reason):
        Tool(function)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools named multiply"):
        Toolbox([Tool(multiply), Tool(multiply)])


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("multiply", {"a": 3, "b": 4}, "12"),
        ("weather", {"city": "Bodø"}, '{"city": "Bodø", "degrees": 7, "unit": "C"}'),
        ("weather", {"city": "Bodø", "days": [1]}, '{"city": "Bodø", "degrees": 7, "unit": "C"}'),
        ("late", {"seconds": 0}, "0 s later"),
    ],
)
def test_results_are_text(name, arguments, content):
    assert outcome(name, arguments) == (name, content, False)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("nope", {}, "there is no tool 'nope'; there are multiply, weather, fails, late."),
        ("multply", {}, "Did you mean 'multiply'?"),
        ("multiply", {"x": 3}, "multiply: missing a required argument: 'a'"),
        ("multiply", {"a": 3, "b": 4, "x": 3}, "multiply: got an unexpected keyword argument 'x'"),
        ("multiply", {"a": "3", "b": 4}, 'multiply: a must be integer, not "3"'),
        ("multiply", {"a": True, "b": 4}, "multiply: a must be integer, not true"),
        ("weather", {"city": "Bodø", "unit": "K"}, 'weather: unit must be one of ["C", "F"], not "K"'),
        ("weather", {"city": "Bodø", "days": ["x"]}, "weather: days must be array of integer"),
        ("fails", {"a": 3}, "KeyError: 'bad'"),
    ],
)
def test_calls_that_come_to_nothing_are_told_as_json(name, arguments, reason):
    result = outcome(name, arguments)
    assert result.failed
    assert reason in json.loads(result.content)["error"]


def test_a_call_that_could_not_be_read_is_told_why():
    assert json.loads(outcome("multiply", '{"a":', "no JSON").content) == {"error": "no JSON"}


def test_the_first_failure_of_a_tool_is_reported(caplog):
    runner = ToolRunner()
    with caplog.at_level(logging.WARNING, "strop"):
        runner.run([(BOX, [ToolCall("fails", {"a": 1}), ToolCall("fails", {"a": 1})])])
    assert [record.getMessage().split(";")[0] for record in caplog.records] == ["tool fails failed"]


def test_asynchronous_tools_of_all_conversations_wait_together_and_results_keep_their_order():
    calls = [ToolCall("late", {"seconds": 0.2}), ToolCall("multiply", {"a": 3, "b": 4})]
    start = time.monotonic()
    results = ToolRunner().run([(BOX, calls)] * 3)
    assert time.monotonic() - start < 0.5
    assert [[result.content for result in row] for row in results] == [["0.2 s later", "12"]] * 3


def test_plain_tools_run_in_the_order_of_rows_and_calls():
    seen = []

    def note(word: str) -> None:
        """Notes.

        Args:
            word: What.
        """
        seen.append(word)

    box = Toolbox([Tool(note)])
    ToolRunner().run([(box, [ToolCall("note", {"word": w}) for w in words]) for words in ("ab", "cd")])
    assert seen == ["a", "b", "c", "d"]


def test_halves_of_characters_are_replaced():
    def half(fail: bool) -> str:
        """Tells half a character.

        Args:
            fail: As an error.
        """
        if fail:
            raise ValueError("\ud800")
        return "\ud800"

    box = Toolbox([Tool(half)])
    ((told, failed),) = ToolRunner().run([(box, [ToolCall("half", {"fail": fail}) for fail in (False, True)])])
    assert (told.content, failed.content) == ("?", '{"error": "ValueError: ?"}')


def stuck() -> str:
    """Never comes back."""
    while True:
        time.sleep(0.01)


async def astuck() -> str:
    """Never comes back."""
    await asyncio.sleep(60)


async def patient() -> str:
    """Has given up itself."""
    raise TimeoutError("the server is silent")


def leaves() -> str:
    """Ends the program."""
    raise SystemExit(3)


async def aleaves() -> str:
    """Ends the program."""
    raise SystemExit(3)


def wrapped() -> str:
    """A coroutine in a plain wrapper."""
    return astuck()


LATE = "TimeoutError: not done within 0.2 s"


@pytest.mark.parametrize(
    ("function", "timeout", "reason"),
    [
        (stuck, 0.2, LATE),
        (astuck, 0.2, LATE),
        (wrapped, 0.2, LATE),
        (patient, 0.2, "TimeoutError: the server is silent"),
        (patient, None, "TimeoutError: the server is silent"),
        (leaves, 5.0, "SystemExit: 3"),
        (leaves, None, "SystemExit: 3"),
        (aleaves, 5.0, "RuntimeError: SystemExit: 3"),
        (aleaves, None, "RuntimeError: SystemExit: 3"),
    ],
)
def test_tools_that_hang_or_end_the_program_are_told_to_the_model(function, timeout, reason):
    box, runner = Toolbox([Tool(f) for f in (function, multiply, late)]), ToolRunner(timeout)
    calls = [ToolCall(function.__name__, {}), ToolCall("multiply", {"a": 3, "b": 4}), ToolCall("late", {"seconds": 0})]
    for _ in range(2):
        ((result, other, third),) = runner.run([(box, calls)])
        assert (other.content, third.content) == ("12", "0 s later")
        assert (result.failed, json.loads(result.content)) == (True, {"error": reason})


def test_a_tool_that_blocks_the_event_loop_leaves_later_ones_another(monkeypatch):
    monkeypatch.setattr(tools, "GRACE", 0.1)
    release = threading.Event()

    async def blocks() -> str:
        """Awaits nothing."""
        release.wait(30)
        return "at last"

    box, runner = Toolbox([Tool(blocks), Tool(late)]), ToolRunner(0.2)
    ((result,),) = runner.run([(box, [ToolCall("blocks", {})])])
    assert json.loads(result.content) == {"error": LATE}
    ((result,),) = runner.run([(box, [ToolCall("late", {"seconds": 0})])])
    assert result.content == "0 s later"
    release.set()


def test_a_reset_that_hangs_is_named():
    for function in (stuck, astuck):
        with pytest.raises(ValueError, match=rf"{function.__name__} of an environment is not done within 0.2 s"):
            ToolRunner(0.2).results([(multiply, {"a": 1, "b": 2}), (function, {})])
    assert ToolRunner(5.0).results([(multiply, {"a": 1, "b": 2}), (late, {"seconds": 0})]) == [2, "0 s later"]
    with pytest.raises(ValueError, match="tool_timeout=0 leaves"):
        ToolRunner(0)


def test_content_blocks_of_text_are_text_and_images_are_refused():
    def look(kind: str) -> list:
        """Looks.

        Args:
            kind: At what.
        """
        return [{"type": "text", "text": "a cat"}, {"type": kind, "text": "asleep"}]

    runner, box = ToolRunner(), Toolbox([Tool(look)])
    assert runner.run([(box, [ToolCall("look", {"kind": "text"})])])[0][0].content == "a cat\nasleep"
    with pytest.raises(ValueError, match="tool look returned content of type image"):
        runner.run([(box, [ToolCall("look", {"kind": "image"})])])
