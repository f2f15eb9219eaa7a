"""Options from dataclasses: spellings, types, precedence by presence, errors that name the nearest, and TrlParser."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pytest
import yaml
from transformers import TrainingArguments

from strop import compat
from strop.cli.args import Options, dump
from strop.cli.arguments import ScriptArguments
from strop.cli.fields import field_docs, field_owners, options_of
from strop.cli.parser import TrlParser
from strop.cli.yaml_config import Setting
from strop.data.arguments import DataArguments, PackingArguments
from strop.models.model_config import ModelConfig
from strop.trainer.config import BaseConfig, SFTConfig


@dataclass
class Base:
    rate: float = 1e-3
    steps: int = field(default=-1, metadata={"help": "how long"})
    limit: int | None = 10
    packing: bool = False
    resume: str | bool | None = None


@dataclass
class Mine(Base):
    names: list[str] | None = None
    report_to: str | list[str] | None = "none"
    kwargs: dict[str, Any] | str | None = None
    loss: str | Callable = "nll"
    multiple: int | str | None = "auto"
    space: str | Literal[False] | None = None
    rows: list[dict] = field(default_factory=list)


@pytest.fixture
def options():
    return Options("test", [Mine], aliases={"lr": "rate"})


def said(options, line="", **file):
    settings = {name: Setting(value, f"run.yaml:{i}") for i, (name, value) in enumerate(file.items(), start=1)}
    return {name: setting.value for name, setting in options.read(line.split(), settings).items()}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--rate 1e-4", {"rate": 1e-4}),
        ("--rate=1e-4", {"rate": 1e-4}),
        ("--lr 1e-4", {"rate": 1e-4}),
        ("--steps -1", {"steps": -1}),
        ("--packing", {"packing": True}),
        ("--packing true", {"packing": True}),
        ("--packing=false", {"packing": False}),
        ("--packing --rate 1", {"packing": True, "rate": 1.0}),
        ("--limit none", {"limit": None}),
        ("--limit=None", {"limit": None}),
        ("--resume", {"resume": True}),
        ("--resume true", {"resume": True}),
        ("--resume out/checkpoint-5", {"resume": "out/checkpoint-5"}),
        ("--names q_proj v_proj --rate 2", {"names": ["q_proj", "v_proj"], "rate": 2.0}),
        ("--names=q_proj", {"names": ["q_proj"]}),
        ("--report_to none", {"report_to": "none"}),
        ("--report-to wandb trackio", {"report_to": ["wandb", "trackio"]}),
        ('--kwargs {"dtype":"bfloat16"}', {"kwargs": {"dtype": "bfloat16"}}),
        ("--kwargs zero3.json", {"kwargs": "zero3.json"}),
        ("--loss losses:mine", {"loss": "losses:mine"}),
        ("--multiple 8", {"multiple": 8}),
        ("--multiple none", {"multiple": "none"}),
        ("--space false", {"space": False}),
    ],
)
def test_spellings_of_the_command_line(options, line, expected):
    read = said(options, line)
    assert read == expected
    assert [type(value) for value in read.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({"rate": 1}, {"rate": 1.0}),
        ({"packing": "yes"}, {"packing": True}),
        ({"limit": None}, {"limit": None}),
        ({"limit": "none"}, {"limit": None}),
        ({"names": "all-linear"}, {"names": ["all-linear"]}),
        ({"report_to": "none"}, {"report_to": "none"}),
        ({"resume": "no"}, {"resume": False}),
        ({"rows": [{"path": "a"}, {"path": "b"}]}, {"rows": [{"path": "a"}, {"path": "b"}]}),
        ({"lr": 0.5}, {"rate": 0.5}),
    ],
)
def test_values_of_a_file(options, file, expected):
    assert said(options, **file) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--rat 1", "unknown option --rat. Did you mean '--rate'"),
        ("--report_too=none", "unknown option --report_too. Did you mean '--report_to'"),
        ("--pack", "unknown option --pack. Did you mean '--packing'"),
        ("stray", "'stray' is not an option"),
        ("--limit abc", r"limit=abc is not what it takes: integer\."),
        ("--rate fast", r"rate=fast is not what it takes: number\."),
        ("--packing maybe", r"packing=maybe is not what it takes: true\|false\."),
        ("--limit", "--limit: expected one argument"),
    ],
)
def test_errors_of_the_command_line(options, line, words):
    with pytest.raises(ValueError, match=words):
        options.read(line.split())


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"seed": 1, "rat": 1}, "run.yaml:1: unknown option 'seed'"),
        ({"rate": 1, "reprot_to": "none"}, "run.yaml:2: unknown option 'reprot_to'. Did you mean 'report_to'"),
        ({"limit": 1.5}, "run.yaml:1: limit=1.5 is not what it takes: integer"),
        ({"packing": 3}, "run.yaml:1: packing=3"),
    ],
)
def test_errors_of_a_file_name_the_line(options, file, words):
    with pytest.raises(ValueError, match=words):
        said(options, **file)


def test_the_command_line_beats_the_file_beats_the_default_by_presence(options):
    read = said(options, "--packing false --rate 0.001", packing=True, rate=7.0, steps=3)
    mine = options.build({name: Setting(value, "") for name, value in read.items()})[0]
    assert (mine.packing, mine.rate, mine.steps, mine.limit) == (False, 1e-3, 3, 10)


def test_the_dump_says_where_each_value_comes_from_and_reads_back(options):
    settings = options.read(["--rate", "1e-4"], {"steps": Setting(3, "run.yaml:1")})
    text = dump(options.build(settings), settings)
    assert text.splitlines()[:3] == ["rate: 0.0001  # command line", "steps: 3  # run.yaml:1", "limit: 10  # default"]
    assert said(options, **yaml.safe_load(text))["rate"] == 1e-4


def test_a_field_is_documented_by_the_string_under_it_or_its_metadata():
    assert options_of(Mine)["steps"].help == "how long"
    docs = field_docs(SFTConfig)
    assert docs["eos_token"].startswith("End-of-sequence token, if not the tokenizer's own;")
    assert "transformers'" not in docs["logging_steps"]
    assert docs["logging_steps"].startswith("Optimizer steps between two log lines")
    assert [name for name, text in docs.items() if not text] == []


def test_the_owner_of_an_option_is_the_class_that_has_it_first():
    owners = field_owners(SFTConfig)
    assert owners["max_length"] is DataArguments
    assert owners["packing"] is PackingArguments
    assert owners["loss_type"] is SFTConfig
    assert owners["learning_rate"] is owners["bf16"] is TrainingArguments
    assert set(owners) == {f.name for f in fields(SFTConfig)}


def test_the_help_lists_every_option_under_its_owner():
    options = Options("strop sft", [ScriptArguments, ModelConfig, SFTConfig])
    text = options.parser.format_help()
    sections = {part.split(":\n")[0].splitlines()[-1] for part in text.split("\n\n") if ":\n" in part}
    assert {"ScriptArguments", "ModelConfig", "DataArguments", "SFTConfig", "TrainingArguments"} <= sections
    missing = [name for name in options.options if f"  --{name} " not in text and f"  --{name}\n" not in text]
    assert missing == []
    assert text.index("--lora_r ") < text.index("DataArguments:") < text.index("--max_length") < text.index("--optim ")


def test_every_field_of_the_config_reads_back_its_own_default_from_a_file():
    options = Options("strop sft", [SFTConfig])
    defaults = {name: option.default for name, option in options.options.items()}
    defaults["include_num_input_tokens_seen"] = False  # which is what its "no" means
    values = {name: Setting(value, "f:1") for name, value in defaults.items()}
    assert {name: s.value for name, s in options.read_file(values).items()} == {n: defaults[n] for n in values}


class TestOldNames:
    @pytest.fixture(autouse=True)
    def nothing_was_said_yet(self, monkeypatch):
        monkeypatch.setattr(compat, "_warned", set())

    def test_an_old_flag_is_the_new_option(self):
        with pytest.warns(FutureWarning, match="max_length"):
            assert said(Options("t", [SFTConfig]), "--max_seq_length 64") == {"max_length": 64}

    def test_an_old_flag_beats_the_new_name_in_a_file(self):
        with pytest.warns(FutureWarning):
            assert said(Options("t", [SFTConfig]), "--max_seq_length 64", max_length=32) == {"max_length": 64}

    def test_both_names_in_one_place_are_refused(self):
        with pytest.raises(ValueError, match="old name of max_length"), pytest.warns(FutureWarning):
            said(Options("t", [SFTConfig]), "--max_seq_length 64 --max_length 64")

    def test_a_removed_option_names_its_replacement(self):
        with pytest.raises(ValueError, match="TENSORBOARD_LOGGING_DIR"):
            said(Options("t", [SFTConfig]), "--logging_dir logs")


@dataclass
class Needs:
    model: str
    beta: float = 0.1


class TestTrlParser:
    def test_each_class_gets_its_own_fields(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text("dataset_name: rows.jsonl\nlearning_rate: 1e-4\nmax_length: 64\n")
        parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
        words = ["--config", str(path), "--max_length", "32", "--use_cpu", "--model_name_or_path", "m"]
        script, args, model = parser.parse_args_and_config(words)
        assert (script.dataset_name, args.learning_rate, args.max_length, model.model_name_or_path) == (
            "rows.jsonl",
            1e-4,
            32,
            "m",
        )

    def test_a_required_field_may_come_from_the_file(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text("model: m\n")
        (needs,) = TrlParser(Needs).parse_args_and_config([f"--config={path}"])
        assert needs == Needs("m")
        with pytest.raises(ValueError, match="missing --model"):
            TrlParser(Needs).parse_args_and_config([])

    def test_words_that_no_option_takes(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text("model: m\nport: 8\n")
        line = ["--config", str(path), "--beta", "0.5", "--other", "1"]
        with pytest.raises(ValueError, match="unknown option --other"):
            TrlParser(Needs).parse_args_and_config(line)
        needs, rest = TrlParser(Needs).parse_args_and_config(line, True, fail_with_unknown_args=False)
        assert (needs, rest) == (Needs("m", 0.5), ["--other", "1", "--port", "8"])

    def test_defaults_lose_against_everything(self, tmp_path):
        parser = TrlParser(Needs)
        assert parser.set_defaults_with_config(model="d", beta=0.7, port=8) == ["--port", "8"]
        assert parser.parse_args_and_config([]) == (Needs("d", 0.7),)
        assert parser.parse_args_and_config(["--beta", "0.2"]) == (Needs("d", 0.2),)

    def test_a_program_ends_with_code_2(self, monkeypatch, capsys):
        monkeypatch.setattr("sys.argv", ["train.py", "--bta", "1"])
        with pytest.raises(SystemExit, match="2"):
            TrlParser(Needs).parse_args_and_config()
        assert "train.py: error: unknown option --bta. Did you mean '--beta'" in capsys.readouterr().err

    def test_a_field_named_config_is_refused(self):
        @dataclass
        class Clash:
            config: str = ""

        with pytest.raises(ValueError, match="Clash has a field named config"):
            TrlParser(Clash)


def test_all_fields_of_training_arguments_are_options():
    assert {f.name for f in fields(BaseConfig) if f.init} == set(options_of(BaseConfig))
