"""`strop run`: stages that run, are killed, go on, and are skipped; and what is refused before any of them runs."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from types import SimpleNamespace

import psutil
import pytest

from strop.cli import launch, main, run

DEFAULTS = "use_cpu: true, logging_steps: 1, learning_rate: 1e-2, save_steps: 1, per_device_train_batch_size: 4"
FILE = """
output_dir: out
defaults: {{model: {model}, seed: 1, {defaults}}}
stages:
  sft: {{data: rows.jsonl, max_steps: 2}}
  dpo: {{model: sft, data: pairs.jsonl, max_steps: 30}}
"""


EVALUATION = "{command: eval, data: prompts.jsonl, max_length: 9, metrics: [think_format]}"


def fork(function) -> int:
    """Run `function() -> exit code` in a copy of this process; its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = function()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def speak() -> None:
    """Have what is printed go to the process's own output, whatever it was told before."""
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


def forked(words, out, lock):
    """`run.start` by a copy of this process, which has imported everything already."""
    read, write = os.pipe()

    def stage() -> int:
        os.setsid()
        os.close(read)
        os.dup2(write, 2)
        os.dup2(write if out == subprocess.PIPE else out.fileno(), 1)
        speak()
        os.environ[launch.END_WITH_PARENT] = "1"
        return main.main(list(words))

    pid = fork(stage)
    os.close(write)
    ended = lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # noqa: E731
    return SimpleNamespace(pid=pid, stdout=os.fdopen(read, "rb"), stderr=None, wait=ended)


@pytest.fixture
def here(tmp_path, tiny_folder, monkeypatch):
    """A working directory with rows and a pipeline of two stages, in which stages start at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "start", forked)
    write(tmp_path / "rows.jsonl", [{"prompt": f"What is {x}?", "completion": " Ice is cold."} for x in "abcdefgh"])
    pairs = [{"prompt": f"Is {x} hot?", "chosen": " No.", "rejected": " Yes, hot."} for x in "abcdefgh"]
    write(tmp_path / "pairs.jsonl", pairs)
    write(tmp_path / "prompts.jsonl", [{"prompt": f"Is {x} hot?"} for x in "abcd"])
    (tmp_path / "p.yaml").write_text(FILE.format(model=tiny_folder, defaults=DEFAULTS))
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def strop(capsys, *words):
    code = main.main(["run", *words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def spaced(text):
    return " ".join(text.split())


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def losses(folder):
    return [json.loads(line).get("loss") for line in (folder / "metrics.jsonl").read_text().splitlines()]


def quiet_run() -> int:
    """`strop run p.yaml`, what it says going to out.txt."""
    file = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    speak()
    return main.main(["run", "p.yaml"])


def stopped(here, victim, step, how):
    """Start the pipeline, stop `victim` once dpo has saved `step`; the exit code and what was said."""
    pid = fork(quiet_run)
    until((here / "out" / "dpo" / f"checkpoint-{step}").exists)
    (child,) = psutil.Process(pid).children()
    os.kill(pid if victim == "pipeline" else child.pid, how)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    return code, (here / "out.txt").read_text()


def test_however_it_is_stopped_it_goes_on_to_the_weights_of_the_commands_alone(here, capsys, tiny_folder):
    common = shlex.split("--use_cpu --logging_steps 1 --learning_rate 1e-2 --per_device_train_batch_size 4 --seed 1")
    steps = [("sft", str(tiny_folder), "rows.jsonl", "2"), ("dpo", "alone/sft", "pairs.jsonl", "30")]
    for name, model, data, most in steps:
        words = ["--model", model, "--data", data, "--max_steps", most, "--output_dir", f"alone/{name}"]
        assert main.main([name, *words, *common]) == 0
    code, said = stopped(here, "stage", 2, signal.SIGKILL)
    assert code == 137
    assert "stage dpo failed with exit code 137" in said
    assert "train 2/30" in said.partition("What it printed last")[2]
    code, _ = stopped(here, "pipeline", 4, signal.SIGKILL)
    assert code == -signal.SIGKILL
    code, said = stopped(here, "pipeline", 6, signal.SIGINT)
    assert code == 130
    assert "interrupted; the same command (without --force) goes on at step " in said
    capsys.readouterr()
    assert not (here / "out" / "dpo" / "config.json").exists()
    code, printed = strop(capsys, "p.yaml")
    assert code == 0, printed
    assert "sft sft skip finished, and nothing changed" in spaced(printed)
    assert "dpo dpo resume stopped; goes on at step " in spaced(printed)
    for name in ("sft", "dpo"):
        assert weights(here / "out" / name) == weights(here / "alone" / name)
        assert losses(here / "out" / name) == losses(here / "alone" / name)
    summary = json.loads((here / "out" / "summary.json").read_text())
    assert [summary[name]["steps"] for name in ("sft", "dpo")] == [2, 30]
    assert summary["dpo"]["metrics"]["loss"] == [losses(here / "alone" / "dpo")[0], losses(here / "alone" / "dpo")[29]]


def test_every_kind_of_stage_reads_what_others_made(here, capsys):
    (here / "all.yaml").write_text(
        (here / "p.yaml").read_text().replace("30}", "1}")
        + """
  judge: {command: reward, model: sft, data: pairs.jsonl, max_steps: 1, use_peft: true}
  grpo: {model: dpo, reward_model: judge, data: prompts.jsonl, max_steps: 1, num_generations: 2,
         max_completion_length: 4}
  answers: {command: generate, model: grpo, prompts: prompts.jsonl, max_new_tokens: 4}
  scores: {command: score, model: judge, data: answers}
  more: {command: sft, model: grpo, datasets: [{path: answers}, {path: rows.jsonl}], max_steps: 1}
  eval: {model: grpo, baseline: sft, data: rows.jsonl, metrics: [loss], reward_model: judge, max_new_tokens: 4}
