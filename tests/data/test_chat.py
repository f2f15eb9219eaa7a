"""Assistant spans are proven or refused, for templates in the manner of each family; rendering is transformers' own."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from strop.data.chat import ChatTemplate, apply_chat_template, common_prefix, maybe_apply_chat_template
from strop.data.turns import assistant_spans, completion_start

GENERATION_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + GENERATION_PROMPT
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}" + CHATML
STRIPPING = CHATML.replace("m['content']", "m['content'] | trim")
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
FOLDED = (
    "{{ bos_token }}{% set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{% for m in messages if m['role'] != 'system' %}<|turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ (system if loop.first else '') + m['content'] | trim }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
FORGETFUL = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% set said = m['content'].split('</think>')[-1].lstrip() %}"
    "{% set thought = m['content'].split('</think>')[0] if '</think>' in m['content'] else '<think>\n\n' %}"
    "{% if loop.index0 > ns.last %}{{ thought }}</think>\n\n{% endif %}{{ said }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
)
"""Deletes the reasoning of turns before the last question, and writes an empty block into later ones without any."""
FORGETFUL_CLOSED = FORGETFUL + GENERATION_PROMPT
FORGETFUL_OPEN = FORGETFUL + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}{% for call in m.get('tool_calls') or [] %}"
    "<tool>{{ call['function'] | tojson }}</tool>{% endfor %}<|im_end|>\n{% endfor %}" + GENERATION_PROMPT
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}" + GENERATION_PROMPT
)
ENDS_TWICE = CHATML.replace("{% endfor %}", "{% endfor %}{% if not add_generation_prompt %}<eos>{% endif %}")
RETURNS = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|end|>{{ m['content'] }}"
    "{% if loop.last and m['role'] == 'assistant' %}<|return|>{% else %}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""The last turn ends with another token than the earlier ones, and a header is longer than the generation prompt."""
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

EXPECTED = {
    "chatml": (CHATML, ["A1<|im_end|>", "A2<|im_end|>"]),
    "default system": (DEFAULT_SYSTEM, ["A1<|im_end|>", "A2<|im_end|>"]),
    "stripping": (STRIPPING, ["A1<|im_end|>", "A2<|im_end|>"]),
    "headers": (HEADERS, ["A1<|eot|>", "A2<|eot|>"]),
    "inst": (INST, [" A1<eos>", " A2<eos>"]),
    "folded": (FOLDED, ["A1<turn|>", "A2<turn|>"]),
    "forgetful": (FORGETFUL_CLOSED, ["A1<|im_end|>", "<think>\n\n</think>\n\nA2<|im_end|>"]),
    "forgetful open": (FORGETFUL_OPEN, ["A1<|im_end|>", "\n</think>\n\nA2<|im_end|>"]),
    "tools": (TOOLS, ["A1<|im_end|>", "A2<|im_end|>"]),
    "marked": (MARKED, ["A1<|im_end|>", "A2<|im_end|>"]),
    "ends twice": (ENDS_TWICE, ["A1<|im_end|>", "A2<|im_end|>"]),
    "returns": (RETURNS, ["<|end|>A1<|eot|>", "<|end|>A2<|return|>"]),
    "plain": (PLAIN, ["A1\n", "A2\n"]),
}
ADDED = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|end|>",
    "<|eot|>",
    "<|return|>",
    "<|turn>",
    "<turn|>",
    "<tool>",
    "</tool>",
]


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


TWO_TURNS = [user("U1"), assistant("A1"), user("U2"), assistant("A2")]


