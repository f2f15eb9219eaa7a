"""`strop grpo`, `strop rloo` and `strop ppo`: rewards by name, and what is missing is said."""

import copy
import json
import shlex

import pytest
import torch
from transformers import AutoModelForSequenceClassification

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


@pytest.mark.parametrize("command", ["grpo", "rloo", "ppo"])
def test_rewards_by_name(command, here, capsys, tiny_folder):
    line = f"{command} --model {tiny_folder} --data prompts.jsonl --output_dir out {QUIET}"
    code, printed = strop(f"{line} --reward_funcs my_rollout_rewards.short think_format --reward_weights 1 0.5", capsys)
    assert code == 0, printed
    (file,) = (here / "out" / "rollouts").iterdir()
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert len(lines) == 8
    assert all(row["short"] == -len(row["completion"]) and row["think_format_reward"] == 0 for row in lines)


def test_a_reward_model_of_ppo(here, capsys, tiny_folder, tiny_llama, bpe_tokenizer):
    config = copy.deepcopy(tiny_llama.config)
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(here / "reward")
    bpe_tokenizer.save_pretrained(here / "reward")
    line = f"ppo --model_name_or_path {tiny_folder} --dataset_name prompts.jsonl --output_dir out --use_cpu"
    line += " --reward_model_path reward --total_episodes 8 --num_ppo_epochs 2 --response_length 4 --kl_coef 0.1"
    code, printed = strop(f"{line} --per_device_train_batch_size 4 --num_mini_batches 2", capsys)
    assert code == 0, printed
    assert AutoModelForSequenceClassification.from_pretrained(here / "out" / "value_model").config.num_labels == 1
    again = line.replace("--output_dir out", "--output_dir again").replace("--total_episodes 8", "--max_steps 1")
    code, printed = strop(f"{again} --value_model out/value_model --learning_rate 0", capsys)
    assert code == 0, printed
    first, second = (
        AutoModelForSequenceClassification.from_pretrained(here / name / "value_model") for name in ("out", "again")
    )
    assert torch.equal(first.score.weight, second.score.weight)
    rows = [json.loads(text) for file in (here / "out" / "rollouts").iterdir() for text in file.open()]
    assert len(rows) == 8
    assert all(isinstance(row["reward"], float) for row in rows)


def test_no_reward_lists_the_choices(here, capsys, tiny_folder):
    code, printed = strop(f"grpo --model {tiny_folder} --data prompts.jsonl {QUIET}", capsys)
    assert code == 2
    assert "--reward_funcs: accuracy, reasoning_accuracy, think_format" in printed
    code, printed = strop(f"grpo --model {tiny_folder} --data prompts.jsonl --reward_funcs acuracy {QUIET}", capsys)
    assert code == 2
    assert "there is no reward 'acuracy'. Did you mean 'accuracy'?" in printed


@pytest.mark.parametrize("command", ["grpo", "rloo"])
def test_memory_is_estimated_for_both_halves_of_a_step(command, here, capsys, tiny_folder, tiny_llama):
    line = f"estimate {command} --model {tiny_folder} --use_cpu --num_generations 4 --max_completion_length 20"
    line += " --steps_per_generation 2"
    code, printed = strop(line, capsys)
    assert code == 2
    assert "set --max_prompt_length" in printed
    line += " --max_prompt_length 10"
    assert main(shlex.split(f"{line} --json --beta 0.1")) == 0
    found = json.loads(capsys.readouterr().out)
    writes, trains = found["generation"], found["training"]
    size = 4 * sum(p.numel() for p in tiny_llama.parameters())
    assert (trains["weights"], trains["gradients"], trains["reference"], trains["optimizer"]) == (size,) * 3 + (
        2 * size,
    )
    assert (writes["weights"], writes["gradients"], writes["reference"]) == (size, 0, size)
    text = tiny_llama.config.get_text_config()
    a_token = 2 * 4 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    assert (writes["kv_cache"], trains["kv_cache"]) == ((16 * 20 + 4 * 10) * a_token, 0), "16 completions, 4 prompts"
    assert found["total"] == max(writes["total"], trains["total"])
    assert main(shlex.split(f"{line} --json --beta 0")) == 0
    assert json.loads(capsys.readouterr().out)["training"]["reference"] == 0
    code, printed = strop(line, capsys)
    assert "on 8 of 16 completions of 20 tokens, 4 to a prompt of 10" in printed
    assert "while it generates:" in printed
    code, printed = strop(f"{line} --cached_tokens 3", capsys)
    assert code == 2
    assert "cached_tokens=3 would have no effect" in printed


@pytest.mark.parametrize("command", ["grpo", "rloo", "ppo"])
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
