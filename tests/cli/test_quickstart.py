"""The quickstart on a tiny model: what it leaves behind, what it says, and that it measures on held-out rows."""

import json
import re

import pytest

from strop.cli import quickstart, quickstart_stages, quickstart_task
from strop.evals.results import EvalResults

MESSAGES = [{"role": "user", "content": "is ice hot ?"}, {"role": "assistant", "content": "cold"}]
PAIR = {"prompt": "is ice hot ?", "chosen": " ice is cold .", "rejected": " yes ."}


def run(folder, output, *more):
    return quickstart.main(["--model", str(folder), "--output_dir", str(output), "--steps", "2", *more])


@pytest.fixture(autouse=True)
def little_to_do(monkeypatch):
    monkeypatch.setattr(quickstart_stages, "MAX_NEW_TOKENS", 4)
    monkeypatch.setattr(quickstart_task, "NUM_ANSWERED", 8)
    monkeypatch.setattr(quickstart_task, "NUM_ASKED", 8)


def test_each_stage_goes_on_from_the_last_and_is_measured(tiny_folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(tiny_folder, out, "--num_heldout", "4") == 0
    printed = capsys.readouterr().out
    for words in ("start", "after sft", "after dpo", "after grpo", "well-formed, %", "correct, %"):
        assert words in printed
    assert f"strop chat {out / 'grpo'}" in printed
    for stage in quickstart.STAGES:
        names = {path.name for path in (out / stage).iterdir()}
        assert {"adapter_model.safetensors", "checkpoint-2", "metrics.jsonl", "report.html", "eval"} <= names
    assert len((out / "start" / "eval" / "answers.jsonl").read_text().splitlines()) == 4
    losses = [EvalResults.load(out / stage / "eval")["loss"].value for stage in ("start", "sft")]
    assert losses[1] < losses[0]
    models = [json.loads((out / stage / "run.json").read_text())["model"] for stage in quickstart.STAGES]
    assert len({model["trainable_parameters"] for model in models}) == 1  # one adapter all the way
    assert models[0]["trainable_parameters"] > 0


def test_some_stages(tiny_folder, tmp_path, capsys):
    assert run(tiny_folder, tmp_path / "out", "--stages", "grpo", "--num_heldout", "2") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"start", "grpo"}
    assert "after grpo" in capsys.readouterr().out


@pytest.mark.parametrize(
    "row",
    [
        {"text": "the sky is blue"},
        {"prompt": "is ice hot ?", "completion": " ice is cold ."},
        {"messages": MESSAGES},
        {"conversations": [{"from": "human", "value": "is ice hot ?"}, {"from": "gpt", "value": "cold"}]},
    ],
    ids=["text", "prompt and completion", "messages", "conversations"],
)
def test_own_rows_of_any_format(row, tiny_folder, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(20)))
    assert run(tiny_folder, tmp_path / "out", "--data", str(data)) == 0
    printed = capsys.readouterr().out
    assert "has rows for sft; other stages are left out" in printed
    assert "loss, nats a token" in printed
    assert "well-formed" not in printed  # a check of the embedded rows only
    assert ("is ice hot ?" in printed) == ("text" not in row)


def test_own_pairs_are_for_sft_and_dpo(tiny_folder, tmp_path, capsys):
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(PAIR) + "\n" for _ in range(20)))
    assert run(tiny_folder, tmp_path / "out", "--data", str(data)) == 0
    printed = capsys.readouterr().out
    assert "after dpo" in printed
    assert "after grpo" not in printed
    assert "better likelier, %" in printed
    assert run(tiny_folder, tmp_path / "out", "--data", str(data), "--stages", "grpo") == 2
    assert "stage grpo can't run on" in capsys.readouterr().err


def test_embedded_rows_held_out_are_not_trained_and_no_problem_serves_two_stages():
    task = quickstart_task.embedded_task(num_texts=160, num_heldout=24, seed=0)
    assert len(task.texts) == 160
    parts = [[str(row["prompt"]) for row in part] for part in (task.texts, task.answered, task.asked, task.heldout)]
    assert len(set().union(*parts)) == sum(map(len, parts))
    right, wrong = "2 * 3 = 6\nAnswer: {}", "The answer is {}"
    checks = (quickstart_task.well_formed, quickstart_task.correct)
    for row in task.heldout:
        number = row["answer"]
        for text, expected in ((right.format(number), [1, 1]), (right.format(number + 1), [1, 0]), (wrong, [0, 0])):
            assert [check(completions=[text], answer=[number])[0] for check in checks] == expected


def test_own_rows_held_out_are_not_trained(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": f" {i}"}) + "\n" for i in range(40)))
    task = quickstart_task.own_task(str(data), seed=0)
    assert (len(task.texts), len(task.heldout)) == (35, 5)  # an eighth of 40
    assert {row["prompt"] for row in [*task.texts, *task.heldout]} == {f"{i}?" for i in range(40)}


def answers_of(*texts):
    class Written:
        def __init__(self, text):
            self.completion, self.rewards = text, {"correct": float(text.startswith("right"))}

    return [Written(text) for text in texts]


def test_pairs_are_a_right_and_a_wrong_answer_to_one_problem(monkeypatch):
    problems = [{"prompt": f"p{i}", "completion": f"worked {i}", "answer": i} for i in range(3)]
    written = [
        answers_of("right a", "wrong b", "right c", "wrong d"),
        answers_of("right e", "right f", "right g", "right h"),  # nothing to compare with
        answers_of("wrong i", "wrong j", "wrong k", "wrong l"),
    ]

    class Found:
        answers = written

    monkeypatch.setattr(quickstart_stages, "evaluate", lambda *args, **options: Found)
    pairs = quickstart_stages.own_pairs("model", problems, {"seed": 0, "max_steps": 1})
    assert sorted((pair["prompt"], pair["chosen"], pair["rejected"]) for pair in pairs) == [
        ("p0", "right a", "wrong b"),
        ("p0", "right c", "wrong d"),
        ("p2", "worked 2", "wrong i"),  # 4 pairs are wanted, and none of its own is right
    ]
    Found.answers = [answers_of("right"), answers_of("right"), answers_of("right")]
    with pytest.raises(ValueError, match=r"all 12 answers of model are right.*--stages sft grpo"):
        quickstart_stages.own_pairs("model", problems, {"seed": 0})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "steps=0 leaves nothing to do"),
        (["--stages", "sft", "gpro"], "there is no stage 'gpro'.*Did you mean 'grpo'?"),
        (["--stages", "sft", "sft"], "name each stage that runs once"),
    ],
)
def test_what_makes_no_sense_is_refused(words, message, tiny_folder, capsys):
    assert quickstart.main(["--model", str(tiny_folder), *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_too_few_rows_are_refused(tiny_folder, tmp_path, capsys):
    (tmp_path / "one.jsonl").write_text('{"text": "alone"}\n')
    assert run(tiny_folder, tmp_path / "out", "--data", str(tmp_path / "one.jsonl")) == 2
    assert "has 1 rows" in capsys.readouterr().err


def test_an_interruption_is_no_traceback(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart, "run", interrupted)
    assert quickstart.main([]) == 130
    assert "interrupted" in capsys.readouterr().err
