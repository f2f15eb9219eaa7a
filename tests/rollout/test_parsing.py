"""Calls are read in the syntax that a chat template writes, whatever the model makes of it."""

import copy

import pytest
from transformers import PreTrainedTokenizerFast

from strop.data.chat import ChatTemplate
from strop.rollout.parsing import (
    PROBE_SCHEMA,
    SYNTAXES,
    ToolCall,
    argument_tags,
    bare_json,
    bracketed_calls,
    function_tags,
    read,
    syntax_of,
    tool_call_json,
)

HEAD = "{% for m in messages %}{% if m['role'] == 'assistant' %}"
BODY = "{{ m['content'] }}<|im_end|>\n{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = "{% for c in m.get('tool_calls', []) %}{% set f = c['function'] %}"


def template(calls: str, between: str = "") -> str:
    """A template in which `calls` writes the call f = {name, arguments}."""
    between = "{% if not loop.last %}" + between + "{% endif %}" if between else ""
    return f"{HEAD}<|im_start|>assistant\n{CALLS}{calls}{between}{{% endfor %}}{BODY}{TAIL}"


HERMES = template(
    '<tool_call>\n{"name": {{ f["name"] | tojson }}, "arguments": {{ f["arguments"] | tojson }}}\n</tool_call>', "\n"
)
LISTED = (
    f"{HEAD}<|im_start|>assistant\n{{% if m.get('tool_calls') %}}<tool_call>"
    f"{{{{ m['tool_calls'] | map(attribute='function') | list | tojson }}}}</tool_call>{{% endif %}}{BODY}{TAIL}"
)
FUNCTION_TAGS = template(
    '<tool_call>\n<function={{ f["name"] }}>\n{% for k, v in f["arguments"].items() %}<parameter={{ k }}>\n'
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>\n"
)
ARGUMENT_TAGS = template(
    '<tool_call>{{ f["name"] }}\n{% for k, v in f["arguments"].items() %}<arg_key>{{ k }}</arg_key>\n'
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
LLAMA = template(
    "{% if m['tool_calls'] | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ f["name"] }}", "parameters": {{ f["arguments"] | tojson }}}'
)
MISTRAL_LIST = (
    f"{HEAD}<|im_start|>assistant\n{{% if m.get('tool_calls') %}}[TOOL_CALLS] "
    f"{{{{ m['tool_calls'] | map(attribute='function') | list | tojson }}}}{{% endif %}}{BODY}{TAIL}"
)
MISTRAL_NAMED = template('[TOOL_CALLS]{{ f["name"] }}[ARGS]{{ f["arguments"] | tojson }}')
OWN_MARKS = template("<|call|>{{ f | tojson }}<|/call|>")
PYTHON = (
    f"{HEAD}<|im_start|>assistant\n{{% if m.get('tool_calls') %}}<|calls|>[{CALLS}{{{{ f['name'] }}}}("
    "{% for k, v in f['arguments'].items() %}{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %})"
    f"{{{{ '' if loop.last else ', ' }}}}{{% endfor %}}]<|/calls|>{{% endif %}}{BODY}{TAIL}"
)
THINKING = HERMES.replace("<|im_start|>assistant\n{% for c", "<|im_start|>assistant\n<think>\n\n</think>\n\n{% for c")

FAMILIES = {
    "hermes": (HERMES, tool_call_json),
    "a list in tags": (LISTED, tool_call_json),
    "hermes after a thought": (THINKING, tool_call_json),
    "function tags": (FUNCTION_TAGS, function_tags),
    "argument tags": (ARGUMENT_TAGS, argument_tags),
    "llama": (LLAMA, bare_json),
    "mistral, a list": (MISTRAL_LIST, bracketed_calls),
    "mistral, by name": (MISTRAL_NAMED, bracketed_calls),
}


@pytest.fixture
def conversation(bpe_tokenizer: PreTrainedTokenizerFast):
    def with_template(chat_template: str, *added: str):
        tokenizer = copy.deepcopy(bpe_tokenizer)
        tokenizer.add_tokens(list(added))
        tokenizer.chat_template = chat_template
        return ChatTemplate(tokenizer).conversation({"tools": [PROBE_SCHEMA]})

    return with_template


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tags_are_tokens", [False, True])
def test_the_syntax_of_a_template_is_found_by_a_round_trip(conversation, family, tags_are_tokens):
    chat_template, syntax = FAMILIES[family]
    added = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]") if tags_are_tokens else ()
    assert syntax_of(conversation(chat_template, *added)) is syntax


@pytest.mark.parametrize("chat_template", [OWN_MARKS, PYTHON])
def test_marks_of_a_template_s_own_are_learned(conversation, chat_template):
    syntax = syntax_of(conversation(chat_template, "<|call|>", "<|/call|>"))
    assert syntax not in SYNTAXES.values()
    opener, closer, calls = (
        ("<|call|>", "<|/call|>", '{"name": "add", "arguments": {"a": 1}}')
        if chat_template == OWN_MARKS
        else ("<|calls|>", "<|/calls|>", "[add(a=1)]")
    )
    reply = read(f"Well. {opener}{calls}{closer}", syntax, {})
    assert reply == ("Well.", [ToolCall("add", {"a": 1})])
    cut = read(f"{opener}{calls[:-2]}{closer}", syntax, {}).calls
    assert len(cut) == 1
    assert cut[0].error


