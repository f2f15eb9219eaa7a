"""The `strop` command: finds subcommands, and says what there is."""

import json
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from strop import __version__
from strop.cli import env, main


def test_help_lists_every_command(capsys):
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main.main(words) == 0
        text = capsys.readouterr().out
        assert [name for name in (*main.TRAINING, *main.COMMANDS) if f"\n  {name} " not in text] == []


def test_version(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"strop {__version__}\n"


def test_an_unknown_command_names_the_nearest_and_fails(capsys):
    assert main.main(["quikstart"]) == 2
    assert "there is no command 'quikstart'. Did you mean 'quickstart'?" in capsys.readouterr().err


def test_the_rest_of_the_words_go_to_the_command(monkeypatch):
    monkeypatch.setitem(main.COMMANDS, "env", (f"{__name__}:spy", ""))
    assert main.main(["env", "--json", "x"]) == 7
    assert spy.words == ["--json", "x"]


def spy(words):
    spy.words = words
    return 7


def test_help_imports_nothing_heavy():
    code = "import sys; from strop.cli.main import main; main(['--help']); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "transformers", "datasets", "jsonargparse", "yaml"} & set(loaded)


class TestEnv:
    def test_json_and_text_tell_the_same_versions(self, capsys):
        assert env.main(["--json"]) in (0, 1)
        found = json.loads(capsys.readouterr().out)
        assert found["strop"] == __version__
        env.main([])
        text = capsys.readouterr().out
        for name, facts in (found["packages"] | found["optional"]).items():
            assert f"  {name:<20}{facts['version'] or '-':<16}{facts['supported']:<16}{facts['verdict']}" in text

    @pytest.mark.parametrize(
        ("requirement", "verdict"),
        [
            ("pytest>=1", "ok"),
            ("pytest<1", "needs <1"),
            ('no-such-package>=2; extra == "vllm"', "not installed: pip install strop[vllm]"),
        ],
    )
    def test_verdicts(self, requirement, verdict):
        assert env.package(Requirement(requirement))["verdict"] == verdict
