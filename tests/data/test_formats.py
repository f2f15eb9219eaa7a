"""Formats are told from rows, dialects become one, and what is wrong is named with its row."""

import pytest
from datasets import Dataset

from strop.data.formats import (
    detect,
    format_of,
    is_conversational,
    is_conversational_from_value,
    maybe_convert_to_chatml,
    messages_of,
    remove_none_values,
    roles_known_to,
    template_kwargs_of,
    tools_of,
    validate,
)

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "kind", "columns", "conversational"),
    [
        ({"text": "a"}, "text", ("text",), False),
        ({"messages": [USER, ANSWER]}, "messages", ("messages",), True),
        ({"conversations": [{"from": "human", "value": "q"}]}, "messages", ("conversations",), True),
        ({"conversations": [USER]}, "messages", ("conversations",), True),
        ({"prompt": "q", "completion": "a"}, "prompt_completion", ("prompt", "completion"), False),
        ({"prompt": [USER], "completion": [ANSWER]}, "prompt_completion", ("prompt", "completion"), True),
        ({"input_ids": [1], "labels": [1]}, "tokens", ("input_ids", "labels"), False),
        ({"text": "a", "prompt": "q", "completion": "a"}, "prompt_completion", ("prompt", "completion"), False),
        ({"prompt": "q", "messages": [USER, ANSWER]}, "messages", ("messages",), True),
        ({"text": "a", "prompt": None, "completion": None}, "text", ("text",), False),
    ],
)
def test_format_of(row, kind, columns, conversational):
    found = format_of(row)
    assert (found.kind, found.columns, found.conversational) == (kind, columns, conversational)


def test_the_text_field_may_have_any_name_and_hold_messages():
    assert format_of({"body": "a", "messages": [USER]}, "body").columns == ("body",)
    assert format_of({"chat": [USER, ANSWER]}, "chat").kind == "messages"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"foo": "bar"}, r"\['foo'\]; expected a text column.*dataset_text_field='foo'"),
        ({"prompt": "q"}, "a prompt but no completion"),
        ({"chosen": "q", "rejected": "r"}, "DPOTrainer"),
        ({"prompt": "q", "completion": [ANSWER]}, "prompt is str 'q' but completion is list"),
        ({"text": None}, "'text' is empty"),
        ({"text": 3}, "holds int 3"),
        ({"text": "a", "image": object()}, "'image' holds images"),
        ({"messages": [USER], "images": [1]}, "'images' holds images"),
    ],
)
def test_what_has_no_format_is_explained(row, message):
    with pytest.raises(ValueError, match=message):
        format_of(row)


def test_all_rows_are_looked_at():
    with pytest.raises(
        ValueError, match=r"train row 2 is prompt_completion in prompt \+ completion \(plain text\), but row 0 is text"
    ):
        detect([{"text": "a"}, {"text": "b"}, {"prompt": "q", "completion": "a"}])
    with pytest.raises(ValueError, match="eval row 1: no text to train on"):
        detect([{"text": "a"}, {"foo": "a"}], name="eval")
    with pytest.raises(ValueError, match="the train data set has no rows"):
        detect([])


def test_is_conversational():
    """Answers don't depend on which of several columns is looked at first."""
    assert is_conversational({"prompt": [USER]})
    assert is_conversational({"prompt": "q", "completion": [ANSWER]})
    assert is_conversational({"chosen": [{"role": "user"}]})
    for row in (
        {"prompt": "q"},
        {"prompt": []},
        {"text": "a"},
        {"conversations": [USER]},
        {"messages": [{"from": "x"}]},
    ):
        assert not is_conversational(row)


def test_is_conversational_from_value():
    assert is_conversational_from_value({"conversations": [{"from": "user", "value": "q"}]})
    for value in ([USER], "a", []):
        assert not is_conversational_from_value({"conversations": value})


