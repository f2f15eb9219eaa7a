"""`strop score` says of rows what the trainer that made the model says of them."""

import json

import pytest
import torch

from strop.cli import train
from strop.cli.chat import generate_main
from strop.cli.score import main
from strop.models.arguments import ModelInitArguments
from strop.models.load import load_model, load_tokenizer
from strop.rewards.reward_model import score

QUIET = ["--use_cpu", "--report_to", "none", "--max_steps", "2", "--per_device_train_batch_size", "2"]
PAIRS = [
    {"prompt": "What is water ?", "chosen": " It is cold .", "rejected": " Hot hot ."},
    {"prompt": "Is the sky blue ?", "chosen": " Yes , it is .", "rejected": " No ."},
]
STEPS = [{"prompt": "What is 1 + 1 ?", "completions": ["One and one .", "Two"], "labels": [True, False]}] * 2


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, rows in {"pairs": PAIRS, "steps": STEPS}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def trained(command, data, folder, tiny_folder, *more):
    line = ["--model", str(tiny_folder), "--data", data, "--output_dir", folder, "--learning_rate", "1e-2"]
    assert train.main(command, [*line, *more, *QUIET]) == 0


def lines_of(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_a_reward_model_by_adapter_scores_every_form_of_rows(here, capsys, tiny_folder):
    trained("reward", "pairs.jsonl", "out", tiny_folder, "--use_peft", "--lora_r", "2")
    assert json.loads((here / "out" / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    assert "score answers with: strop score out" in capsys.readouterr().out
    assert main(["out", "--data", "pairs.jsonl"]) == 0
    pairs = lines_of(capsys)
    assert pairs[0]["prompt"] == PAIRS[0]["prompt"]
    ranked = [{"prompt": row["prompt"], "completions": [row["chosen"], row["rejected"]]} for row in PAIRS]
    (here / "ranked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ranked))
    assert main(["out", "--data", "ranked.jsonl", "--batch_size", "1"]) == 0
    for pair, row in zip(pairs, lines_of(capsys), strict=True):
        assert row["scores"] == pytest.approx([pair["score_chosen"], pair["score_rejected"]], abs=1e-5)


def test_scores_are_those_of_the_model_in_python(here, capsys, tiny_folder):
    from transformers import AutoModelForSequenceClassification

    trained("reward", "pairs.jsonl", "out", tiny_folder)
    capsys.readouterr()
    assert main(["out", "--data", "pairs.jsonl"]) == 0
    printed = capsys.readouterr()
    assert "of 2 pairs have the chosen answer above the other" in printed.err
    model = load_model("out", ModelInitArguments(), auto_class=AutoModelForSequenceClassification, num_labels=1)
    tokenizer = load_tokenizer("out", ModelInitArguments())
    expected = score(model, tokenizer, [row["prompt"] for row in PAIRS], [row["chosen"] for row in PAIRS])
    found = [json.loads(line)["score_chosen"] for line in printed.out.splitlines()]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)


def test_steps_get_a_probability_each(here, capsys, tiny_folder):
    trained("prm", "steps.jsonl", "out", tiny_folder)
    capsys.readouterr()
    assert main(["out", "--data", "steps.jsonl"]) == 0
    for row in lines_of(capsys):
        assert len(row["scores"]) == 2
        assert all(0 < value < 1 for value in row["scores"])


def test_what_training_was_told_of_rows_is_known_from_its_record(here, capsys, tiny_folder):
    trained("prm", "steps.jsonl", "steps", tiny_folder, "--step_separator", " cold")
    template = "{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}"
    (here / "mood.jinja").write_text(template)
    chats = [
        {name: [{"role": "user" if name == "prompt" else "assistant", "content": text}] for name, text in row.items()}
        for row in PAIRS
    ]
    (here / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    told = ["--chat_template_path", "mood.jinja", "--chat_template_kwargs", '{"mood": " hot"}']
    trained("reward", "chats.jsonl", "moody", tiny_folder, *told)
    for folder, data, option, same, other in (
        ("steps", "steps.jsonl", "--step_separator", " cold", "\n"),
        ("moody", "chats.jsonl", "--chat_template_kwargs", '{"mood": " hot"}', "{}"),
    ):
        capsys.readouterr()
        printed = []
        for more in ([], [option, same], [option, other]):
            assert main([folder, "--data", data, *more]) == 0
            printed.append(lines_of(capsys))
        assert printed[0] == printed[1] != printed[2]


def test_what_cannot_be_scored_is_refused(here, tiny_folder):
    with pytest.raises(ValueError, match="is a language model, which writes answers and scores none"):
        main([str(tiny_folder), "--data", "pairs.jsonl"])
    with pytest.raises(ValueError, match="there is nothing to score"):
        main([str(tiny_folder)])


def test_a_reward_model_does_not_chat(here, tiny_folder):
    trained("reward", "pairs.jsonl", "out", tiny_folder)
    with pytest.raises(ValueError, match=r"is a reward model: it scores answers .* strop score out"):
        generate_main(["out", "--prompt", "Hello ?"])
    trained("prm", "steps.jsonl", "adapter", tiny_folder, "--use_peft")
    with pytest.raises(ValueError, match="is a reward model"):
        generate_main(["adapter", "--prompt", "Hello ?"])
