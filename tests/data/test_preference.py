"""Both sides of a pair keep their prompt, and together rebuild what was written."""

import pytest
from datasets import Dataset

from strop.data.arguments import PreferenceArguments
from strop.data.collate import Example
from strop.data.preference import PreferenceCollator, prepare_preference


def prepared(rows, tokenizer, max_length=None):
    return prepare_preference(Dataset.from_list(rows), tokenizer, PreferenceArguments(max_length=max_length))[0]


def test_prompt_and_sides_rebuild_the_texts(bpe_tokenizer):
    row = {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green."}
    pair = prepared([row], bpe_tokenizer)[0]
    for side in ("chosen", "rejected"):
        text = bpe_tokenizer.decode(pair["prompt_ids"] + pair[f"{side}_ids"])
        assert text == row["prompt"] + row[side] + bpe_tokenizer.eos_token


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue", "The sky is green", "The sky is"),
        ("The sky is", "The sky is blue", "The sky is"),  # an answer that ends there: the token that ends it is left
        ("blue", "green", ""),
    ],
)
def test_what_both_sides_begin_with_is_the_prompt(bpe_tokenizer, chosen, rejected, prompt):
    pair = prepared([{"chosen": chosen, "rejected": rejected}], bpe_tokenizer)[0]
    assert bpe_tokenizer.decode(pair["prompt_ids"]) == prompt
    assert bpe_tokenizer.decode(pair["prompt_ids"] + pair["rejected_ids"]) == rejected + bpe_tokenizer.eos_token


def test_conversations_share_their_first_messages(bpe_tokenizer):
    question = {"role": "user", "content": "Is ice hot?"}
    sides = {
        s: [question, {"role": "assistant", "content": text}] for s, text in [("chosen", "No."), ("rejected", "Yes.")]
    }
    pair = prepared([sides], bpe_tokenizer)[0]
    rendered = bpe_tokenizer.apply_chat_template(sides["chosen"], tokenize=False)
    assert bpe_tokenizer.decode(pair["prompt_ids"] + pair["chosen_ids"]) == rendered
    assert bpe_tokenizer.decode(pair["prompt_ids"]).endswith("<|im_start|>assistant\n")


def test_completions_are_cut_and_never_emptied(bpe_tokenizer):
    row = {"prompt": "What is the sky?", "chosen": " The sky is blue.", "rejected": " Green."}
    whole = prepared([row], bpe_tokenizer)[0]
    length = len(whole["prompt_ids"])
    cut = prepared([row], bpe_tokenizer, max_length=length + 2)[0]
    assert cut["prompt_ids"] == whole["prompt_ids"]
    assert (cut["chosen_ids"], cut["rejected_ids"]) == (whole["chosen_ids"][:2], whole["rejected_ids"][:2])
    with pytest.raises(ValueError, match=f"no row .* has room for .* longest prompt has {length} tokens"):
        prepared([row], bpe_tokenizer, max_length=length)


def test_preparing_twice_is_preparing_once(bpe_tokenizer):
    once = prepared([{"prompt": "a", "chosen": " b", "rejected": " c"}], bpe_tokenizer)
    assert prepare_preference(once, bpe_tokenizer, PreferenceArguments())[0] is once


def test_missing_sides_are_named(bpe_tokenizer):
    with pytest.raises(ValueError, match=r"train row 0: it needs 'chosen' and 'rejected', .* not among \['text'\]"):
        prepared([{"text": "x"}], bpe_tokenizer)


def test_a_packed_pair_holds_its_prompt_once():
    batch = PreferenceCollator(0)([{"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert batch["targets"].tolist() == [[3, 4], [5, 0]]
    assert batch["predictors"].tolist() == [[1, 2], [1, 0]]
    assert batch["examples"] == [Example(2, 5)]