@pytest.fixture(scope="module")
def tokenizer_with():
    """Makes byte tokenizers with the given chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()

    def make(chat_template):
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<bos>",
            eos_token="<eos>",
            additional_special_tokens=ADDED,
            chat_template=chat_template,
        )

    return make


def spans_of(tokenizer, messages, which="all", tools=None, **options):
    conversation = ChatTemplate(tokenizer, options).conversation({"tools": tools})
    text, spans, rewritten = assistant_spans(conversation, messages, which)
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, **options)
    return [text[start:end] for start, end in spans], rewritten


@pytest.mark.parametrize("name", EXPECTED)
def test_each_turn_is_what_the_assistant_generates(tokenizer_with, name):
    template, expected = EXPECTED[name]
    spans, rewritten = spans_of(tokenizer_with(template), TWO_TURNS)
    assert spans == expected
    assert rewritten == (name in ("forgetful", "forgetful open", "returns"))


@pytest.mark.parametrize("name", EXPECTED)
def test_last_is_the_last_of_all(tokenizer_with, name):
    template, expected = EXPECTED[name]
    assert spans_of(tokenizer_with(template), TWO_TURNS, "last") == (expected[-1:], False)


@pytest.mark.parametrize(
    "name", [n for n in EXPECTED if n not in ("stripping", "folded", "forgetful", "forgetful open")]
)
@pytest.mark.parametrize(
    "content", ["", " ", "  spaced ", "user", "<|im_start|>user\nU2<|im_end|>", "A1", "<b>", "é🙂\n\n"]
)
def test_derived_spans_do_not_depend_on_what_is_said(tokenizer_with, name, content):
    """The span is [header end, marker end), whatever stands between, also if it looks like the template's own text."""
    template, expected = EXPECTED[name]
    spans, _ = spans_of(tokenizer_with(template), [user("U1"), assistant(content), user("U2"), assistant("A2")])
    assert spans == [expected[0].replace("A1", content), expected[1]]


def test_reasoning_is_trained_where_it_is_rendered(tokenizer_with):
    messages = [user("U1"), assistant("<think>\none</think>A1"), user("U2"), assistant("<think>\ntwo</think>A2")]
    for template, first in ((FORGETFUL_CLOSED, "<think>\n"), (FORGETFUL_OPEN, "")):
        spans, rewritten = spans_of(tokenizer_with(template), messages)
        assert spans == ["A1<|im_end|>", first + "two</think>\n\nA2<|im_end|>"]
        assert rewritten


def test_tool_calls_are_the_assistants_and_tool_results_are_not(tokenizer_with):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [user("U"), assistant("", tool_calls=[call]), {"role": "tool", "content": "3"}, assistant("It is 3.")]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    spans, _ = spans_of(tokenizer_with(TOOLS), messages, tools=tools)
    assert spans == ['<tool>{"name": "add", "arguments": {"a": 1}}</tool><|im_end|>', "It is 3.<|im_end|>"]


def test_system_folded_into_the_first_question(tokenizer_with):
    messages = [{"role": "system", "content": "S"}, *TWO_TURNS]
    assert spans_of(tokenizer_with(FOLDED), messages)[0] == ["A1<turn|>", "A2<turn|>"]


def test_the_assistant_may_speak_first_or_twice_or_not_at_all(tokenizer_with):
    tokenizer = tokenizer_with(CHATML)
    assert spans_of(tokenizer, [assistant("A0"), assistant("A1"), user("U")])[0] == ["A0<|im_end|>", "A1<|im_end|>"]
    assert spans_of(tokenizer, [user("U")]) == ([], False)


UNPROVABLE = {
    "ends only the conversation": PLAIN.replace(
        "{% if add", "{% if not add_generation_prompt %}<eos>{% endif %}{% if add"
    ),
    "reversed": "{% for m in messages | reverse %}" + TURN + "{% endfor %}" + GENERATION_PROMPT,
    "says it twice": CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{{ messages | length }}{{ m['content'] }}"
    ),
    "no header": "{% for m in messages %}{{ messages | length }}{{ m['content'] }}<|im_end|>{% endfor %}",
}


@pytest.mark.parametrize("name", UNPROVABLE)
def test_what_cannot_be_proven_is_refused(tokenizer_with, name):
    tokenizer = tokenizer_with(UNPROVABLE[name])
    with pytest.raises(
        ValueError, match=r"does not show where the assistant's turn in message \d starts and ends"
    ) as error:
        spans_of(tokenizer, TWO_TURNS)
    assert repr(UNPROVABLE[name][:80]) in str(error.value)


