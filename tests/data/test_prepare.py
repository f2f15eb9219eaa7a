"""Preparation end to end: goldens, masks, long rows, counts, packing, cache and errors."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from strop.data.arguments import DataArguments, PackingArguments, TargetArguments
from strop.data.prepare import prepare
from strop.data.recipe import RowMaker

GOLDENS = json.loads((Path(__file__).parent.parent / "goldens" / "sft_prepared.json").read_text())
IM_END = 4
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that deletes the reasoning of all turns but the last."""


@dataclass
class Args(DataArguments, PackingArguments, TargetArguments):
    seed: int = 0


def golden_tokenizer(chat_template=GOLDENS["chat_template"]):
    backend = Tokenizer.from_str(json.dumps(GOLDENS["tokenizer"]))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **names)


@pytest.fixture
def tokenizer():
    return golden_tokenizer()


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def rows_of(dataset):
    return [dict(row) for row in dataset]


def prepared(rows, tokenizer, formatting_func=None, packing=False, **settings):
    dataset, report = prepare(rows, tokenizer, Args(**settings), formatting_func=formatting_func, packing=packing)
    return rows_of(dataset), report


def trained(row, tokenizer):
    """The trained text of a row, in pieces."""
    pieces, last = [], False
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (-100, token)
        pieces += [[]] if label != -100 and not last else []
        last = label != -100
        if last:
            pieces[-1].append(token)
    return [tokenizer.decode(piece) for piece in pieces]


# The values of TRL 1.16, where they are right


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=lambda case: case["name"])
def test_golden(case):
    template = GOLDENS["chat_template_with_markers" if case["markers"] else "chat_template"]
    formatting_func = (lambda row: row["a"] + row["b"]) if case["name"] == "formatting_func" else None
    rows, _ = prepared(case["rows"], golden_tokenizer(template), formatting_func, **case["args"])
    assert [row["input_ids"] for row in rows] == case["input_ids"]
    assert [row["labels"] for row in rows] == case["labels"]
    if "seq_lengths" in case:
        assert [row["seq_lengths"] for row in rows] == case["seq_lengths"]


@pytest.mark.parametrize("case", [case for case in GOLDENS["cases"] if case["markers"]], ids=lambda case: case["name"])
def test_derived_spans_equal_markers(case):
    rows, _ = prepared(case["rows"], golden_tokenizer(), **case["args"])
    assert [row["labels"] for row in rows] == case["labels"]


# Masks


def test_conversations_are_what_the_template_makes_of_them(tokenizer):
    messages = [user("Where is the sky?"), assistant("</s> Hello <s>"), user("Hello"), assistant("blue")]
    rows, _ = prepared([{"messages": messages}], tokenizer)
    expected = tokenizer.apply_chat_template(messages)["input_ids"]
    assert rows == [{"input_ids": expected, "labels": expected}]


def test_assistant_only_trains_both_turns_and_their_markers(tokenizer):
    """ChatML by hand: <|im_start|>user \\n Hello <|im_end|> \\n; the markers of the user's turns are not trained."""
    messages = [user("Hello"), assistant("blue"), user("Hello"), assistant("Hello")]
    ((row,), report) = prepared([{"messages": messages}], tokenizer, assistant_only_loss=True)
    assert trained(row, tokenizer) == ["blue<|im_end|>", "Hello<|im_end|>"]
    ends = [label for token, label in zip(row["input_ids"], row["labels"], strict=True) if token == IM_END]
    assert ends == [-100, IM_END, -100, IM_END]
    assert report.trained_tokens == sum(label != -100 for label in row["labels"])


def test_completion_only_and_assistant_only_intersect(tokenizer):
    row = {"prompt": [user("Hello"), assistant("Hello"), user("Hello")], "completion": [assistant("blue")]}
    for completion_only, expected in ((None, ["blue<|im_end|>"]), (False, ["Hello<|im_end|>", "blue<|im_end|>"])):
        settings = {"assistant_only_loss": True, "completion_only_loss": completion_only}
        ((made,), _) = prepared([row], tokenizer, **settings)
        assert trained(made, tokenizer) == expected


