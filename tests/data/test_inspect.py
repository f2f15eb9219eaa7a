"""What is shown is what is trained: marks come from the collator, and token texts add up to the row's text."""

import copy
import io
import json
from dataclasses import dataclass
from html.parser import HTMLParser

import pytest
from datasets import Dataset
from rich.console import Console

from strop.data.arguments import DataArguments, PackingArguments, TargetArguments
from strop.data.collate import TokenRow, collate
from strop.data.inspect import (
    as_html,
    as_json,
    as_rich,
    as_text,
    count_padding,
    explain,
    explain_raw,
    from_byte_alphabet,
    stop_state,
    stop_token_ids,
    token_texts,
    visible,
)
from strop.data.prepare import prepare

END = 2  # <|im_end|>, the tokenizers' end-of-sequence token
PAD = 0  # <|endoftext|>


def row_of(tokenizer, *pieces, **columns):
    """A prepared row of (text, is trained) pieces."""
    ids, labels = [], []
    for text, is_trained in pieces:
        piece = tokenizer(text)["input_ids"]
        ids += piece
        labels += piece if is_trained else [-100] * len(piece)
    return {"input_ids": ids, "labels": labels, **columns}


def chat_row(tokenizer):
    return row_of(
        tokenizer,
        ("<|im_start|>user\nHow many legs?<|im_end|>\n<|im_start|>assistant\n", False),
        ("eight legs<|im_end|>", True),
        ("\n", False),
    )


def test_marks_are_the_collators_mask(bpe_tokenizer):
    row = chat_row(bpe_tokenizer)
    (shown,) = explain([row], bpe_tokenizer, [0])
    batch = collate([TokenRow(row["input_ids"], row["labels"])], "packed", PAD)
    assert shown.trained == batch["completion_mask"][0].tolist()
    assert "".join(t for t, on in zip(shown.tokens, shown.trained, strict=True) if on) == "eight legs<|im_end|>"
    assert shown.num_trained == sum(label != -100 for label in row["labels"])
    assert (shown.stops, shown.warnings) == (["trained"], [])


def test_the_first_token_of_each_segment_is_context_because_nothing_predicts_it(word_tokenizer):
    a, b = word_tokenizer("fire is hot")["input_ids"], word_tokenizer("ice is")["input_ids"]
    row = {"input_ids": a + b, "labels": a + b, "seq_lengths": [3, 2]}
    (shown,) = explain([row], word_tokenizer, [0])
    assert shown.trained == [0, 1, 1, 0, 1]
    assert shown.spans == [(0, 3), (3, 5)]
    assert shown.marks == ["context", "trained", "trained", "context", "trained"]
    assert shown.share == 3 / 5


TEXT = "What is 1 + 2?\n\tnaïve café — ½ 🙂 日本"


def test_byte_level_tokens_spell_the_text(bpe_tokenizer):
    ids = bpe_tokenizer(TEXT)["input_ids"]
    tokens = token_texts(bpe_tokenizer, ids)
    assert len(tokens) == len(ids)
    assert b"".join(unescape(token) for token in tokens).decode() == TEXT


def unescape(token):
    """The bytes of a token whose broken bytes are written \\xNN."""
    parts = token.split("\\x")
    return parts[0].encode() + b"".join(bytes.fromhex(part[:2]) + part[2:].encode() for part in parts[1:])


def test_parts_of_a_character_are_escaped():
    # "日" is e6 97 a5; in the byte alphabet e6 is æ, the unprintable 97 and the printable a5 are others
    assert from_byte_alphabet("Ġæ") == " \\xe6"
    assert from_byte_alphabet("æĹ¥") == "日"


def test_special_and_word_tokens_are_shown_as_they_are(word_tokenizer):
    assert token_texts(word_tokenizer, [1, END, *word_tokenizer("fire unheard")["input_ids"]]) == [
        "<|im_start|>",
        "<|im_end|>",
        "fire",
        "<unk>",
    ]
    assert token_texts(word_tokenizer, [9999]) == ["<no token 9999>"]


@pytest.mark.parametrize(
    ("ids", "trained", "expected"),
    [
        ([5, 6, END], [0, 1, 1], "trained"),
        ([5, 6, END, 7], [0, 1, 1, 0], "trained"),  # a template's newline may follow
        ([5, 6, END, 7], [0, 1, 1, 1], "trained"),  # and be trained
        ([5, 6, END], [0, 1, 0], "not trained"),
        ([5, 6, 7], [0, 1, 1], "absent"),
        ([END, 5, 6], [0, 1, 1], "absent"),  # that one ended the prompt's turn
        ([5, END], [0, 0], "nothing trained"),
    ],
)
def test_whether_the_model_learns_to_stop(ids, trained, expected):
    tokens = [{5: "a", 6: "b", 7: "\n", END: "<|im_end|>"}[token] for token in ids]
    assert stop_state(ids, trained, tokens, {END}) == expected