"""
    )
    code, printed = strop(capsys, "all.yaml")
    assert code == 0, printed
    scored = [json.loads(line) for line in (here / "out" / "scores" / "rows.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in scored] == [f"Is {x} hot?" for x in "abcd"]
    assert all(isinstance(row["score"], float) for row in scored)
    table = printed[printed.rindex("first -> last") :]
    assert "judge reward finished 1 " in spaced(table)
    assert "scores score finished 4 rows " in spaced(table)
    assert "eval: out/grpo against out/sft" in table
    assert "rewards/judge/mean" in (here / "out" / "grpo" / "metrics.jsonl").read_text()
    assert strop(capsys, "all.yaml")[1].count("finished, and nothing changed") == 8


def test_a_stage_that_fails_is_mended_and_those_before_are_kept(here, capsys):
    (here / "pairs.jsonl").write_text('{"prompt": "Is ice hot?", "text": "what is no pair"}\n')
    code, printed = strop(capsys, "p.yaml")
    assert code == 2
    assert "strop run: stage dpo failed with exit code 2" in printed
    assert "strop dpo: error: " in printed.partition("What it printed last")[2]
    assert "dpo dpo unfinished" in spaced(printed)
    write(here / "pairs.jsonl", [{"prompt": "Is ice hot?", "chosen": " No.", "rejected": " Yes."}])
    code, printed = strop(capsys, "p.yaml", "dpo.max_steps=1")
    assert code == 0, printed
    assert "finished, and nothing changed" in printed
    assert json.loads((here / "out" / "summary.json").read_text())["dpo"]["steps"] == 1


def test_a_stage_is_a_process_of_its_own(here, capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(here)
    code, printed = strop(capsys, "p.yaml", "--only", "sft", "sft.max_steps=1")
    assert code == 0, printed
    assert "train 1/1" in printed
    assert "train 1/1" in (here / "out" / "sft" / "stage.log").read_text()
    assert json.loads((here / "out" / "sft" / "run.json").read_text())["command"][1:] == [
        "sft",
        "--config",
        "out/sft/stage.yaml",
    ]
    assert not (here / "out" / "dpo").exists()


class TestPlan:
    def test_a_dry_run_says_what_would_run_and_writes_nothing(self, here, capsys):
        before = sorted(here.iterdir())
        code, printed = strop(capsys, "p.yaml", "--dry_run", "--force", "dpo")
        assert code == 0
        assert "sft sft run new out/sft dpo dpo run forced out/dpo" in spaced(printed)
        assert sorted(here.iterdir()) == before

    def test_paths_are_from_the_working_directory_as_in_every_command(self, here, capsys):
        (here / "configs").mkdir()
        (here / "p.yaml").rename(here / "configs" / "p.yaml")
        assert strop(capsys, "configs/p.yaml", "--dry-run")[0] == 0

    def test_checkpoints_are_saved_unless_the_stage_says_when(self, here):
        text = (here / "p.yaml").read_text()
        (here / "p.yaml").write_text(text.replace("save_steps: 1, ", "").replace("max_steps: 2", "save_strategy: 'no'"))
        config = {name: run.read_pipeline("p.yaml", [], None).config(name, False) for name in ("sft", "dpo")}
        assert "save_steps" not in config["sft"]
        assert (config["dpo"]["save_steps"], config["dpo"]["save_total_limit"]) == (0.1, 1)
        assert config["dpo"]["model_name_or_path"] == "out/sft"
        checkpoint = here / "out" / "dpo" / "checkpoint-2"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text('{"save_steps": 2}')
        assert run.read_pipeline("p.yaml", [], None).config("dpo", True)["save_steps"] == 2

    def test_what_wins(self, here):
        words = ["sft.max_steps=5", "defaults.seed=3", "dpo.lora_target_modules=[q_proj, v_proj]"]
        stages = run.read_pipeline("p.yaml", words, "elsewhere")
        sft, dpo = (stages.config(name, False) for name in ("sft", "dpo"))
        assert (sft["max_steps"], sft["seed"], sft["output_dir"]) == (5, 3, "elsewhere/sft")
        assert dpo["lora_target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("max_steps: 30", "max_stps: 30"), "p.yaml:6: unknown option 'max_stps'. Did you mean 'max_steps'?"),
        (("seed: 1", "sede: 1"), "p.yaml:3: defaults: no stage has an option 'sede'. Did you mean 'seed'?"),
        (
            ("model: sft", "model: stf"),
            "stage dpo: model_name_or_path='stf' is neither a stage nor a model",
        ),
        (("model: sft", "model: sft, beta: -1"), "stage dpo: "),
        (("data: pairs", "data: pars"), "stage dpo: There is no 'pars.jsonl'. Did you mean 'pairs.jsonl'?"),
        (
            ("data: pairs.jsonl", "data: sft"),
            "stage dpo: dataset_name='sft' makes a model, but ",
        ),
        (("  dpo:", "  dpo2:"), "p.yaml:6: stage dpo2 has no command: 'dpo2' is none. Did you mean 'dpo'? Name it"),
        (("  dpo:", "  sft:"), "p.yaml:6: sft was given before, at p.yaml:5"),
        (("  dpo: {", "  SFT: {command: dpo, "), "p.yaml:6: SFT differs from another stage's name by case only"),
        (("  dpo: {", "  a.b: {command: dpo, "), "'a.b' can't be a stage's name"),
        (("model: sft", "output_dir: sft"), "p.yaml:6: output_dir is not a stage's to say"),
        (
            ("model: sft", "num_processes: 2, accelerate_config: zero4"),
            "stage dpo: accelerate_config='zero4'",
        ),
        (("stages:", "stage:"), "p.yaml:4: a pipeline has no 'stage'. Did you mean 'stages'?"),
        (("{model: sft, data: pairs.jsonl, max_steps: 30}", EVALUATION), "stage dpo: max_length=9 has no effect"),
        (("model: sft, data: pairs.jsonl", "model: sft"), "stage dpo: there are no rows to train on"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_refused_before_anything_runs(here, capsys, change, words):
    text = (here / "p.yaml").read_text()
    assert change[0] in text
    (here / "p.yaml").write_text(text.replace(*change))
    code, printed = strop(capsys, "p.yaml")
    assert code == 2
    assert printed.splitlines()[-1].startswith("strop run: error: ")
    assert words in printed
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--only sfd", "--only sfd: the stages are sft, dpo. Did you mean 'sft'?"),
        ("--from dpo --until sft", "--from dpo comes after --until sft"),
        ("--only sft --from dpo", "--from and --until can't too"),
        ("dop.seed=1", "'dop.seed=1' changes no option; write STAGE.option=value"),
        ("--from dpo", "stage dpo uses sft, which is left out but not finished"),
    ],
)
def test_words_that_are_refused(here, capsys, line, words):
    code, printed = strop(capsys, "p.yaml", *line.split())
    assert code == 2
    assert words in printed