def test_turns_last_and_expand_are_rendered_as_at_inference():
    tokenizer = golden_tokenizer(FORGETFUL)
    messages = [user("U1"), assistant("T1</think>A1"), user("U2"), assistant("T2</think>A2")]
    rows, report = prepared([{"messages": messages}], tokenizer, assistant_only_loss=True, train_on_turns="expand")
    texts = [tokenizer.decode(row["input_ids"]) for row in rows]
    assert texts == [tokenizer.apply_chat_template(messages[:k], tokenize=False) for k in (2, 4)]
    assert [trained(row, tokenizer) for row in rows] == [["T1</think>A1<|im_end|>"], ["T2</think>A2<|im_end|>"]]
    assert (report.rows_in, report.rows_out, report.rewritten_rows) == (1, 2, 0)
    rows, _ = prepared([{"messages": messages}], tokenizer, assistant_only_loss=True, train_on_turns="last")
    assert [trained(row, tokenizer) for row in rows] == [["T2</think>A2<|im_end|>"]]


def test_rewritten_history_is_trained_as_rendered_with_one_warning(caplog):
    tokenizer = golden_tokenizer(FORGETFUL)
    messages = [user("U1"), assistant("T1</think>A1"), user("U2"), assistant("T2</think>A2")]
    rows, report = prepared([{"messages": messages}] * 3, tokenizer, assistant_only_loss=True)
    assert trained(rows[0], tokenizer) == ["A1<|im_end|>", "T2</think>A2<|im_end|>"]
    assert report.rewritten_rows == 3
    assert sum("renders earlier turns otherwise" in message for message in caplog.messages) == 1


def test_template_arguments_of_one_row_change_that_row_only():
    tokenizer = golden_tokenizer("{{ mood }}" + GOLDENS["chat_template"])
    row = {"messages": [user("Hello"), assistant("blue")]}
    rows = [{**row, "chat_template_kwargs": {"mood": "sad"}}, {**row, "chat_template_kwargs": {"mood": None}}]
    made, _ = prepared(rows, tokenizer, chat_template_kwargs={"mood": "glad"})
    texts = [tokenizer.decode(row["input_ids"]) for row in made]
    assert [text.split("<|im_start|>")[0] for text in texts] == ["sad", "glad"]


def test_ragged_messages_render_as_the_dicts_they_were(tokenizer):
    template = GOLDENS["chat_template"].replace("message['content']", "message.content + (message.calls|string)")
    tokenizer = golden_tokenizer("{{ tools | tojson if tools else '' }}" + template)
    first = [user("Hello"), {**assistant("blue"), "calls": [{"name": "f", "arguments": {"a": 1}}]}]
    second = [user("Hello"), {**assistant("Hello"), "calls": [{"name": "g", "arguments": {"b": [1, 2]}}]}]
    rows, _ = prepared(
        [{"messages": first, "tools": None}, {"messages": second, "tools": '[{"name": "g"}]'}], tokenizer
    )
    for row, messages, tools in zip(rows, (first, second), (None, [{"name": "g"}]), strict=True):
        text = tokenizer.decode(row["input_ids"])
        assert text == tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert "None" not in text


def test_merged_boundaries_are_counted_in_one_warning(tokenizer, caplog):
    rows = [{"prompt": "The sk", "completion": "y is blue."}] * 2 + [{"prompt": "The sky", "completion": " is blue."}]
    _, report = prepared(rows, tokenizer)
    assert report.merged_boundaries == 2
    assert sum("in 2 of 3 rows one token holds the end of the prompt" in message for message in caplog.messages) == 1


# Tokens


def test_tokens_pass_through_bit_identical(tokenizer):
    rows = [{"input_ids": [5, 6, 2, 2], "labels": [-100, 6, -100, 7]}, {"input_ids": [9, 9], "labels": [9, 9]}]
    assert prepared(rows, tokenizer)[0] == rows


