"""`strop eval` as it is typed: rows from a file, a table or JSON, models in folders, what is written."""

import json

import pytest
from peft import LoraConfig, get_peft_model

from strop.cli import main as strop
from strop.cli import train
from strop.cli.eval import EvalArguments, main
from strop.evals.evaluate import evaluate
from strop.rewards.endpoint import ChatEndpoint

QUIET = ["--use_cpu", "--report_to", "none", "--max_steps", "1", "--per_device_train_batch_size", "2"]
ROWS = [
    {"question": "What is ice?", "answer": "Ice is cold."},
    {"question": "Is fire hot?", "answer": "Fire is hot."},
    {"question": "How many legs?", "answer": "Eight."},
]
PAIRS = [
    {"prompt": "What is ice ?", "chosen": " Ice is cold .", "rejected": " Hot ."},
    {"prompt": "Is fire cold ?", "chosen": " No .", "rejected": " Yes , it is cold ."},
]
RENAMED = ["--dataset_columns", '{"question": "prompt", "answer": "completion"}']


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, rows in {"rows": ROWS, "pairs": PAIRS}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def adapter(tmp_path, tiny_folder, tiny_llama):
    """A LoRA folder whose adapter changes what the model says."""
    model = get_peft_model(tiny_llama, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = str(tiny_folder)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def printed(capsys, *words):
    assert main([str(word) for word in words] + ["--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_loss_of_a_file_of_rows(here, tiny_folder, tiny_llama, bpe_tokenizer, capsys):
    found = printed(capsys, tiny_folder, "--data", "rows.jsonl", *RENAMED)
    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in ROWS]
    expected = evaluate(tiny_llama, rows, "loss", tokenizer=bpe_tokenizer)
    assert found["metrics"]["loss"]["model"]["value"] == pytest.approx(expected["loss"].value, rel=1e-6)
    chat = printed(capsys, tiny_folder, "--data", "rows.jsonl", *RENAMED, "--dataset_as_chat", "--limit", 2)
    assert chat["metrics"]["loss"]["model"]["num_prompts"] == 2
    assert chat["metrics"]["loss"]["model"]["value"] != found["metrics"]["loss"]["model"]["value"]


def test_an_adapter_against_its_base_as_a_table_and_on_disk(here, tiny_folder, adapter, capsys):
    (here / "mine.py").write_text("def letters(completions, **columns):\n    return [len(c) for c in completions]\n")
    words = [adapter, "--data", "rows.jsonl", *RENAMED, "--baseline", tiny_folder, "--metrics", "loss"]
    words += ["--reward_funcs", "mine.letters", "--num_samples", "2", "--max_new_tokens", "4", "--output_dir", "out"]
    assert strop.main(["eval", *map(str, words)]) == 0
    table = capsys.readouterr().out
    for text in ("adapter against", "loss", "perplexity", "letters", "win_rate/letters", "difference", "answer_tokens"):
        assert text in table
    saved = json.loads((here / "out" / "results.json").read_text())
    assert saved["baseline"] == str(tiny_folder)
    assert saved["metrics"]["loss"]["difference"]["value"] != 0
    for name in ("answers.jsonl", "answers_of_baseline.jsonl"):
        lines = [json.loads(line) for line in (here / "out" / name).read_text().splitlines()]
        assert len(lines) == 6
        assert all(line["rewards"]["letters"] == len(line["completion"]) for line in lines)


def test_a_config_file_has_the_same_names_and_the_line_wins(here, tiny_folder, capsys):
    (here / "eval.yaml").write_text(
        f"model_name_or_path: {tiny_folder}\ndataset_name: rows.jsonl\nlimit: 1\n"
        "dataset_columns: {question: prompt, answer: completion}\nmetrics: [loss]\n"
    )
    assert printed(capsys, "--config", "eval.yaml")["metrics"]["loss"]["model"]["num_prompts"] == 1
    assert printed(capsys, "--config", "eval.yaml", "--limit", 3)["settings"]["num_rows"] == 3


def test_a_trained_folder_takes_its_loss_of_what_was_trained(here, tiny_folder, capsys):
    chats = [
        {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]}
        for row in ROWS
    ]
    (here / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    line = ["--model", str(tiny_folder), "--data", "chats.jsonl", "--output_dir", "out", "--assistant_only_loss"]
    assert train.main("sft", [*line, *QUIET]) == 0
    capsys.readouterr()
    losses = [
        printed(capsys, "out", "--data", "chats.jsonl", *more)["metrics"]["loss"]["model"]["value"]
        for more in ([], ["--assistant_only_loss", "true"], ["--assistant_only_loss", "false"])
    ]
    assert losses[0] == losses[1] != losses[2]


def test_turns_that_were_trained_are_those_of_the_loss(here, tiny_folder, capsys):
    ice, fire, legs = (
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in ROWS
    )
    chats = [{"messages": [*ice, *fire]}, {"messages": [*fire, *legs]}]
    (here / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    losses = {}
    for turns in ("all", "last", "expand"):
        line = ["--model", str(tiny_folder), "--data", "chats.jsonl", "--output_dir", turns, "--assistant_only_loss"]
        assert train.main("sft", [*line, *QUIET, "--train_on_turns", turns, "--learning_rate", "0"]) == 0
        capsys.readouterr()
        losses[turns] = printed(capsys, turns, "--data", "chats.jsonl")["metrics"]["loss"]["model"]["value"]
    assert losses["all"] == losses["expand"] != losses["last"]
    said = printed(capsys, "all", "--data", "chats.jsonl", "--train_on_turns", "last")
    assert said["metrics"]["loss"]["model"]["value"] == losses["last"]
    printed(capsys, "last", "--data", "chats.jsonl", "--assistant_only_loss", "false")


def test_what_rewards_print_is_not_among_the_results(here, tiny_folder, capsys):
    (here / "loud.py").write_text(
        "def talks(completions, **columns):\n    print('hello')\n    return [1.0] * len(completions)\n"
    )
    found = printed(
        capsys, tiny_folder, "--data", "rows.jsonl", *RENAMED, "--metrics", "loud.talks", "--max_new_tokens", 2
    )
    assert found["metrics"]["talks"]["model"]["value"] == 1.0


def test_reward_models_are_measured_by_pairs_and_measure_answers(here, tiny_folder, capsys):
    line = ["--model", str(tiny_folder), "--data", "pairs.jsonl", "--output_dir", "reward", "--learning_rate", "1e-2"]
    assert train.main("reward", [*line, *QUIET]) == 0
    capsys.readouterr()
    from strop.cli.score import main as score

    assert score(["reward", "--data", "pairs.jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = printed(capsys, "reward", "--data", "pairs.jsonl")
    right = [row["score_chosen"] > row["score_rejected"] for row in rows]
    assert found["metrics"]["pairs"]["model"]["value"] == sum(right) / 2
    words = [tiny_folder, "--data", "pairs.jsonl", "--reward_model", "reward/", "--max_new_tokens", 3]
    assert printed(capsys, *words)["metrics"]["reward"]["model"]["num_prompts"] == 2
    with pytest.raises(ValueError, match="reward is a reward model, which scores answers and writes none"):
        main(["reward", "--data", "pairs.jsonl", "--metrics", "think_format"])


def test_a_judge_that_only_looks_at_the_place_says_tie(here, tiny_folder, adapter, capsys, monkeypatch):
    asked = []

    async def complete(self, messages, **options):
        asked.append((self.url, self.model))
        return "Better: A"

    monkeypatch.setattr(ChatEndpoint, "complete", complete)
    words = [adapter, "--data", "pairs.jsonl", "--baseline", tiny_folder, "--max_new_tokens", 3]
    words += ["--judge", "big", "--judge_url", "http://localhost:1/v1"]
    found = printed(capsys, *words)
    assert asked == [("http://localhost:1/v1/chat/completions", "big")] * 4
    assert found["metrics"]["win_rate/judge"]["model"]["value"] == 0.5
    asked.clear()
    printed(capsys, *words, "--judge_both_orders", "false")
    assert len(asked) == 2


def test_folders_are_evaluated_on_their_test_split(here, tiny_folder, capsys):
    for split, rows in {"train": ROWS, "test": ROWS[:1]}.items():
        (here / "data").mkdir(exist_ok=True)
        (here / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for more, size in (([], 1), (["--split", "train"], 3)):
        found = printed(capsys, tiny_folder, "--data", "data", *RENAMED, *more)
        assert found["settings"]["num_rows"] == size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to evaluate on; name rows with --data"),
        (["--data", "rows.jsonl"], "no answer to take the loss of"),
        (["--data", "nowhere.jsonl"], "There is no 'nowhere.jsonl'"),
        (["--data", "rows.jsonl", *RENAMED, "--baseline", "./nowhere"], "there is no folder ./nowhere"),
        (["--data", "rows.jsonl", "--judge", "gpt"], "compares two models; name the other one with --baseline"),
        (["--data", "rows.jsonl", "--judge_url", "http://x/v1"], "judge_url='http://x/v1' has no effect without"),
        (["--data", "rows.jsonl", "--metrics", "acuracy", *RENAMED], "Did you mean 'accuracy'"),
        (["--data", "rows.jsonl", "--dataset_as_chat"], "dataset_as_chat needs a column prompt"),
        (["--data", "rows.jsonl", "--tempratur", "1"], "unknown option --tempratur. Did you mean '--temperature'"),
        (["--tasks", "gsm8k", "--num_samples", "2", "--temperature", "0"], "all the same at temperature=0"),
    ],
)
def test_errors_say_what_to_do(words, message, here, tiny_folder, capsys):
    assert strop.main(["eval", str(tiny_folder), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("strop eval: error: ")
    assert message in error


def test_help_lists_every_option(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("--baseline", "--judge_url", "--num_samples", "--tasks", "--config"):
        assert name in text


def test_arguments_are_those_of_a_stage():
    """What `strop run` builds from a file."""
    args = EvalArguments(model="m", data="d", metrics=["loss"], reward_funcs=["accuracy"], reward_model="out/reward")
    assert args.metrics == ["loss", "accuracy", "out/reward"]