def test_sharegpt_becomes_chatml():
    row = {
        "conversations": [{"from": who, "value": who} for who in ("system", "human", "gpt", "function", "judge")],
        "x": 1,
    }
    roles = ["system", "user", "assistant", "tool", "judge"]
    original = ["system", "human", "gpt", "function", "judge"]
    expected = [{"role": role, "content": content} for role, content in zip(roles, original, strict=True)]
    assert maybe_convert_to_chatml(row) == {"messages": expected, "x": 1}
    assert maybe_convert_to_chatml({"prompt": [{"from": "human", "value": "q"}]}) == {"prompt": [USER]}
    assert maybe_convert_to_chatml({"messages": [USER], "x": 1}) == {"messages": [USER], "x": 1}
    assert "conversations" in row


def test_none_keys_vanish_at_any_depth_but_not_from_lists():
    row = {"a": None, "b": [{"c": None, "d": 1}], "e": [None, 1], "f": {"g": None}}
    assert remove_none_values(row) == {"b": [{"d": 1}], "e": [None, 1], "f": {}}


def test_arrow_gives_back_the_messages_it_was_given():
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"b": [1, 2]}}}
    rows = [[USER, ANSWER], [USER, {**ANSWER, "tool_calls": [call]}], [USER, {**ANSWER, "tool_calls": [other]}]]
    stored = Dataset.from_list([{"messages": messages} for messages in rows])
    assert [messages_of(row["messages"]) for row in stored] == rows


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "is empty"),
        ("hello", "expected a list of messages, found str 'hello'"),
        ([USER, {"content": "a"}], "message 1 is dict {'content': 'a'}"),
        ([{"role": "asistant", "content": "a"}], "message 0 has the role 'asistant'.*did you mean 'assistant'"),
    ],
)
def test_messages_that_are_none(value, message):
    with pytest.raises(ValueError, match=message):
        messages_of(value)


def test_a_template_may_know_roles_of_its_own():
    judge = [{"role": "judge", "content": "a"}]
    with pytest.raises(ValueError, match="'judge'"):
        messages_of(judge, roles_known_to("{{ message.role }}"))
    assert messages_of(judge, roles_known_to("{% if message.role == 'judge' %}")) == judge


@pytest.mark.parametrize("tools", [[{"name": "f", "more": None}], '[{"name": "f"}]'])
def test_tools_as_list_or_json(tools):
    assert tools_of({"tools": tools}) == [{"name": "f"}]


def test_no_tools():
    assert [tools_of(row) for row in ({}, {"tools": None}, {"tools": []}, {"tools": ""})] == [None] * 4
    with pytest.raises(ValueError, match="'tools' is a string but no JSON"):
        tools_of({"tools": "[f]"})


def test_template_arguments():
    assert template_kwargs_of({"chat_template_kwargs": {"thinking": False, "other": None}}) == {"thinking": False}
    assert template_kwargs_of({"chat_template_kwargs": '{"thinking": false}'}) == {"thinking": False}
    assert template_kwargs_of({}) == {}


def test_validate_lists_everything_wrong():
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, {"role": "assistant", "content": " "}]},
        {"messages": [USER, {"role": "assistent", "content": "a"}]},
        {"messages": []},
        {"text": "a"},
    ]
    check = validate(rows)
    assert (check.rows, check.columns, check.ok, check.empty_answers) == (5, ("messages", "text"), False, [1])
    assert [error[:5] for error in check.errors] == ["row 2", "row 3", "row 4"]
    assert "did you mean 'assistant'" in str(check)
    assert "format: messages in messages (messages)" in str(check)
    assert validate(rows[:1]).ok
    assert validate([{"text": "a"}, {"text": ""}]).empty_answers == [1]
    assert validate([{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": 3}]).errors == [
        "row 1: expected strings in prompt and completion, found int 3"
    ]


def test_a_tool_call_is_an_answer():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    assert validate([{"messages": [USER, call]}]).ok