def test_masks_of_tokens(tokenizer):
    row = {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}
    assert prepared([row], tokenizer)[0][0]["labels"] == [-100, 6, -100, 8]
    assert prepared([row], tokenizer, completion_only_loss=False)[0][0]["labels"] == [5, 6, -100, 8]


def test_tokens_and_labels_of_different_length(tokenizer):
    rows = [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [5, 6], "labels": [5]}]
    with pytest.raises(ValueError, match="train row 1: has 2 input_ids but 1 labels"):
        prepared(rows, tokenizer)


# Rows that are too long


TEN_TWENTY_FORTY = [{"input_ids": list(range(3, 3 + n))} for n in (10, 20, 40)]


def test_truncate_counts_what_is_lost(tokenizer):
    rows, report = prepared(TEN_TWENTY_FORTY, tokenizer, max_length=16)
    assert [len(row["input_ids"]) for row in rows] == [10, 16, 16]
    assert rows[1]["input_ids"][0] == 3
    expected = {
        "rows_in": 3,
        "rows_out": 3,
        "truncated_rows": 2,
        "dropped_rows": 0,
        "tokens_lost": 4 + 24,
        "tokens": 42,
    }
    percentiles = {"length_p50": 20, "length_p90": 40, "length_p99": 40, "length_max": 40}
    assert report.to_dict().items() >= (expected | percentiles | {"trained_tokens": 42 - 3}).items()
    assert "3 rows in, 3 out, 2 truncated, 42 tokens, 39 of them trained, 28 lost; lengths p50 20" in str(report)


def test_keep_end(tokenizer):
    rows, _ = prepared(TEN_TWENTY_FORTY, tokenizer, max_length=16, truncation_mode="keep_end")
    assert rows[2]["input_ids"] == list(range(27, 43))


def test_drop(tokenizer):
    rows, report = prepared(TEN_TWENTY_FORTY, tokenizer, max_length=16, overlong="drop")
    assert [len(row["input_ids"]) for row in rows] == [10]
    assert (report.dropped_rows, report.rows_out, report.tokens_lost) == (2, 1, 60)


def test_split(tokenizer):
    rows, report = prepared(TEN_TWENTY_FORTY, tokenizer, max_length=16, overlong="split")
    assert [len(row["input_ids"]) for row in rows] == [10, 16, 4, 16, 16, 8]
    assert [token for row in rows[3:] for token in row["input_ids"]] == list(range(3, 43))
    assert (report.split_rows, report.rows_out, report.tokens_lost) == (2, 6, 0)
    assert report.to_dict()["length_max"] == 40


def test_error_names_the_row(tokenizer):
    with pytest.raises(ValueError, match="train row 1: has 20 tokens, more than max_length=16"):
        prepared(TEN_TWENTY_FORTY, tokenizer, max_length=16, overlong="error")


def test_a_truncated_row_gets_no_eos(tokenizer):
    ((row,), _) = prepared([{"text": "The sky is blue."}], tokenizer, max_length=4)
    assert row["input_ids"][-1] != tokenizer.eos_token_id


def test_the_oldest_turns_go_first(tokenizer):
    """Each question and answer of "Hello" is 19 tokens: the header of the assistant alone is 10 letters."""
    turns = [user("Hello"), assistant("Hello")] * 3 + [user("Hello"), assistant("blue")]
    messages = [{"role": "system", "content": "Hello"}, *turns]
    kept = tokenizer.apply_chat_template([messages[0], *messages[-4:]])["input_ids"]
    whole = tokenizer.apply_chat_template(messages)["input_ids"]
    settings = {"assistant_only_loss": True, "train_on_turns": "last", "max_length": len(kept) + 2}
    ((row,), report) = prepared([{"messages": messages}], tokenizer, **settings)
    assert row["input_ids"] == kept
    assert trained(row, tokenizer) == ["blue<|im_end|>"]
    assert (report.truncated_rows, report.tokens_lost) == (1, len(whole) - len(kept))
    assert report.to_dict()["length_max"] == len(whole)


# Rows without a target


LONG, SHORT = ([{"input_ids": [7] * n + [8] * 4, "completion_mask": [0] * n + [1] * 4}] for n in (20, 6))


