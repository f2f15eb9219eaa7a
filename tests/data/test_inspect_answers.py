"""Answers and steps are explained as the trainer's preparation and collator see them."""

from datasets import Dataset

from strop.data.inspect import as_json, as_text
from strop.data.inspect_answers import explain_answers, explain_steps
from strop.data.preference import LABELLED, PAIRS, RANKED, prepare_preference
from strop.data.sides import PreferenceCollator
from strop.trainer.cpo import CPOConfig
from strop.trainer.prm import PRMConfig

PAIR = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green and wide."}


def settings(**options):
    return CPOConfig(output_dir="unused", use_cpu=True, **options)


def test_each_answer_stands_after_its_prompt_and_is_trained_as_in_a_batch(bpe_tokenizer):
    rows = Dataset.from_list([PAIR, PAIR | {"chosen": " grey."}])
    explained = explain_answers(rows, bpe_tokenizer, settings(), [0, 1], PAIRS)
    prepared, _ = prepare_preference(rows, bpe_tokenizer, settings(), PAIRS)
    mask = PreferenceCollator(0, "padded")(list(prepared))["completion_mask"]
    assert [(row.index, row.side) for row in explained] == [
        (0, "chosen"),
        (0, "rejected"),
        (1, "chosen"),
        (1, "rejected"),
    ]
    assert [row.num_trained for row in explained] == mask.sum(-1).tolist()
    assert explained[0].input_ids == prepared[0]["prompt_ids"] + prepared[0]["chosen_ids"]
    assert "".join(explained[0].tokens).startswith("The sky is blue.")
    assert explained[0].stops == ["trained"]
    assert [row.raw is None for row in explained] == [False, True, False, True]


def test_what_preparation_does_to_a_row_is_said(bpe_tokenizer):
    rows = Dataset.from_list([PAIR, PAIR | {"rejected": PAIR["chosen"]}])
    short, _, equal, _ = explain_answers(rows, bpe_tokenizer, settings(max_completion_length=2), [0, 1], PAIRS)
    assert any("lost" in warning and "2 answers the end" in warning for warning in short.warnings)
    assert any("nothing to prefer" in warning for warning in equal.warnings)
    (gone,) = explain_answers(rows, bpe_tokenizer, settings(max_length=4, overlong="drop"), [0], PAIRS)
    assert gone.tokens == []
    assert "dropped: longer than max_length" in gone.warnings[0]


def test_labels_and_ranks_are_named(bpe_tokenizer):
    labelled = Dataset.from_list([{"prompt": "The sky is", "completion": " blue.", "label": True}])
    assert [row.side for row in explain_answers(labelled, bpe_tokenizer, settings(), [0], LABELLED)] == [
        "completion, label True"
    ]
    unpaired = explain_answers(Dataset.from_list([PAIR]), bpe_tokenizer, settings(), [0], LABELLED)
    assert [row.side for row in unpaired] == ["completion, label True", "completion, label False"]
    ranked = Dataset.from_list([{"prompt": "The sky is", "completions": [" blue.", " grey.", " red."]}])
    explained = explain_answers(ranked, bpe_tokenizer, settings(), [0], RANKED)
    assert [row.side for row in explained] == ["completions 1", "completions 2", "completions 3"]
    assert as_text(explained).startswith("row 0 completions 1   ")
    assert '"side": "completions 3"' in as_json(explained)


def test_steps_show_where_each_is_judged_and_how(bpe_tokenizer):
    rows = Dataset.from_list([{"prompt": "2+2", "completions": ["2+2=4", "4+1=6"], "labels": [True, False]}])
    (row,) = explain_steps(rows, bpe_tokenizer, PRMConfig(output_dir="unused", use_cpu=True), [0])
    assert row.side == "+-"
    judged = [i for i, on in enumerate(row.trained) if on]
    assert ["".join(row.tokens[: i + 1]) for i in judged] == ["2+22+2=4\n", "2+22+2=4\n4+1=6\n"]
