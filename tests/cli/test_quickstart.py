"""The quickstart on a tiny model: what it leaves behind, what it says, and that it measures on held-out rows."""

import json

import pytest

from strop.cli import quickstart


def run(folder, output, *more):
    return quickstart.main(["--model", str(folder), "--output_dir", str(output), "--steps", "2", *more])


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(quickstart, "MAX_NEW_TOKENS", 4)


def test_trains_measures_and_says_how_to_go_on(tiny_folder, tmp_path, capsys):
    assert run(tiny_folder, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "well-formed answers" in printed
    assert f"strop chat {tmp_path / 'out'}" in printed
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "checkpoint-2", "metrics.jsonl", "loss.svg", "report.html"} <= names
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    assert [step for step, _ in evaluations] == [0, 2]
    assert evaluations[1][1] < evaluations[0][1]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "the sky is blue"},
        {"prompt": "is ice hot ?", "completion": " ice is cold ."},
        {"messages": [{"role": "user", "content": "is ice hot ?"}, {"role": "assistant", "content": "cold"}]},
        {"conversations": [{"from": "human", "value": "is ice hot ?"}, {"from": "gpt", "value": "cold"}]},
    ],
    ids=["text", "prompt and completion", "messages", "conversations"],
)
def test_own_rows_of_any_format(row, tiny_folder, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(20)))
    assert run(tiny_folder, tmp_path / "out", "--data", str(data)) == 0
    printed = capsys.readouterr().out
    assert "loss (nats a token)" in printed
    assert "well-formed" not in printed  # a check of the embedded rows only
    assert ("is ice hot ?" in printed) == ("text" not in row)


def test_embedded_rows_held_out_are_not_trained():
    task = quickstart.embedded_task(num_train=320, seed=0)
    assert len(task.train) == 320
    assert not {quickstart.question_of(row) for row in task.train} & {
        quickstart.question_of(row) for row in task.heldout
    }
    right, wrong = "2 * 3 = 6\nAnswer: {}", "The answer is {}"
    for row in task.heldout:
        assert [check(right.format(row["answer"]), row) for check in task.checks.values()] == [True, True]
        assert [check(right.format(row["answer"] + 1), row) for check in task.checks.values()] == [True, False]
        assert [check(wrong.format(row["answer"]), row) for check in task.checks.values()] == [False, False]


def test_own_rows_held_out_are_not_trained(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": f" {i}"}) + "\n" for i in range(40)))
    task = quickstart.own_task(str(data), seed=0)
    assert (len(task.train), len(task.heldout)) == (35, 5)  # an eighth of 40
    assert {row["prompt"] for row in task.train + task.heldout} == {f"{i}?" for i in range(40)}


def test_too_little_to_do_is_refused(tiny_folder, tmp_path, capsys):
    assert quickstart.main(["--model", str(tiny_folder), "--steps", "0"]) == 2
    assert "steps=0 trains nothing" in capsys.readouterr().err
    (tmp_path / "one.jsonl").write_text('{"text": "alone"}\n')
    assert run(tiny_folder, tmp_path / "out", "--data", str(tmp_path / "one.jsonl")) == 2
    assert "has 1 rows" in capsys.readouterr().err
