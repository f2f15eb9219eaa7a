"""Rows to the tokens of a prompt, and back to what rewards read."""

import pytest

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