def test_the_templates_end_of_turn_stops_an_answer_like_the_end_of_sequence(bpe_tokenizer):
    tokenizer = copy.deepcopy(bpe_tokenizer)
    assert stop_token_ids(tokenizer) == [END]
    tokenizer.eos_token = "<|endoftext|>"  # as base models have it whose template is ChatML
    assert stop_token_ids(tokenizer) == [PAD, END]
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert stop_token_ids(tokenizer) == [PAD]
    tokenizer.chat_template = None
    assert stop_token_ids(tokenizer) == [PAD]


def test_padding_is_told_from_a_stop_token_of_the_same_id(bpe_tokenizer, word_tokenizer):
    assert count_padding([5, END, PAD, PAD], [0, 1, 0, 0], bpe_tokenizer) == 2
    assert count_padding([5, 6, 7], [0, 1, 1], bpe_tokenizer) == 0
    assert count_padding([PAD, PAD], [0, 0], bpe_tokenizer) == 2
    bpe_tokenizer.pad_token = "<|im_end|>"
    try:
        assert count_padding([5, END, END, END], [0, 1, 0, 0], bpe_tokenizer) == 2
        assert count_padding([5, END, END, END], [0, 0, 0, 0], bpe_tokenizer) == 2
        assert count_padding([5, END], [0, 0], bpe_tokenizer) == 0
    finally:
        bpe_tokenizer.pad_token = "<|endoftext|>"


def test_padding_is_marked(bpe_tokenizer):
    (shown,) = explain([{"input_ids": [5, 6, PAD, PAD], "labels": [-100, 6, -100, -100]}], bpe_tokenizer, [0])
    assert shown.marks == ["context", "trained", "pad", "pad"]
    assert shown.warnings == ["ends in 2 padding tokens: the trainer pads by itself, so they cost time only"]


def test_suspicious_rows_say_so(word_tokenizer):
    is_, unknown = word_tokenizer("is")["input_ids"], word_tokenizer("unheard")["input_ids"]
    word_tokenizer.bos_token = "<|im_start|>"
    try:
        rows = [
            {"input_ids": [1, 1, *is_, END, END], "labels": [-100, -100, *is_, END, END]},
            {"input_ids": [*unknown, *is_], "labels": [-100, -100]},
            {"input_ids": [*is_, *is_, *is_, *is_], "labels": [-100, *is_, -100, -100], "seq_lengths": [2, 2]},
        ]
        doubled, empty, packed = explain(rows, word_tokenizer, range(3))
    finally:
        word_tokenizer.bos_token = None
    assert [w.split(":")[0] for w in doubled.warnings] == [
        "begins with '<|im_start|>' twice",
        "the stop token '<|im_end|>' is trained twice at the end",
    ]
    assert empty.warnings[0].startswith("no trained token")
    assert packed.warnings == ["no trained token in segment 1: it costs time and teaches nothing"]


def test_unknown_tokens_are_counted(word_tokenizer):
    word_tokenizer.unk_token = "<unk>"
    (shown,) = explain([row_of(word_tokenizer, ("fire unheard unseen", True))], word_tokenizer, [0])
    word_tokenizer.unk_token = None
    assert shown.warnings == ["2 tokens are '<unk>': text that the tokenizer can't spell"]


@dataclass
class Arguments(DataArguments, PackingArguments, TargetArguments):
    pass


def test_raw_rows_stand_beside_what_became_of_them(word_tokenizer):
    raw = [
        {"prompt": "is ice", "completion": " cold"},
        {"prompt": "is fire hot", "completion": " fire is hot"},
        {"prompt": "how how how how how how", "completion": " hot"},
    ]
    args = Arguments(max_length=5)
    kept, cut, gone = explain_raw(raw, word_tokenizer, args, range(3))
    assert [row.raw for row in (kept, cut, gone)] == raw
    assert (kept.tokens, kept.trained) == (["is", "ice", "cold", "<|im_end|>"], [0, 0, 1, 1])
    # 3 + 3 tokens and the end of the sequence, of which 5 fit: "fire is" and no stop token
    assert (cut.trained, cut.num_cut, cut.stops) == ([0, 0, 0, 1, 1], 2, ["absent"])
    assert (gone.tokens, gone.warnings) == ([], ["dropped: no token to train is left of it within max_length"])
    assert "TRUNCATED: 2 tokens lost" in as_text([cut])
    assert 'raw      completion: " fire is hot"' in as_text([cut])


