"""Judged steps: a label at the last token of what ends a step, nowhere else, and read there."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from strop.data.arguments import PreferenceArguments, StepArguments
from strop.data.steps import StepCollator, prepare_steps

HERE = Path(__file__).parents[1] / "goldens"
GOLDENS = json.loads((HERE / "preference_prepared.json").read_text())["steps"]
ROW = {"prompt": "1 + 1 + 1 =", "completions": ["1 + 1 = 2", "2 + 1 = 4"], "labels": [True, False]}


class Args(PreferenceArguments, StepArguments):
    def __init__(self, **settings):
        PreferenceArguments.__init__(self)
        StepArguments.__init__(self)
        vars(self).update(settings)


def prepare(rows, tokenizer, name="train", **settings):
    rows = Dataset.from_list(rows) if isinstance(rows, list) else rows
    return prepare_steps(rows, tokenizer, Args(**settings), name)


@pytest.mark.parametrize("case", GOLDENS["cases"][:3])
def test_goldens(case):
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tiny_llama")
    settings = case["kw"].copy()
    name = "eval" if settings.pop("is_eval") else "train"
    settings["train_on_last_step_only"] = settings.pop("train_on_last_step_only")
    assert prepare([GOLDENS["row"]], tokenizer, name, **settings)[0][0] == case["out"]


@pytest.mark.parametrize("separator", ["\n", "\n\n", " ки "])
def test_each_label_is_at_the_last_token_of_its_separator(bpe_tokenizer, separator):
    row = prepare([ROW], bpe_tokenizer, step_separator=separator)[0][0]
    ends = [i for i, label in enumerate(row["labels"]) if label != -100]
    assert [row["labels"][i] for i in ends] == [1, 0]
    texts = [bpe_tokenizer.decode(row["input_ids"][: end + 1]) for end in ends]
    assert texts[0] == ROW["prompt"] + ROW["completions"][0] + separator
    assert texts[1] == texts[0] + ROW["completions"][1] + separator
    assert ends[1] == len(row["input_ids"]) - 1  # nothing ends the row


def test_a_conversation_is_rendered_up_to_the_answer(bpe_tokenizer):
    row = prepare([ROW | {"prompt": [{"role": "user", "content": "1 + 1 + 1 ="}]}], bpe_tokenizer)[0][0]
    text = bpe_tokenizer.decode(row["input_ids"])
    assert text == "<|im_start|>user\n1 + 1 + 1 =<|im_end|>\n<|im_start|>assistant\n1 + 1 = 2\n2 + 1 = 4\n"


class TestLongRows:
    def lengths(self, tokenizer):
        prompt, *steps = (
            len(tokenizer(text).input_ids) for text in (ROW["prompt"], *(step + "\n" for step in ROW["completions"]))
        )
        return prompt, *steps

    def test_steps_give_way(self, bpe_tokenizer):
        prompt, first, second = self.lengths(bpe_tokenizer)
        whole = prepare([ROW], bpe_tokenizer)[0][0]
        dataset, report = prepare([ROW], bpe_tokenizer, max_length=prompt + first)
        assert dataset[0] == {name: ids[: prompt + first] for name, ids in whole.items()}
        assert (report.truncated_rows, report.tokens_lost) == (1, second)
        assert prepare([ROW], bpe_tokenizer, max_completion_length=first)[0][0] == dataset[0]

    def test_or_the_prompt(self, bpe_tokenizer):
        prompt, first, second = self.lengths(bpe_tokenizer)
        whole = prepare([ROW], bpe_tokenizer)[0][0]
        dataset, _ = prepare([ROW], bpe_tokenizer, max_length=first + second + 2, truncation_mode="keep_end")
        assert dataset[0] == {name: ids[prompt - 2 :] for name, ids in whole.items()}
        assert prepare([ROW], bpe_tokenizer, max_prompt_length=2)[0][0] == dataset[0]

    def test_rows_without_a_label_are_dropped_and_counted(self, bpe_tokenizer):
        prompt, first, second = self.lengths(bpe_tokenizer)
        rows = [ROW, ROW | {"prompt": ROW["prompt"] * 5}]
        dataset, report = prepare(rows, bpe_tokenizer, max_length=prompt + first)
        assert (len(dataset), report.untrainable_rows) == (1, 1)
        with pytest.raises(ValueError, match="no row of the train data set has a token to train within max_length=10"):
            prepare([GOLDENS["row"]], bpe_tokenizer, max_length=10)
        with pytest.raises(ValueError, match=r"train row 1: its prompt of .* are more than max_length"):
            prepare(rows, bpe_tokenizer, max_length=prompt + first + second, overlong="error")
        assert prepare(rows, bpe_tokenizer, max_length=prompt + first + second, overlong="drop")[1].dropped_rows == 1


def test_preparing_twice_is_preparing_once_and_streams_are_like_sets(bpe_tokenizer):
    rows = [ROW | {"labels": [1, 0]}] * 2
    once, first = prepare(rows, bpe_tokenizer)
    twice, second = prepare(once, bpe_tokenizer)
    assert twice is once
    assert second.trained_tokens == first.trained_tokens == 4
    stream, _ = prepare(Dataset.from_list(rows).to_iterable_dataset(), bpe_tokenizer)
    assert list(stream) == once.to_list()
    last, _ = prepare(once, bpe_tokenizer, train_on_last_step_only=True)
    assert last.to_list() == prepare(rows, bpe_tokenizer, train_on_last_step_only=True)[0].to_list()
    shorter, report = prepare(once, bpe_tokenizer, max_length=len(once[0]["input_ids"]) - 1)
    assert (report.truncated_rows, sum(label != -100 for label in shorter[0]["labels"])) == (2, 1)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (ROW | {"labels": [True]}, "has 2 completions and 1 labels"),
        (ROW | {"labels": ["+", "-"]}, r"its label is '\+'"),
        (ROW | {"completions": [], "labels": []}, "has 0 completions"),
        (ROW | {"completions": "ab"}, "are no list of texts"),
        ({"prompt": "x", "completions": ["a"]}, "labels is not among"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, r"has the labels \[2\]"),
        ({"input_ids": [1, 2], "labels": [1]}, "has 2 input_ids and 1 labels"),
    ],
)
def test_rows_that_judge_no_steps(bpe_tokenizer, row, why):
    with pytest.raises(ValueError, match="train row 0: .*" + why):
        prepare([row], bpe_tokenizer)


def test_a_separator_without_tokens(bpe_tokenizer):
    with pytest.raises(ValueError, match=r"step_separator='' has no tokens.*one that the tokenizer keeps"):
        prepare([ROW], bpe_tokenizer, step_separator="")


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_step_is_judged_where_it_ends(layout):
    examples = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 1, -100, 0]}, {"input_ids": [3, 4], "labels": [-100, 1]}]
    batch = StepCollator(0, layout)(examples)
    judged = batch["completion_mask"].bool()
    assert batch["targets"][judged].tolist() == [1, 0, 1]
    assert batch["input_ids"].view(-1)[batch["predictors"][judged]].tolist() == [6, 8, 4]
    assert torch.equal(batch["predictors"][~judged], torch.zeros(5, dtype=torch.int64))