def test_templates_that_write_no_calls_or_unknown_ones_are_refused_by_name(conversation, bpe_tokenizer):
    with pytest.raises(ValueError, match=r"chat template of .* writes no tool calls"):
        syntax_of(conversation(bpe_tokenizer.chat_template))
    with pytest.raises(ValueError, match=r"chat template of .* doesn't read: 'CALL look_up"):
        syntax_of(conversation(template("CALL {{ f['name'] }} WITH {{ f['arguments'] | tojson }} OVER")))


def test_parallel_calls_with_words_around_them():
    text = 'Let me.\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    assert tool_call_json(text, {}) == ("Let me.", [ToolCall("a", {}), ToolCall("b", {})])
    assert bare_json('{"name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {}}', {}).calls == [
        ToolCall("a", {"x": 1}),
        ToolCall("b", {}),
    ]
    assert bracketed_calls('[TOOL_CALLS]a[CALL_ID]x1y2[ARGS]{"x": 1}b{}', {}).calls == [
        ToolCall("a", {"x": 1}),
        ToolCall("b", {}),
    ]


def test_arguments_may_be_a_string_of_json_and_calls_be_wrapped_as_functions():
    wrapped = '{"type": "function", "function": {"name": "a", "arguments": "{\\"x\\": [1]}"}}'
    assert tool_call_json(f"<tool_call>{wrapped}</tool_call>", {}).calls == [ToolCall("a", {"x": [1]})]


def test_python_tags_hold_json_or_calls():
    assert bare_json('<|python_tag|>{"name": "a", "parameters": {}}', {}).calls == [ToolCall("a", {})]
    assert bare_json('<|python_tag|>search.call(query="cats", n=2)', {}).calls == [
        ToolCall("search", {"query": "cats", "n": 2})
    ]
    assert bare_json("<|python_tag|>__import__('os').system('ls')", {}).calls[0].error


def test_bare_texts_are_typed_by_the_schema():
    properties = {"word": {"type": "string"}, "count": {"type": "integer"}, "flag": {"type": "boolean"}}
    schemas = {"f": {"function": {"parameters": {"properties": properties}}}}
    values = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in {"word": "7", "count": "7", "flag": "True", "more": "x y"}.items()
    )
    call = function_tags(f"<tool_call><function=f>{values}</function></tool_call>", schemas).calls[0]
    assert call.arguments == {"word": "7", "count": 7, "flag": True, "more": "x y"}


@pytest.mark.parametrize(
    ("syntax", "text", "name"),
    [
        (tool_call_json, '<tool_call>{"name": "f", "arguments": {"a": 3</tool_call>', "f"),
        (tool_call_json, '<tool_call>{"name": "f", "arguments": {}}', "f"),
        (tool_call_json, "<tool_call>f(3)</tool_call>", "unknown"),
        (tool_call_json, '<tool_call>{"name": "f", "arguments": [3]}</tool_call>', "f"),
        (tool_call_json, '<tool_call>{"arguments": {}}</tool_call>', "unknown"),
        (tool_call_json, f"<tool_call>{'[' * 5000}</tool_call>", "unknown"),
        (tool_call_json, f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "f"),
        (tool_call_json, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "f"),
        (bare_json, r"<|python_tag|>f.call(a='\ud800')", "unknown"),
        (function_tags, "<tool_call><function=f>a=3</function></tool_call>", "unknown"),
        (argument_tags, "<tool_call>f(3)</tool_call>", "unknown"),
        (bracketed_calls, '[TOOL_CALLS]f[ARGS]{"a": ', "unknown"),
        (bare_json, '{"name": "f", "parameters": {"a": 3}', "f"),
    ],
)
def test_what_can_t_be_read_is_a_call_with_an_error(syntax, text, name):
    (call,) = syntax(text, {}).calls
    assert (call.name, bool(call.error)) == (name, True)
    assert isinstance(call.arguments, str)


@pytest.mark.parametrize("syntax", SYNTAXES.values())
@pytest.mark.parametrize("text", ["It is 12.", "", '{"a": 1}', "[1, 2]", "if a < b: return", "a name"])
def test_texts_without_calls_stay_as_they_are(syntax, text):
    assert read(text, syntax, {}) == (text, [])


def test_what_is_called_in_a_thought_is_not_called():
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert read(f"<think>{call}</think>No.", tool_call_json, {}).calls == []
    assert read(f"<think>Perhaps {call}", tool_call_json, {}).calls == []
    assert read(f"<think>Yes.</think>{call}", tool_call_json, {}) == ("<think>Yes.</think>", [ToolCall("f", {})])
