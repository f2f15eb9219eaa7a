"""`strop sft`: from words to a trained folder, and everything it refuses before that."""

import json
import shlex

import pytest
import yaml
from transformers import AutoModelForCausalLM

from strop.cli import launch, train
from strop.cli.arguments import LaunchArguments
from strop.cli.main import TRAINING

QUIET = "--use_cpu --report_to none --logging_steps 1"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with rows in it, in a process that nobody launched."""
    monkeypatch.chdir(tmp_path)
    for name in ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "RANK"):
        monkeypatch.delenv(name, raising=False)
    rows = [{"prompt": f"What is water {i} ?", "completion": " It is cold ."} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def sft(line, capsys):
    """Exit code and what was printed."""
    code = train.main("sft", shlex.split(line))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--data rows.jsonl", "there is no model to train; name one with --model_name_or_path"),
        ("--model m", "there are no rows to train on; name them with --dataset_name"),
        ("--model m --data rwos.jsonl", "Did you mean 'rows.jsonl'"),
        ("--model m --data rows.jsonl --dataset_test_split dev", "no effect without evaluation"),
        ("--model m --data rows.jsonl --eval_strategy epoch", "no split 'test', only train"),
        ("--model m --data rows.jsonl --max_stps 3", "unknown option --max_stps. Did you mean '--max_steps'"),
        ("--model m --data rows.jsonl --loss_type nlll", "Did you mean 'nll'"),
        ("--model m --data rows.jsonl --lora_r 8", "lora_r=8 has no effect with use_peft=False"),
        ("--config nowhere.yaml", "there is no config file 'nowhere.yaml'"),
        ("--model m --data rows.jsonl --accelerate_config zero4", "Did you mean 'zero3'"),
    ],
)
def test_refused_in_one_line(here, capsys, line, words):
    code, printed = sft(f"{line} {QUIET}", capsys)
    assert code == 2
    assert printed.startswith("strop sft: error: ")
    assert words in printed
    assert "Traceback" not in printed


def test_a_mistake_of_the_program_is_not_hidden(here, monkeypatch):
    monkeypatch.setattr(train, "run", lambda *args: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        train.main("sft", [])


def test_help_shows_the_options_of_every_part(here, capsys):
    code, printed = sft("--help", capsys)
    assert code == 0
    for name in (
        "--config",
        "--accelerate_config",
        "--dataset_name",
        "--lora_r",
        "--packing_strategy",
        "--learning_rate",
    ):
        assert f"\n  {name} " in printed


def test_the_dump_is_a_config_file_that_says_the_same(here, capsys):
    (here / "run.yaml").write_text("model: m\ndata: rows.jsonl\nmax_length: 64\nlearning_rate: 1e-4\n")
    code, printed = sft("--config run.yaml --max_length 32 --use_cpu --dump_config", capsys)
    assert code == 0
    assert "max_length: 32  # command line\n" in printed
    assert "learning_rate: 0.0001  # run.yaml:4\n" in printed
    assert 'model_name_or_path: "m"  # run.yaml:1\n' in printed
    assert "lora_r: 16  # default\n" in printed
    (here / "again.yaml").write_text(printed)
    _, again = sft("--config again.yaml --dump_config", capsys)
    assert yaml.safe_load(again) == yaml.safe_load(printed)


class TestLaunch:
    def test_the_same_command_without_the_launch_follows_accelerate(self, here, capsys):
        line = "--model m --data rows.jsonl --accelerate_config multi_gpu --num_processes 1 --use_cpu --dry_run false"
        (here / "run.yaml").write_text("seed: 1\ndry_run: true\n")
        code, printed = sft(f"{line.replace(' --dry_run false', '')} --dry_run --config run.yaml", capsys)
        assert code == 0
        path = launch.shipped_configs()["multi_gpu"]
        assert shlex.split(printed) == shlex.split(
            f"accelerate launch --config_file {path} --num_processes 1 --cpu -m strop.scripts.sft "
            "--model m --data rows.jsonl --use_cpu --config run.yaml"
        )

    def test_a_launched_process_trains_instead_of_launching_again(self, here, monkeypatch, capsys):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        (here / "run.yaml").write_text("num_processes: 2\n")
        code, printed = sft("--model m --data rows.jsonl --config run.yaml --use_cpu --dry_run", capsys)
        assert code == 0
        assert "in this process" in printed
        code, printed = sft("--model m --data rows.jsonl --num_processes 2 --use_cpu --dry_run", capsys)
        assert code == 2
        assert "has been launched already" in printed

    @pytest.mark.parametrize("name", sorted(launch.shipped_configs()))
    def test_shipped_configurations_load(self, name):
        from accelerate.commands.config.config_args import load_config_from_file

        config = load_config_from_file(str(launch.config_path(name)))
        assert config.num_machines == 1
        assert config.mixed_precision == "no", "the trainer's config decides"
        assert (config.num_processes == 1) == (name == "single_gpu")

    def test_deepspeed_is_asked_for_before_anything_starts(self, monkeypatch):
        monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"pip install strop\[deepspeed\]"):
            launch.launch_words("m", {"accelerate_config": "zero3"}, [], use_cpu=False)

    @pytest.mark.parametrize("use_cpu", [False, True])
    def test_several_processes_are_started_on_any_device(self, use_cpu):
        from accelerate.commands.launch import launch_command_parser

        words = launch.launch_words("m", {"num_processes": 2}, [], use_cpu)
        args = launch_command_parser().parse_args(words)
        assert (args.multi_gpu, args.cpu, args.num_processes) == (True, False, 2)

    def test_every_option_of_a_launch_is_one_of_accelerates(self):
        from accelerate.commands.launch import launch_command_parser

        known = {action.dest for action in launch_command_parser()._actions}
        assert {*vars(LaunchArguments())} - known == {"accelerate_config"}


def test_env_of_a_config_file_is_set(here, monkeypatch, capsys):
    monkeypatch.setenv("STROP_TEST_FLAG", "")
    (here / "run.yaml").write_text("env: {STROP_TEST_FLAG: 3}\nmodel: m\ndata: rows.jsonl\n")
    assert sft("--config run.yaml --use_cpu --dry_run", capsys)[0] == 0
    import os

    assert os.environ["STROP_TEST_FLAG"] == "3"


@pytest.mark.parametrize(
    ("value", "given"),
    [
        ("true", True),
        ("True", True),
        (True, True),
        ("false", None),
        (False, None),
        (None, None),
        ("out/checkpoint-1",) * 2,
    ],
)
def test_resume_words(value, given):
    assert train.checkpoint_to_resume(value) == given


def test_every_training_command_has_its_trainer_config_and_module():
    assert set(train.METHODS) == set(TRAINING)
    for method in train.METHODS.values():
        assert train.imported(method.trainer).__name__ == train.imported(method.config).__name__.replace(
            "Config", "Trainer"
        )
        assert train.imported(f"{method.module}:main") is train.main


def test_trains_saves_and_resumes(here, capsys, tiny_folder):
    line = f"--model {tiny_folder} --data rows.jsonl --output_dir out --max_steps 2 --save_steps 1 {QUIET}"
    code, printed = sft(line, capsys)
    assert code == 0
    assert "saved to out; talk to it with: strop chat out" in printed
    before = AutoModelForCausalLM.from_pretrained(tiny_folder).state_dict()
    after = AutoModelForCausalLM.from_pretrained("out").state_dict()
    assert any((after[name] != before[name]).any() for name in before)
    logged = [json.loads(text) for text in (here / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in logged if "loss" in entry] == [1, 2]
    code, printed = sft(f"{line} --resume_from_checkpoint true", capsys)
    assert code == 0
    assert "already at step 2 of 2" in printed


def test_an_adapter_and_a_mixture(here, capsys, tiny_folder):
    (here / "run.yaml").write_text(
        "use_peft: true\nlora_r: 2\ndatasets:\n- path: rows.jsonl\n- path: rows.jsonl\ntest_split_size: 0.5\n"
        "eval_strategy: steps\n"
    )
    code, printed = sft(f"--config run.yaml --model {tiny_folder} --output_dir out --max_steps 1 {QUIET}", capsys)
    assert code == 0, printed
    assert json.loads((here / "out" / "adapter_config.json").read_text())["r"] == 2
    logged = [json.loads(text) for text in (here / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in logged if "eval_loss" in entry] == [1]
