"""Reward functions by name."""

import sys

import pytest

from strop.rewards import accuracy_reward, resolve_reward, think_format_reward
from strop.rewards.resolve import FACTORIES, FUNCTIONS, _imported


def test_shipped_functions_by_either_name():
    assert resolve_reward("accuracy") is accuracy_reward
    assert resolve_reward("accuracy_reward") is accuracy_reward
    assert resolve_reward("think_format") is think_format_reward


@pytest.mark.parametrize("place", [*FUNCTIONS.values(), *FACTORIES.values()])
def test_every_place_in_the_tables_exists(place):
    assert callable(_imported(place))


def test_factories_take_options_in_brackets():
    reward = resolve_reward("soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)")
    assert reward(completion_ids=[[0] * 3]) == [-0.5]
    assert resolve_reward("get_repetition_penalty_reward(ngram_size=1)")(completion_ids=[[1, 1]]) == [-0.5]
    assert resolve_reward("repetition_penalty").__name__ == "repetition_penalty_reward"
    assert resolve_reward("json(schema={'type': 'array'})")(completions=["[]", "{}"]) == [1, 0]
    assert resolve_reward(r"regex(pattern='a(b|c)')")(completions=["ab", "ad"]) == [1, 0]


def test_functions_of_the_working_directory_and_of_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rewards_of_mine.py").write_text(
        "def short(completions): return [-len(c) for c in completions]\n"
        "def times(factor): return lambda completions: [factor] * len(completions)\n"
        "five = 5\n"
    )
    assert resolve_reward("rewards_of_mine.short")(["abc"]) == [-3]
    assert resolve_reward("rewards_of_mine.times(factor=2)")(["abc"]) == [2]
    assert resolve_reward("strop.rewards.formats.think_format_reward") is think_format_reward
    with pytest.raises(ValueError, match=r"rewards_of_mine has no 'shrt'\. Did you mean 'short'\? Choices: accuracy"):
        resolve_reward("rewards_of_mine.shrt")
    with pytest.raises(ValueError, match="is int, which can't be called"):
        resolve_reward("rewards_of_mine.five")
    with pytest.raises(ValueError, match=r"can't be made: .*'factr'"):
        resolve_reward("rewards_of_mine.times(factr=2)")
    (tmp_path / "broken_rewards.py").write_text("import no_such_module_at_all")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        resolve_reward("broken_rewards.short")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acuracy", r"Did you mean 'accuracy'\? Choices: accuracy, .*my_rewards.short; or the folder"),
        ("no_such_module_here.f", "no module is called no_such_module_here. Choices"),
        ("accuracy(x=1)", "accuracy takes no options"),
        ("cosine_scaled", "can't be made: .*'max_len'"),
        ("cosine_scaled(10)", "options are written name=value"),
        ("cosine_scaled(max_len=", "can't be read"),
        ("cosine_scaled(max_len=open('x'))", "can't be read"),
        ("out/no-such-folder", "no-such-folder"),
    ],
)
def test_what_names_nothing_lists_the_choices(name, message):
    with pytest.raises(ValueError, match=message):
        resolve_reward(name)