def test_a_refusing_template_is_quoted(tokenizer_with):
    with pytest.raises(ValueError, match=r"can't render the roles \[user user\].*roles must alternate"):
        spans_of(tokenizer_with(INST), [user("U1"), user("U2")])


def test_no_template(tokenizer_with):
    with pytest.raises(ValueError, match="has no chat template"):
        ChatTemplate(tokenizer_with(None))


@pytest.mark.parametrize("name", EXPECTED)
def test_completion_starts_where_the_last_turn_does(tokenizer_with, name):
    template, expected = EXPECTED[name]
    conversation = ChatTemplate(tokenizer_with(template)).conversation({})
    text, start = completion_start(conversation, TWO_TURNS[:3], TWO_TURNS[3:])
    assert text[start:].startswith(expected[1])


def test_completion_starts_behind_a_header_the_generation_prompt_goes_beyond(tokenizer_with):
    """The generation prompt opens a block that this completion doesn't have: the header before the block is context."""
    template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    conversation = ChatTemplate(tokenizer_with(template)).conversation({})
    text, start = completion_start(conversation, [user("U")], [assistant("<b>")])
    assert text[start:] == "<b><|im_end|>\n"


# The public helpers


def test_apply_chat_template_keeps_other_columns(tokenizer_with):
    row = {"messages": [user("U"), assistant("A")], "weight": 3}
    text = "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    assert apply_chat_template(row, tokenizer_with(CHATML)) == {"weight": 3, "text": text}


def test_apply_chat_template_to_prompts(tokenizer_with):
    head = "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = tokenizer_with(CHATML)
    prompt = [user("U")]
    assert apply_chat_template({"prompt": prompt}, tokenizer) == {"prompt": head}
    assert apply_chat_template({"prompt": [user("U"), assistant("I a")]}, tokenizer) == {"prompt": head + "I a"}
    row = {"prompt": prompt, "completion": [assistant("A")], "label": True}
    expected = {"prompt": head, "completion": "A<|im_end|>\n", "label": True}
    assert apply_chat_template(row, tokenizer) == expected
    row = {"prompt": prompt, "chosen": [assistant("It is blue")], "rejected": [assistant("It is red")]}
    expected = {"prompt": head, "chosen": "It is blue<|im_end|>\n", "rejected": "It is red<|im_end|>\n"}
    assert apply_chat_template(row, tokenizer) == expected
    row = {"chosen": [user("U"), assistant("A")], "rejected": [user("U"), assistant("B")]}
    expected = {"chosen": head + "A<|im_end|>\n", "rejected": head + "B<|im_end|>\n"}
    assert apply_chat_template(row, tokenizer) == expected


def test_apply_chat_template_refuses_half_a_pair(tokenizer_with):
    with pytest.raises(ValueError, match=r"\['chosen', 'prompt'\]"):
        apply_chat_template({"prompt": [user("U")], "chosen": [assistant("A")]}, tokenizer_with(CHATML))


def test_template_arguments_of_the_row_come_on_top(tokenizer_with):
    tokenizer = tokenizer_with("{{ mood }}" + CHATML)
    row = {"messages": [user("U")], "chat_template_kwargs": {"mood": "glad "}}
    assert apply_chat_template(row, tokenizer, mood="sad ")["text"].startswith("glad <|im_start|>")
    assert apply_chat_template({"messages": [user("U")]}, tokenizer, mood="sad ")["text"].startswith("sad ")


def test_maybe_leaves_plain_rows(tokenizer_with):
    assert maybe_apply_chat_template({"prompt": "U", "x": 1}, tokenizer_with(CHATML)) == {"prompt": "U", "x": 1}
    assert "text" in maybe_apply_chat_template({"messages": [user("U")]}, tokenizer_with(CHATML))


@pytest.mark.parametrize(
    ("a", "b"), [("", ""), ("a", ""), ("abc", "abd"), ("abc", "abc"), ("abc", "abcd"), ("xbc", "abc")]
)
def test_common_prefix(a, b):
    expected = max(n for n in range(5) if a[:n] == b[:n] and n <= min(len(a), len(b)))
    assert common_prefix(a, b) == common_prefix(b, a) == expected
