"""What a completion says, whichever way it is written."""

import pytest

from strop.rewards.texts import conversation_text, text_of


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "hello"}], "hello"),
        ([{"content": "hello"}], "hello"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"text": "b"}]}], "ab"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([], ""),
        ([{"role": "tool", "content": "5"}], ""),
    ],
)
def test_text_of(completion, text):
    assert text_of(completion) == text


def test_after_a_tool_call_the_answer_counts_and_not_the_call():
    call = {"role": "assistant", "content": "I ask.", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    turns = [call, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "It is 5."}]
    assert text_of(turns) == "It is 5."
    assert conversation_text(turns) == "assistant: I ask.\n\ntool: 5\n\nassistant: It is 5."


@pytest.mark.parametrize("completion", [None, 5, [5], {"content": "hello"}])
def test_anything_else_is_refused(completion):
    with pytest.raises(ValueError, match="a completion is a text or a list of messages"):
        text_of(completion)