@pytest.mark.parametrize("packing", [False, True])
def test_untrainable_rows_are_dropped_and_counted(tokenizer, caplog, packing):
    rows, report = prepared(LONG + SHORT, tokenizer, packing=packing, max_length=16)
    assert [row["input_ids"] for row in rows] == [SHORT[0]["input_ids"]]
    assert (report.untrainable_rows, report.rows_out) == (1, 1)
    assert any("1 of 2 rows had no trainable token after truncation" in message for message in caplog.messages)


@pytest.mark.parametrize("packing", [False, True])
def test_nothing_left(tokenizer, packing):
    with pytest.raises(ValueError, match="within max_length=16: the longest prompt has 20 tokens"):
        prepared(LONG * 2, tokenizer, packing=packing, max_length=16)


def test_nothing_left_after_dropping(tokenizer):
    with pytest.raises(ValueError, match=r'2 of 2 are longer than max_length=16.*overlong="drop"'):
        prepared(LONG * 2, tokenizer, max_length=16, overlong="drop")


def test_a_label_on_the_first_token_trains_nothing(tokenizer):
    rows, report = prepared(
        [{"input_ids": [5, 6], "labels": [5, -100]}, {"input_ids": [5, 6], "labels": [5, 6]}], tokenizer
    )
    assert rows == [{"input_ids": [5, 6], "labels": [5, 6]}]
    assert (report.untrainable_rows, report.trained_tokens) == (1, 1)


def test_a_conversation_without_an_answer_is_no_reason_to_stop(tokenizer):
    rows = [{"messages": [user("Hello")]}, {"messages": [user("Hello"), assistant("blue")]}]
    made, report = prepared(rows, tokenizer, assistant_only_loss=True)
    assert (len(made), report.untrainable_rows) == (1, 1)


# Packing


def test_masks_are_cut_alike(tokenizer):
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, 4, 5]},
        {"input_ids": [6, 7, 8], "labels": [-100, 7, 8]},
    ]
    made, report = prepared(rows, tokenizer, packing=True, max_length=8)
    ids, labels = [1, 2, 3, 4, 5, 6, 7, 8], [-100, -100, 3, 4, 5, -100, 7, 8]
    assert made == [{"input_ids": ids, "labels": labels, "seq_lengths": [5, 3]}]
    assert (report.packed_rows, report.rows_out, report.trained_tokens) == (1, 2, 5)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_preparing_twice_is_preparing_once(tokenizer, strategy, shuffle, packing):
    args = Args(max_length=8, packing_strategy=strategy, shuffle_dataset=shuffle)
    once, first = prepare([{"text": "The sky is blue."}, {"text": "Hello"}] * 5, tokenizer, args, packing=packing)
    twice, second = prepare(once, tokenizer, args, packing=packing)
    assert rows_of(twice) == rows_of(once)
    assert ("seq_lengths" in once.column_names) == packing
    assert (second.truncated_rows, second.untrainable_rows, second.tokens_lost) == (0, 0, 0)
    assert first.tokens == second.tokens


def test_bfd_split_keeps_what_bfd_would_cut(tokenizer):
    for strategy, tokens in (("bfd", 10 + 16 + 16), ("bfd_split", 70), ("wrapped", 70)):
        rows, _ = prepared(TEN_TWENTY_FORTY, tokenizer, packing=True, packing_strategy=strategy, max_length=16)
        assert sum(len(row["input_ids"]) for row in rows) == tokens


def test_packing_needs_a_length(tokenizer):
    with pytest.raises(ValueError, match="max_length is None"):
        prepared(TEN_TWENTY_FORTY, tokenizer, packing=True, max_length=None)


# Kinds of data sets


