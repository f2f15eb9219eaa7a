"""Rewards for form: TRL's numbers for thoughts, and what each form takes and refuses."""

import json
import pickle
import sys
from pathlib import Path

import pytest

from strop.rewards import formats, json_reward, regex_reward, think_format_reward, xml_reward

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "rewards.json").read_text())
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}


def both_ways(reward, text):
    """The reward of a text, which is the same for a message that says it."""
    plain, spoken = reward(completions=[text, [{"role": "assistant", "content": text}]])
    assert plain == spoken
    return plain


@pytest.mark.parametrize("case", GOLDEN["think_format_reward"])
def test_thoughts_as_in_trl(case):
    assert both_ways(think_format_reward, case["completion"]) == case["reward"]


@pytest.mark.parametrize(
    ("pattern", "whole", "text", "reward"),
    [
        (r"\d+", True, "42", 1),
        (r"\d+", True, "42 ", 0),
        (r"\d+", False, "it is 42 ", 1),
        (r"a.b", True, "a\nb", 1),
    ],
)
def test_patterns(pattern, whole, text, reward):
    assert both_ways(regex_reward(pattern, whole), text) == reward


def test_a_pattern_that_never_comes_to_an_end_does_not_match(monkeypatch):
    monkeypatch.setattr(formats, "SECONDS", 0.05)
    assert both_ways(regex_reward(r"(a|a|aa)+c?d"), "a" * 60 + "d!") == 0


@pytest.mark.parametrize(
    ("schema", "fenced", "text", "reward"),
    [
        (None, True, '{"n": 1}', 1),
        (None, True, " [1, 2]\n", 1),
        (None, True, "{'n': 1}", 0),
        (None, True, '{"n": 1} and more', 0),
        (None, True, '{"n": NaN}', 0),
        (None, True, "", 0),
        (None, True, "[" * 100_000, 0),
        (None, True, 'Here it is:\n```json\n{"n": 1}\n```\nDone.', 1),
        (None, False, '```json\n{"n": 1}\n```', 0),
        (SCHEMA, True, '{"n": 1}', 1),
        (SCHEMA, True, '{"n": 0}', 0),
        (SCHEMA, True, '{"n": "1"}', 0),
        (SCHEMA, True, "[]", 0),
    ],
)
def test_json(schema, fenced, text, reward):
    assert both_ways(json_reward(schema, fenced), text) == reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<reasoning>a < b</reasoning>\n<answer>4</answer>\n", 1),
        ("<reasoning></reasoning><answer></answer>", 1),
        ("<answer>4</answer><reasoning>a</reasoning>", 0),
        ("<reasoning>a</reasoning>", 0),
        ("So: <reasoning>a</reasoning><answer>4</answer>", 0),
        ("<reasoning>a</reasoning> so <answer>4</answer>", 0),
        ("<reasoning>a</reasoning><answer>4</answer><answer>5</answer>", 0),
        ("<reasoning>a<answer>4</answer></reasoning>", 0),
    ],
)
def test_xml(text, reward):
    assert both_ways(xml_reward(), text) == reward


def test_a_single_tag_may_be_written_as_a_text():
    assert xml_reward("a.b")(completions=["<a.b>1</a.b>", "<aXb>1</aXb>"]) == [1, 0]


@pytest.mark.parametrize("reward", [regex_reward("a+"), json_reward(SCHEMA), xml_reward()])
def test_they_travel_to_other_processes(reward):
    copy = pickle.loads(pickle.dumps(reward))
    assert copy(completions=["aa", '{"n": 3}']) == reward(completions=["aa", '{"n": 3}'])
    assert copy.__name__ == reward.__name__


def test_what_is_no_form_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"pattern='\(' is no regular expression"):
        regex_reward("(")
    with pytest.raises(ValueError, match="is no JSON schema"):
        json_reward({"type": "number of things"})
    for tags in ([], ["a", "a"], ["<a>"]):
        with pytest.raises(ValueError, match="must be different names of tags"):
            xml_reward(tags)
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ValueError, match=r"pip install strop\[rewards\]"):
        json_reward(SCHEMA)
