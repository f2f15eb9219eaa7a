"""`strop rewards try` on files, as a user runs it."""

import json
import sys

import pytest

from strop.cli.main import main

ROWS = [
    {"prompt": "1 + 1", "completions": ["<think>x</think>2", "It is two."], "answer": "2"},
    {"prompt": "2 + 2", "completions": ["four", "five"], "answer": "4"},
]
MINE = """
def short(completions, answer):
    return [-len(completion) for completion in completions]

def fails(completions):
    return [1 / (len(completion) - 4) for completion in completions]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "cli_rewards.py").write_text(MINE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def line_of(text, name):
    return next(line.split() for line in text.splitlines() if line.strip().startswith(name))


def test_each_function_has_a_line_and_a_failure_hides_none(here, capsys):
    names = ["think_format", "cli_rewards.fails", "cli_rewards.short"]
    assert main(["rewards", "try", "--reward_funcs", *names, "--completions", "rows.jsonl"]) == 1
    printed = capsys.readouterr()
    assert line_of(printed.out, "think_format")[1:7] == ["4/4", "0.250", "0.500", "0.000", "1.000", "50%"]
    short = line_of(printed.out, "cli_rewards.short")
    assert short[1:8] == ["4/4", "-8.750", "6.185", "-17.000", "-4.000", "50%", "-1.00"]
    assert line_of(printed.out, "cli_rewards.fails")[1] == "failed"
    assert "reward function fails failed on row 2 ('four'): ZeroDivisionError" in printed.err


def test_a_tokenizer_gives_ids_and_lengths_in_tokens(here, capsys, tiny_folder):
    line = ["rewards", "try", "--reward_funcs", "repetition_penalty(ngram_size=1)", "--completions", "rows.jsonl"]
    assert main(line) == 1
    assert "needs 'completion_ids', which the rows lack (there is no tokenizer here)" in capsys.readouterr().err
    assert main([*line, "--tokenizer", str(tiny_folder), "--limit", "3"]) == 0
    printed = capsys.readouterr().out
    assert line_of(printed, "repetition")[1] == "3/3"
    assert "length in tokens" in printed


def test_conversations_and_rows_of_one_completion(here, capsys):
    row = {
        "prompt": [{"role": "user", "content": "?"}],
        "completion": [{"role": "assistant", "content": "<think></think>"}],
    }
    (here / "chat.jsonl").write_text((json.dumps(row) + "\n") * 2)
    assert main(["rewards", "try", "--reward_funcs", "think_format", "--completions", "chat.jsonl"]) == 0
    assert line_of(capsys.readouterr().out, "think_format")[1:7] == ["2/2", "1.000", "0.000", "1.000", "1.000", "100%"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--completions", "rows.jsonl"], "name the functions to try with --reward_funcs. Choices: accuracy"),
        (["--reward_funcs", "think_format"], "there is nothing to reward"),
        (["--reward_funcs", "thnk_format", "--completions", "rows.jsonl"], "Did you mean 'think_format'?"),
        (["--reward_funcs", "think_format", "--completions", "prompts.jsonl"], "none is called completion"),
        (["--reward_funcs", "think_format", "--completions", "rows.jsonl", "--limit", "0"], "limit=0"),
    ],
)
def test_what_cannot_be_tried_is_said(here, capsys, words, message):
    (here / "prompts.jsonl").write_text('{"prompt": "1 + 1"}\n')
    assert main(["rewards", "try", *words]) == 2
    assert message in capsys.readouterr().err


def test_it_does_one_thing(capsys):
    assert main(["rewards"]) == 2
    assert "strop rewards try --reward_funcs NAMES" in capsys.readouterr().err
    assert main(["rewards", "--help"]) == 0
    assert "--completions" in capsys.readouterr().out
