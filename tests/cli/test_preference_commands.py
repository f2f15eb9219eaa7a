"""`strop dpo` and the other commands on completions of one prompt: rows in the forms they come in, to a saved model."""

import json
import shlex

import pytest
from transformers import AutoModelForCausalLM

from strop.cli import inspect, train

QUIET = "--use_cpu --report_to none --logging_steps 1 --max_steps 1 --per_device_train_batch_size 2"
PAIRS = [
    {"prompt": "What is water ?", "chosen": " It is cold .", "rejected": " Hot hot ."},
    {"prompt": "Is the sky blue ?", "chosen": " Yes , it is .", "rejected": " No ."},
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory, in a process that nobody launched."""
    monkeypatch.chdir(tmp_path)
    for name in ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def strop(command, line, capsys):
    """Exit code and what was printed."""
    code = train.main(command, shlex.split(line))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def changed(before, after):
    """Whether any weight of the causal model in the folder `after` differs from that in `before`."""
    old, new = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (before, after))
    return any((old[name] != new[name]).any() for name in old)


def logged(folder, name):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def test_pairs_in_a_file_train_a_policy(here, capsys, tiny_folder):
    write(here / "pairs.jsonl", PAIRS)
    line = f"--model {tiny_folder} --data pairs.jsonl --beta 0.5 --output_dir out --learning_rate 1e-2 {QUIET}"
    code, printed = strop("dpo", line, capsys)
    assert code == 0, printed
    assert changed(tiny_folder, "out")
    assert logged(here / "out", "loss") == [pytest.approx(0.6931, abs=1e-4)]  # policy = reference: ln 2


def test_a_reference_by_name_is_the_one_compared_with(here, capsys, tiny_folder, tmp_path):
    write(here / "pairs.jsonl", PAIRS)
    line = f"--model {tiny_folder} --data pairs.jsonl --output_dir moved --learning_rate 1e-2 {QUIET}"
    strop("dpo", line, capsys)
    line = f"--model {tiny_folder} --ref_model_name_or_path moved --data pairs.jsonl --output_dir out {QUIET}"
    assert strop("dpo", line, capsys)[0] == 0
    assert logged(here / "out", "loss") != [pytest.approx(0.6931, abs=1e-4)]


def test_a_mixture_of_pairs_under_other_names_as_conversations(here, capsys, tiny_folder):
    write(here / "a.jsonl", PAIRS)
    write(here / "b.jsonl", [{"question": "Is it cold ?", "better": " Yes .", "worse": " No ."}] * 2)
    (here / "run.yaml").write_text(
        "datasets:\n- path: a.jsonl\n- path: b.jsonl\n  columns: {question: prompt, better: chosen, worse: rejected}\n"
        "dataset_as_chat: true\nuse_peft: true\nlora_r: 2\ntest_split_size: 2\neval_strategy: steps\n"
    )
    code, printed = strop("dpo", f"--config run.yaml --model {tiny_folder} --output_dir out {QUIET}", capsys)
    assert code == 0, printed
    assert json.loads((here / "out" / "adapter_config.json").read_text())["r"] == 2
    assert 0 <= logged(here / "out", "eval_rewards/accuracies")[0] <= 1


def test_a_launch_runs_the_module_of_the_method(here, capsys):
    line = "--model m --data pairs.jsonl --num_processes 2 --use_cpu --dry_run"
    for name, method in train.METHODS.items():
        code, printed = strop(name, line, capsys)
        assert code == 0, printed
        assert f" -m {method.module} " in printed


TRIPLES = [{**row, "reference": " It is cold , yes ."} for row in PAIRS]
LABELLED = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PAIRS
    for side in ("chosen", "rejected")
]
STEPS = [{"prompt": "What is 1 + 1 ?", "completions": ["One and one .", "Two"], "labels": [True, False]}] * 2
REFERENCE_FREE = {"cpo": PAIRS, "simpo": PAIRS, "orpo": PAIRS, "tpo": TRIPLES}


@pytest.mark.parametrize("command", REFERENCE_FREE)
def test_methods_without_a_reference(command, here, capsys, tiny_folder):
    write(here / "rows.jsonl", REFERENCE_FREE[command])
    line = f"--model {tiny_folder} --data rows.jsonl --learning_rate 1e-2 --max_length 64 {QUIET}"
    code, printed = strop(command, line, capsys)
    assert code == 0, printed
    assert changed(tiny_folder, here / f"{tiny_folder.name}-{train.METHODS[command].suffix}")
    code, printed = strop(command, f"{line} --ref_model_name_or_path {tiny_folder}", capsys)
    assert code == 2
    assert "unknown option --ref_model_name_or_path" in printed


@pytest.mark.parametrize(("command", "rows"), [("kto", LABELLED), ("bco", LABELLED), ("kto", PAIRS), ("bco", PAIRS)])
def test_labelled_rows_and_pairs_taken_apart(command, rows, here, capsys, tiny_folder):
    write(here / "rows.jsonl", rows)
    line = f"--model {tiny_folder} --data rows.jsonl --output_dir out --learning_rate 1e-2 {QUIET}"
    code, printed = strop(command, line, capsys)
    assert code == 0, printed
    assert changed(tiny_folder, "out")
    at_start = {"kto": 0.5, "bco": 0.6931}  # policy = reference: 1 - sigmoid(0), and ln 2
    assert logged(here / "out", "loss") == [pytest.approx(at_start[command], abs=1e-4)]


@pytest.mark.parametrize(("command", "rows"), [("reward", PAIRS), ("prm", STEPS)])
def test_models_that_score(command, rows, here, capsys, tiny_folder):
    write(here / "rows.jsonl", rows)
    line = f"--model {tiny_folder} --data rows.jsonl --output_dir out --learning_rate 1e-2 {QUIET}"
    code, printed = strop(command, f"{line} --use_peft --lora_r 2 --eval_strategy no", capsys)
    assert code == 0, printed
    adapter = json.loads((here / "out" / "adapter_config.json").read_text())
    assert adapter["task_type"] == train.METHODS[command].task  # the option's default is a language model's
    assert "score" in adapter["modules_to_save"]
    assert "score answers with: strop score out" in printed


@pytest.mark.parametrize(
    ("command", "rows", "shown"),
    [
        ("dpo", PAIRS, ["row 0 chosen ", "row 0 rejected ", "row 1 chosen "]),
        ("kto", LABELLED, ["row 0 completion, label True ", "row 1 completion, label False "]),
        ("reward", [{"prompt": "Is it ?", "completions": [" Yes .", " No ."]}], ["completions 1 ", "completions 2 "]),
        ("reward", [{**PAIRS[0], "margin": 2.0}], ["row 0 chosen, margin 2.0 "]),
        ("tpo", TRIPLES, ["row 0 reference "]),
        ("prm", STEPS, ["row 0 +- "]),
    ],
)
def test_inspect_shows_what_a_method_reads(command, rows, shown, here, capsys, tiny_folder):
    for weights in tiny_folder.glob("*.safetensors"):
        weights.unlink()
    write(here / "rows.jsonl", rows)
    words = ["--model", str(tiny_folder), "--data", "rows.jsonl", "--n", "2"]
    assert inspect.main([command, *words]) == 0
    printed = capsys.readouterr().out
    assert [words for words in shown if words not in printed] == []
    assert "rows in" in printed.splitlines()[-1]
    if "margin" not in shown[0]:  # which only reward models read
        assert inspect.main(words) == 0
        without = capsys.readouterr()
        assert without.out == printed
        assert f"shown as `strop {command}` reads them" in without.err


def test_rows_that_training_would_refuse_are_shown_with_the_reason(here, capsys, tiny_folder):
    write(here / "rows.jsonl", [{**PAIRS[0], "rejected": PAIRS[0]["chosen"]}] * 2)
    assert inspect.main(["--model", str(tiny_folder), "--data", "rows.jsonl", "--n", "1"]) == 0
    printed = capsys.readouterr().out
    assert "! the answers have the same tokens, so there is nothing to prefer" in printed
    assert "2 with equal completions" in printed


@pytest.mark.parametrize(("command", "rows"), [("dpo", PAIRS), ("kto", LABELLED), ("prm", STEPS)])
def test_inspect_counts_the_rows_of_a_stream_that_it_shows(command, rows, here, capsys, tiny_folder):
    write(here / "rows.jsonl", rows)
    words = ["--model", str(tiny_folder), "--data", "rows.jsonl", "--n", "1", "--dataset_streaming"]
    assert inspect.main([command, *words]) == 0
    assert "train: 1 rows in, 1 out" in capsys.readouterr().out


def test_a_command_about_no_method_names_the_nearest():
    with pytest.raises(ValueError, match=r"there is no training command 'rewrad'\. Did you mean 'reward'"):
        inspect.main(["rewrad", "--model", "m"])
