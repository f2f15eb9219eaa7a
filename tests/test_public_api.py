"""What `strop` exports: importable, lazy, and visible to type checkers."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import strop
import strop.scripts
import strop.trainer

# Names of TRL 1.16 that users of supervised fine-tuning, preferences and reward models import from the top level.
TRL_NAMES = {
    "BEMACallback",
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LogCompletionsCallback",
    "RewardConfig",
    "RewardTrainer",
    "SyncRefModelCallback",
    "DatasetMixtureConfig",
    "ModelConfig",
    "RichProgressCallback",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "TrlParser",
    "apply_chat_template",
    "clone_chat_template",
    "extract_prompt",
    "get_dataset",
    "get_peft_config",
    "get_quantization_config",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "unpair_preference_dataset",
}


def test_the_names_users_know_are_there():
    assert set(strop.__all__) >= TRL_NAMES


@pytest.mark.parametrize("name", strop.__all__)
def test_every_exported_name_imports_and_is_called_so(name):
    value = getattr(strop, name)
    assert getattr(value, "__name__", name) == name
    assert name in dir(strop)


@pytest.mark.parametrize("module", [strop.trainer, strop.scripts])
def test_lazy_packages_hold_what_they_list(module):
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


EXPERIMENTAL = {
    method.lower(): {f"{method}Config", f"{method}Trainer"}
    for method in ["BCO", "CPO", "KTO", "ORPO", "PRM", "SimPO", "TPO"]
}
for name, method in {"online_dpo": "OnlineDPO", "nash_md": "NashMD", "xpo": "XPO"}.items():
    EXPERIMENTAL[name] = {f"{method}Config", f"{method}Trainer"}
EXPERIMENTAL["winrate_callback"] = {"WinRateCallback"}
EXPERIMENTAL["judges"] = {
    *("AllTrueJudge", "BaseBinaryJudge", "BaseJudge", "BasePairwiseJudge", "BaseRankJudge"),
    *("PairwiseJudge", "RandomPairwiseJudge", "RandomRankJudge", "RewardJudge"),
}
EXPERIMENTAL["bema_for_ref_model"] = {"BEMACallback", "DPOTrainer"}


@pytest.mark.parametrize(("module", "names"), EXPERIMENTAL.items())
def test_the_import_paths_of_experimental_methods_work_too(module, names):
    module = importlib.import_module(f"strop.experimental.{module}")
    assert set(module.__all__) == names
    for name in names:
        assert getattr(module, name) is getattr(strop, name)


def test_type_checkers_see_the_same_names_in_the_same_modules():
    tree = ast.parse(Path(strop.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: line.module for line in block.body for alias in line.names}
    assert seen == {name: module for module, names in strop.EXPORTS.items() for name in names}
    assert {*seen, "__version__"} == set(strop.__all__)


def test_importing_the_package_loads_only_the_standard_library():
    code = "import sys; before = set(sys.modules); import strop; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {name.split(".")[0] for name in loaded} <= {"strop"} | sys.stdlib_module_names


def test_a_name_that_is_gone_says_what_does_its_job():
    with pytest.raises(ImportError, match=r"SFTConfig\(completion_only_loss=True\)"):
        from strop import DataCollatorForCompletionOnlyLM  # noqa: F401


def test_a_misspelt_name_is_an_attribute_error_with_the_nearest():
    with pytest.raises(AttributeError, match="Did you mean 'SFTTrainer'"):
        strop.SFTTrainr  # noqa: B018
    assert not hasattr(strop, "SFTTrainr")