class Torch(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index >= 3:
            raise IndexError
        return {"input_ids": torch.tensor([5, 6 + index])}


def test_torch_data_sets(tokenizer):
    rows, _ = prepared(Torch(), tokenizer)
    assert [row["input_ids"] for row in rows] == [[5, 6], [5, 7], [5, 8]]


def test_splits_and_transforms_are_refused(tokenizer):
    with pytest.raises(ValueError, match=r"the train data set is the name 'rows.jsonl'; load it first"):
        prepare("rows.jsonl", tokenizer, Args())
    with pytest.raises(ValueError, match=r"splits \['test', 'train'\]"):
        prepare({"train": [], "test": []}, tokenizer, Args())
    dataset = Dataset.from_list([{"text": "a"}]).with_transform(lambda batch: batch)
    with pytest.raises(ValueError, match="has a transform"):
        prepare(dataset, tokenizer, Args())


def test_skip_prepare_dataset(tokenizer):
    dataset = Dataset.from_list([{"anything": 1}])
    assert prepare(dataset, tokenizer, Args(dataset_kwargs={"skip_prepare_dataset": True}))[0] is dataset
    with pytest.raises(ValueError, match="'skip_prepare'"):
        prepare(dataset, tokenizer, Args(dataset_kwargs={"skip_prepare": True}))


# A function that writes the text


def test_what_the_function_returns_is_tokenised(tokenizer):
    """Whatever columns there are, the text gets its EOS; a list makes several rows."""
    row = {"messages": [user("Hello"), assistant("blue")], "prompt": "x", "completion": "y"}
    for result in ("The sky", ["The sky", "Hello"]):
        rows, report = prepared([row], tokenizer, lambda row, result=result: result, dataset_text_field="body")
        texts = [tokenizer.decode(made["input_ids"]) for made in rows]
        assert texts == [text + "</s>" for text in ([result] if isinstance(result, str) else result)]
        assert report.rows_in == 1


def test_functions_that_cannot_mean_what_they_say(tokenizer):
    with pytest.raises(ValueError, match="tokenised already"):
        prepared([{"input_ids": [5, 6]}], tokenizer, lambda row: "a")
    with pytest.raises(ValueError, match=r"train row 0: formatting_func returned list '\[3\]'"):
        prepared([{"a": "b"}, {"a": "c"}], tokenizer, lambda row: [3])
    with pytest.raises(ValueError, match="written for batches"):
        prepared([{"a": "long"}], tokenizer, lambda batch: [f"> {text}" for text in batch["a"]])
    with pytest.raises(ValueError, match="completion_only_loss=True needs to know"):
        prepared([{"a": "b"}], tokenizer, lambda row: "a", completion_only_loss=True)


# What is asked for must be there


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"text": "a"}, {"completion_only_loss": True}, "completion_only_loss=True, but the rows are text in text"),
        ({"input_ids": [5, 6]}, {"completion_only_loss": True}, "have no completion"),
        ({"text": "a"}, {"assistant_only_loss": True}, "assistant_only_loss=True, but the rows are text"),
        ({"prompt": "a", "completion": "b"}, {"assistant_only_loss": True}, "nobody is told apart"),
        ({"input_ids": [5, 6]}, {"assistant_only_loss": True}, "nobody is told apart"),
        ({"text": "a"}, {"train_on_turns": "last"}, "set assistant_only_loss=True"),
        ({"text": "a"}, {"overlong": "truncat"}, "did you mean 'truncate'"),
        ({"text": "a"}, {"truncation_mode": "keep"}, "keep_start, keep_end"),
        ({"text": "a"}, {"max_length": 0}, "max_length=0"),
        ({"text": "a"}, {"eos_token": "<nope>"}, "'<nope>' is not in the vocabulary"),
        ({"prompt": "a"}, {}, "a prompt but no completion"),
        ({"input_ids": [[5, 6]]}, {}, r"row 0: its input_ids begin with \[5, 6\]"),
        ({"body": "a", "messages": []}, {"dataset_text_field": "boby"}, "did you mean 'body'"),
        ({"text": "a"}, {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs={'x': 1} would have no effect"),
        ({"messages": []}, {}, "row 0: the list of messages is empty"),
        ({"messages": [{"role": "usr", "content": "a"}]}, {}, "did you mean 'user'"),
    ],
)
def test_bad_input(tokenizer, row, settings, message):
    with pytest.raises(ValueError, match=message):
        prepared([row], tokenizer, **settings)