def test_what_is_shown_of_raw_rows_is_what_prepare_makes(bpe_tokenizer, chat_rows):
    args = Arguments(assistant_only_loss=True, train_on_turns="expand")
    prepared, _ = prepare(Dataset.from_list(chat_rows), bpe_tokenizer, args)
    shown = explain_raw(chat_rows, bpe_tokenizer, args, range(len(chat_rows)))
    assert [row.index for row in shown] == [0, 1, 1, 2]
    assert [row.input_ids for row in shown] == prepared["input_ids"][:]
    assert json.loads(as_json(shown))["rows"][2]["labels"] == prepared["labels"][2]


def test_an_index_beyond_the_data_is_refused(bpe_tokenizer):
    with pytest.raises(ValueError, match="no row 3: the data set has 1 rows, 0 to 0"):
        explain([chat_row(bpe_tokenizer)], bpe_tokenizer, [3])


def test_json_arrays_are_aligned_and_equal_the_labels(bpe_tokenizer):
    row = chat_row(bpe_tokenizer)
    document = json.loads(as_json(explain([row], bpe_tokenizer, [0]), report={"rows_in": 1}))
    (shown,) = document["rows"]
    assert document["report"] == {"rows_in": 1}
    assert shown["input_ids"] == row["input_ids"]
    assert shown["labels"] == row["labels"]
    assert shown["trained"] == [int(label != -100) for label in row["labels"]]
    assert len(shown["tokens"]) == shown["num_tokens"] == len(row["input_ids"])


def test_text_shows_runs_or_every_token(bpe_tokenizer):
    rows = explain([chat_row(bpe_tokenizer)], bpe_tokenizer, [0])
    lines = as_text(rows).splitlines()
    assert "stop token trained" in lines[0]
    assert lines[1:] == [
        "  context  <|im_start|>user↵",
        "           How·many·legs?<|im_end|>↵",
        "           <|im_start|>assistant↵",
        "  trained  eight·legs<|im_end|>",
        "  context  ↵",
    ]
    listed = as_text(rows, show_tokens=True).splitlines()[1:]
    assert [line.split()[:3] for line in listed] == [
        [mark, str(i), str(token)] for i, (mark, token) in enumerate(zip(rows[0].marks, rows[0].input_ids, strict=True))
    ]


def test_control_characters_are_made_visible():
    assert visible("a b\tc\nd\x1b[31m\u200b") == "a·b→c↵\nd\\x1b[31m\\u200b"


def test_packed_rows_show_their_segments(word_tokenizer):
    a = word_tokenizer("fire is hot")["input_ids"]
    text = as_text(explain([{"input_ids": a + a, "labels": a + a, "seq_lengths": [3, 3]}], word_tokenizer, [0]))
    assert "2 segments of 3, 3" in text
    assert "  -- segment 1: 3 tokens, stop token absent\n" in text


class Spans(HTMLParser):
    def __init__(self):
        super().__init__()
        self.marks, self.texts, self.outside = [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.outside += [value for name, value in attributes.items() if name in ("src", "href")]
        if tag == "span" and "title" in attributes:
            self.marks.append(attributes["class"])
            self.texts.append("")

    def handle_data(self, data):
        if self.texts and self.lasttag == "span":
            self.texts[-1] += data


def test_html_holds_every_token_and_needs_nothing_else(bpe_tokenizer):
    rows = explain([chat_row(bpe_tokenizer)], bpe_tokenizer, [0])
    page = Spans()
    page.feed(as_html(rows, report={"rows_in": 1}))
    assert page.marks == rows[0].marks
    assert page.texts[0] == "<|im_start|>"
    assert page.outside == []


def test_colour_only_adds_styles(bpe_tokenizer):
    rows = explain([chat_row(bpe_tokenizer)], bpe_tokenizer, [0])
    page = as_rich(rows)
    assert "eight·legs<|im_end|>" in page.plain
    console = Console(force_terminal=True, color_system="standard", width=200, file=io.StringIO(), record=True)
    console.print(page)
    assert "\x1b[1;32m" in console.export_text(styles=True)  # bold green: something is trained
