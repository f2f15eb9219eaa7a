"""Config files: scalars as written, the line of every key, and errors that name the place."""

import pytest

from strop.cli.yaml_config import Setting, apply_environment, read_config, read_value


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("12", 12),
        ("-1", -1),
        ("true", True),
        ("False", False),
        ("no", "no"),  # eval_strategy: no
        ("on", "on"),
        ("null", None),
        ("'1e-4'", "1e-4"),
        ("1e-4b", "1e-4b"),
        ("[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("{dtype: bfloat16}", {"dtype": "bfloat16"}),
    ],
)
def test_scalars(config, text, value):
    read = read_config(config(f"key: {text}\n"))["key"].value
    assert read == value
    assert type(read) is type(value)


def test_every_key_knows_its_line(config):
    path = config("# a comment\nlearning_rate: 1e-4\n\nmodel_init_kwargs:\n  dtype: bfloat16\nseed: 1\n")
    assert {key: setting.origin for key, setting in read_config(path).items()} == {
        "learning_rate": f"{path}:2",
        "model_init_kwargs": f"{path}:4",
        "seed": f"{path}:6",
    }


def test_sections_have_settings_with_lines_of_their_own(config):
    path = config("env: {A: 1}\nstages:\n  sft:\n    seed: 1\n    lora: {r: 2}\n  dpo:\n")
    read = read_config(path, {"stages": 2})
    assert read["env"].value == {"A": 1}
    assert read["stages"].value["sft"].value == {
        "seed": Setting(1, f"{path}:4"),
        "lora": Setting({"r": 2}, f"{path}:5"),
    }
    assert read["stages"].value["dpo"] == Setting(None, f"{path}:6")


def test_a_value_alone():
    assert [read_value(text) for text in ("1e-4", "no", "[a, 2]")] == [1e-4, "no", ["a", 2]]
    with pytest.raises(ValueError, match="put quotes around"):
        read_value("[a")


def test_an_empty_file_says_nothing(config):
    assert read_config(config("# nothing yet\n")) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nseed: 2\n", r"run.yaml:2: seed was given before, at .*run.yaml:1"),
        ("seed: 1\nname: [a\n", r"run.yaml:3: not YAML"),
        ("- seed\n", r"run.yaml:1: a config file is a mapping"),
        ("seed: 1\nenv: 3\n", r"run.yaml:2: env=3 must be a mapping"),
    ],
)
def test_errors_name_file_and_line(config, text, words):
    with pytest.raises(ValueError, match=words):
        apply_environment(read_config(config(text)))


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"there is no config file 'nowhere.yaml'"):
        read_config("nowhere.yaml")


def test_env_sets_variables_and_is_no_option(monkeypatch):
    monkeypatch.setenv("STROP_TEST_FLAG", "before")
    settings = {"env": Setting({"STROP_TEST_FLAG": True}, "f:1"), "seed": Setting(1, "f:2")}
    assert apply_environment(settings) == {"seed": Setting(1, "f:2")}
    import os

    assert os.environ["STROP_TEST_FLAG"] == "true"
