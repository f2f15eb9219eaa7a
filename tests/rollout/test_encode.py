"""Rows to the tokens of a prompt, and back to what rewards read."""

import copy

import pytest
from datasets import Dataset

from strop.rollout.encode import Encoder


def test_a_row_may_have_tokens_alone(word_tokenizer):
    """As TRL's PPO takes them: padded on the left or not, with the mask that tells."""
    encoder = Encoder(word_tokenizer)
    ids = word_tokenizer("ice is cold").input_ids
    padded = {"input_ids": [0, 0, *ids], "attention_mask": [0, 0, *[1] * len(ids)]}
    for row in ({"input_ids": ids}, padded):
        assert encoder.prompt_ids(row) == ids
        assert encoder.prompt_words(row) == "ice is cold"
        assert encoder.words(row, word_tokenizer("and fire").input_ids) == "and fire"
    assert Encoder(word_tokenizer, max_prompt_length=2).prompt_ids(padded) == ids[-2:]


def test_a_prompt_comes_before_tokens(word_tokenizer):
    row = {"prompt": "ice", "input_ids": [9, 9]}
    assert Encoder(word_tokenizer).prompt_ids(row) == word_tokenizer("ice").input_ids
    assert Encoder(word_tokenizer).prompt_words(row) == "ice"


@pytest.mark.parametrize("row", [{}, {"prompt": None, "input_ids": []}, {"prompt": ""}])
def test_a_row_without_a_prompt_is_refused(word_tokenizer, row):
    with pytest.raises(ValueError, match="the prompt"):
        Encoder(word_tokenizer).prompt_ids(row)


ASKED = [{"role": "user", "content": "is ice cold"}]
OPTIONAL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>' if thinks else 'short:' }}{% endif %}"
)


@pytest.fixture
def templated(bpe_tokenizer):
    tokenizer = copy.deepcopy(bpe_tokenizer)
    tokenizer.chat_template = OPTIONAL
    return tokenizer


def test_options_of_a_row_come_on_top_of_those_of_the_run(templated):
    encoder = Encoder(templated, {"thinks": True})
    texts = [
        templated.decode(encoder.prompt_ids({"prompt": ASKED, **row}))
        for row in ({}, {"chat_template_kwargs": {"thinks": False}}, {"chat_template_kwargs": None})
    ]
    asked = "<|im_start|>user\nis ice cold<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [asked + "<think>", asked + "short:", asked + "<think>"]


def test_no_tools_are_none(templated):
    encoder = Encoder(templated)
    without = encoder.prompt_ids({"prompt": ASKED})
    assert encoder.prompt_ids({"prompt": ASKED, "tools": []}) == without
    assert encoder.prompt_ids({"prompt": ASKED, "tools": None}) == without


def test_long_prompts_are_cut_dropped_or_refused_by_ids(word_tokenizer, caplog):
    rows = [{"prompt": "ice is cold"}, {"prompt": "ice"}]
    whole = word_tokenizer("ice is cold").input_ids
    assert Encoder(word_tokenizer, max_prompt_length=2).prompt_ids(rows[0]) == whole[-2:]
    dropping = Encoder(word_tokenizer, max_prompt_length=2, overlong="drop")
    assert dropping.fitting(Dataset.from_list(rows), "train").to_list() == rows[1:]
    assert "1 of 2 prompts are longer than 2 tokens" in caplog.text
    with pytest.raises(ValueError, match="every prompt of the train data set"):
        dropping.fitting(Dataset.from_list(rows[:1]), "train")
    refusing = Encoder(word_tokenizer, max_prompt_length=2, overlong="error")
    with pytest.raises(ValueError, match=f"has {len(whole)} tokens, more than max_prompt_length=2"):
        refusing.fitting(Dataset.from_list(rows), "train")


@pytest.mark.parametrize("keep", [False, True])
def test_rewards_read_special_tokens_if_they_are_to(templated, keep):
    ids = templated("so<|im_end|>", add_special_tokens=False).input_ids
    encoder = Encoder(templated, keep_special_tokens=keep)
    text = "so<|im_end|>" if keep else "so"
    assert encoder.words({"prompt": "why"}, ids) == text
    assert encoder.words({"prompt": ASKED}, ids) == [{"role": "assistant", "content": text}]