def test_a_bad_row_far_down_is_named(tokenizer):
    rows = [{"messages": [user("Hello"), assistant("blue")]}] * 150 + [{"messages": [{"role": "usr", "content": "a"}]}]
    with pytest.raises(ValueError, match="train row 150: message 0 has the role 'usr'"):
        prepared(rows, tokenizer)


def test_a_template_that_refuses_a_row_is_quoted_with_it():
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    )
    rows = [{"messages": [user("Hello")]}, {"messages": [{"role": "system", "content": "a"}]}]
    with pytest.raises(
        ValueError, match=r"train row 1: the chat template .* can't render the roles \[system\].*no system"
    ):
        prepared(rows, golden_tokenizer(template))


CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("bad", "good", "settings"),
    [
        ({"prompt": "a", "completion": " "}, {"prompt": "a", "completion": "b"}, {}),
        ({"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "b"}, {"completion_only_loss": False}),
        ({"messages": [user("a"), assistant("")]}, {"messages": [user("a"), assistant("b")]}, {}),
        (
            {"messages": [user("a"), assistant("b"), user("a"), assistant(None)]},
            {"messages": [user("a"), assistant(""), user("a"), assistant("b")]},  # its first answer is context
            {"assistant_only_loss": True, "train_on_turns": "last"},
        ),
        (
            {"prompt": [user("a")], "completion": [assistant(" ")]},
            {"prompt": [user("a"), assistant(""), user("a")], "completion": [assistant("b")]},
            {},
        ),
    ],
)
def test_an_empty_answer_is_no_target(tokenizer, bad, good, settings):
    rows = [good] * 120 + [bad]
    with pytest.raises(ValueError, match=r"train row 120: .*(empty|nothing in it).*dataset\.filter"):
        prepared(rows, tokenizer, **settings)
    assert len(prepared([good], tokenizer, **settings)[0]) == 1


def test_a_call_of_a_tool_is_an_answer():
    template = GOLDENS["chat_template"].replace("message['content']", "(message['content'] or 'f()')")
    rows = [{"messages": [user("a"), CALL]}]
    assert prepared(rows, golden_tokenizer(template), assistant_only_loss=True)[1].rows_out == 1


def test_a_last_answer_stays_supervised_under_a_long_question(tokenizer):
    """8 tokens are kept. An answer that fits keeps its end and as much of the question; of one that doesn't, 4 tokens
    are trained after 4 of the question."""
    settings = {"assistant_only_loss": True, "train_on_turns": "last"}
    question = user("The sky is blue. " * 10)
    for answer, num_trained in (("a", None), ("The sky is blue. " * 10, 4)):
        rows = [{"messages": [question, assistant(answer)]}]
        whole = prepared(rows, tokenizer, **settings)[0][0]
        cut, report = prepared(rows, tokenizer, max_length=8, **settings)
        trained_ids = [label for label in whole["labels"] if label != -100]
        kept_ids = [label for label in cut[0]["labels"] if label != -100]
        assert len(cut[0]["input_ids"]) == 8
        assert kept_ids == trained_ids[:num_trained]
        assert report.truncated_rows == 1
        assert report.tokens_lost == len(whole["input_ids"]) - 8


def test_a_formatting_function_that_fails_is_named_with_its_row(tokenizer):
    rows = [{"a": "b"}] * 120 + [{"a": None}]
    with pytest.raises(ValueError, match=r"train row 120: formatting_func failed with TypeError.*a dict of \['a'\]"):
        prepared(rows, tokenizer, lambda row: "> " + row["a"])
    with pytest.raises(ValueError, match="train row 0: formatting_func returned NoneType"):
        prepared(rows, tokenizer, lambda row: None)


def test_no_eos_token(tokenizer, caplog):
    tokenizer.eos_token = None
    rows, _ = prepared([{"text": "The sky"}], tokenizer)
    assert tokenizer.decode(rows[0]["input_ids"]) == "The sky"
    assert any("won't learn to stop" in message for message in caplog.messages)


# Cache


@pytest.fixture
def on_disk(tmp_path):
    Dataset.from_list([{"text": "The sky is blue."}, {"text": "Hello"}]).save_to_disk(str(tmp_path / "rows"))
    return lambda: Dataset.load_from_disk(str(tmp_path / "rows"))


@pytest.fixture
def calls(monkeypatch):
    """How many batches have been tokenised."""
    seen = []
    follow = RowMaker.__call__

    def counted(self, batch, indices):
        seen.append(len(indices))
        return follow(self, batch, indices)

    monkeypatch.setattr(RowMaker, "__call__", counted)
    return seen


def test_the_second_start_tokenises_nothing(on_disk, tokenizer, calls):
    first, report = prepare(on_disk(), tokenizer, Args())
    assert calls == [2]
    second, again = prepare(on_disk(), golden_tokenizer(), Args())
    assert calls == [2]
    assert rows_of(first) == rows_of(second)
    assert report.to_dict() == again.to_dict()


def test_prepared_rows_are_only_counted(tokenizer, calls):
    rows = [{"input_ids": [5, 6, 7], "labels": [5, -100, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}]
    made, report = prepare(Dataset.from_list([*rows, rows[0]]).select([1, 0]), tokenizer, Args(max_length=3))
    assert calls == []
    assert rows_of(made) == rows[::-1]
    assert (report.rows_in, report.rows_out, report.tokens, report.trained_tokens) == (2, 2, 5, 2)
    for row, left in (({"input_ids": [5], "labels": [5]}, 2), ({"input_ids": [5] * 4, "labels": [5] * 4}, 3)):
        assert len(prepare([*rows, row], tokenizer, Args(max_length=3))[0]) == left
    assert calls == [3, 3]


def test_whatever_matters_is_in_the_key(on_disk, calls):
    def with_added_token():
        tokenizer = golden_tokenizer()
        tokenizer.add_tokens(AddedToken("sky"))
        return tokenizer

    variants = [
        (golden_tokenizer(), Args(), None),
        (golden_tokenizer(FORGETFUL), Args(), None),
        (with_added_token(), Args(), None),
        (golden_tokenizer(), Args(max_length=3), None),
        (golden_tokenizer(), Args(max_length=3, truncation_mode="keep_end"), None),
        (golden_tokenizer(), Args(max_length=3, overlong="split"), None),
        (golden_tokenizer(), Args(eos_token="<|im_end|>"), None),
        (golden_tokenizer(), Args(), lambda row: row["text"]),
        (golden_tokenizer(), Args(), lambda row: row["text"] + "!"),
    ]
    for number, (tokenizer, args, formatting_func) in enumerate(variants, start=1):
        prepare(on_disk(), tokenizer, args, formatting_func=formatting_func)
        assert len(calls) == number
    for tokenizer, args, formatting_func in variants:
        prepare(on_disk(), tokenizer, replace(args, seed=7), formatting_func=formatting_func)
    assert len(calls) == len(variants)


def test_without_a_cache(on_disk, tokenizer, calls):
    datasets.disable_caching()
    try:
        first, second = (rows_of(prepare(on_disk(), tokenizer, Args())[0]) for _ in range(2))
    finally:
        datasets.enable_caching()
    assert first == second
    assert calls == [2, 2]


def test_worker_processes_change_nothing(on_disk, tokenizer):
    alone, report = prepare(on_disk(), tokenizer, Args(max_length=3))
    together, counted = prepare(on_disk(), tokenizer, Args(max_length=3, dataset_num_proc=2))
    assert rows_of(alone) == rows_of(together)
    assert report.to_dict() == counted.to_dict()


def test_one_line_for_the_log(tokenizer, caplog):
    with caplog.at_level(logging.INFO):
        prepared([{"text": "Hello"}], tokenizer)
    lines = [message for message in caplog.messages if message.startswith("train:")]
    assert lines == ["train: 1 rows in, 1 out, 2 tokens, 1 of them trained; lengths p50 2, p90 2, p99 2, max 2"]
