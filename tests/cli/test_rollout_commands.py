"""`strop grpo` and `strop rloo`: rewards by name, and what is missing is said."""

import json
import shlex

import pytest

from strop.cli.main import main

QUIET = "--use_cpu --max_steps 1 --disable_tqdm true --max_completion_length 4 --num_generations 4"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Is {w} hot ?"}) + "\n" for w in "abc"))
    (tmp_path / "my_rollout_rewards.py").write_text(
        "def short(completions, **_):\n    return [-len(c) for c in completions]\n"
    )
    return tmp_path


def strop(line, capsys):
    code = main(shlex.split(line))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("command", ["grpo", "rloo"])
def test_rewards_by_name(command, here, capsys, tiny_folder):
    line = f"{command} --model {tiny_folder} --data prompts.jsonl --output_dir out {QUIET}"
    code, printed = strop(f"{line} --reward_funcs my_rollout_rewards.short think_format --reward_weights 1 0.5", capsys)
    assert code == 0, printed
    (file,) = (here / "out" / "rollouts").iterdir()
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert len(lines) == 8
    assert all(row["short"] == -len(row["completion"]) and row["think_format_reward"] == 0 for row in lines)


def test_no_reward_lists_the_choices(here, capsys, tiny_folder):
    code, printed = strop(f"grpo --model {tiny_folder} --data prompts.jsonl {QUIET}", capsys)
    assert code == 2
    assert "--reward_funcs: accuracy, reasoning_accuracy, think_format" in printed
    code, printed = strop(f"grpo --model {tiny_folder} --data prompts.jsonl --reward_funcs acuracy {QUIET}", capsys)
    assert code == 2
    assert "there is no reward 'acuracy'. Did you mean 'accuracy'?" in printed


def test_estimates_of_rollouts_are_refused(here, capsys, tiny_folder):
    code, printed = strop(f"estimate grpo --model {tiny_folder} --data prompts.jsonl --reward_funcs accuracy", capsys)
    assert code == 2
    assert "rollouts" in printed


@pytest.mark.parametrize("command", ["grpo", "rloo"])
def test_prompts_are_shown_as_the_model_reads_them(command, here, capsys, tiny_folder, bpe_tokenizer):
    line = f"inspect {command} --model {tiny_folder} --data prompts.jsonl --json --max_prompt_length 4"
    assert main(shlex.split(line)) == 0
    shown = json.loads(capsys.readouterr().out)
    first, *_ = shown["rows"]
    whole = bpe_tokenizer("Is a hot ?").input_ids
    assert first["input_ids"] == whole[-4:]
    assert first["num_cut"] == len(whole) - 4
    assert first["num_trained"] == 0
    assert first["warnings"] == ["the prompt lost its start"]
    assert shown["report"]["rows"] == 3
    assert main(shlex.split(line.replace("--json", "--overlong drop"))) == 0
    assert "dropped: longer than max_prompt_length" in capsys.readouterr().out


def test_messages_are_shown_through_the_template(here, capsys, tiny_folder, bpe_tokenizer):
    messages = [{"role": "user", "content": "Is ice hot?"}]
    (here / "chat.jsonl").write_text(json.dumps({"prompt": messages}) + "\n")
    assert main(shlex.split(f"inspect grpo --model {tiny_folder} --data chat.jsonl --json")) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    asked = bpe_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert row["input_ids"] == asked
