"""The table of old names: every line of it does what it says, once audibly."""

import dataclasses
import inspect
import warnings

import pytest

import strop.trainer
from strop import SFTConfig, compat
from strop.compat import OLD_NAMES, OLD_VALUES, Moved, Removed, Renamed, accepts_old_names, translate
from strop.models.model_config import ModelConfig

CONFIGS = {name: getattr(strop.trainer, name) for name in strop.trainer.__all__ if name.endswith("Config")}
CONFIGS["ModelConfig"] = ModelConfig
FIELDS = {name: {field.name for field in dataclasses.fields(cls)} for name, cls in CONFIGS.items()}
TRAINER_ARGUMENTS = {"model", "args", "processing_class", "train_dataset", "callbacks"}
LINES = [(cls, old, entry) for cls, table in OLD_NAMES.items() for old, entry in table.items()]


@pytest.fixture(autouse=True)
def nothing_was_said_yet(monkeypatch):
    monkeypatch.setattr(compat, "_warned", set())


def known(cls_name):
    own = inspect.signature(getattr(strop, cls_name, object).__init__).parameters
    return FIELDS.get(cls_name) or {*own} - {"self", "args", "kwargs"} | TRAINER_ARGUMENTS


@pytest.mark.parametrize(("cls_name", "old", "entry"), LINES, ids=[f"{cls}.{old}" for cls, old, _ in LINES])
def test_every_old_name(cls_name, old, entry):
    assert old not in known(cls_name), "a name can't be old and current"
    if isinstance(entry, Removed):
        with pytest.raises(ValueError, match=f"no option '{old}' any more: "):
            translate(cls_name, {old: 1}, known(cls_name))
        return
    with pytest.warns(FutureWarning, match=rf"\({old}=\.\.\.\) is now .*{entry.to}"):
        current, moved = translate(cls_name, {old: True}, known(cls_name))
    value = entry.value(True) if isinstance(entry, Renamed) and entry.value else True
    if isinstance(entry, Moved):
        assert entry.to in FIELDS[cls_name.replace("Trainer", "Config")]
        assert (current, moved) == ({}, {entry.to: value})
    else:
        assert entry.to in known(cls_name)
        assert (current, moved) == ({entry.to: value}, {})


@pytest.mark.parametrize(
    ("cls_name", "option", "old"),
    [(cls, option, old) for cls, options in OLD_VALUES.items() for option, olds in options.items() for old in olds],
)
def test_every_old_value(cls_name, option, old):
    with pytest.warns(FutureWarning, match=f"{option}='{old}' is now called"):
        current, _ = translate(cls_name, {option: old}, known(cls_name))
    assert current == {option: OLD_VALUES[cls_name][option][old]}
    packing = {"packing": True} if option == "packing_strategy" else {}  # without which it has no effect
    assert CONFIGS[cls_name](**current, **packing, use_cpu=True)


def test_a_warning_comes_once_and_points_at_the_caller():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SFTConfig(max_seq_length=8, use_cpu=True)
        SFTConfig(max_seq_length=9, use_cpu=True)
        SFTConfig(loss_type="chunked_nll", use_cpu=True)
    assert [warning.filename for warning in caught] == [__file__, __file__]


def test_old_and_new_with_different_values_are_refused():
    with pytest.raises(ValueError, match="max_length=8 and max_seq_length=9"), pytest.warns(FutureWarning):
        SFTConfig(max_length=8, max_seq_length=9, use_cpu=True)


def test_old_and_new_with_the_same_value_agree():
    with pytest.warns(FutureWarning):
        assert SFTConfig(max_length=8, max_seq_length=8, use_cpu=True).max_length == 8


def test_unknown_options_name_the_nearest():
    with pytest.raises(TypeError, match=r"SFTConfig has no option 'learning_rte'\. Did you mean 'learning_rate'"):
        SFTConfig(learning_rte=1e-5)


def test_old_options_of_the_data_and_the_schedule_reach_their_fields():
    with pytest.warns(FutureWarning):
        args = SFTConfig(use_cpu=True, evaluation_strategy="epoch", warmup_ratio=0.1, group_by_length=True)
    assert (args.eval_strategy, args.warmup_steps, args.train_sampling_strategy) == ("epoch", 0.1, "group_by_length")


@accepts_old_names
class SFTTrainer:
    """Stands for the trainer: remembers what it got."""

    def __init__(self, model, args=None, train_dataset=None, processing_class=None):
        self.args, self.processing_class = args, processing_class


class TestTrainer:
    def test_tokenizer_is_processing_class(self):
        with pytest.warns(FutureWarning, match="processing_class"):
            assert SFTTrainer("m", tokenizer="tok").processing_class == "tok"

    def test_what_moved_to_the_config_arrives_there(self):
        args = SFTConfig(use_cpu=True)
        with pytest.warns(FutureWarning, match="a field of its config"):
            trainer = SFTTrainer("m", args, max_seq_length=64, packing=True)
        assert (trainer.args.max_length, trainer.args.packing) == (64, True)
        assert (args.max_length, args.packing) == (1024, False), "the caller's config is its own"

    def test_without_a_config_the_fields_arrive_as_a_dict(self):
        with pytest.warns(FutureWarning):
            assert SFTTrainer("m", dataset_text_field="body").args == {"dataset_text_field": "body"}

    def test_a_config_that_says_something_else_is_refused(self):
        args = SFTConfig(use_cpu=True, max_length=32)
        with pytest.raises(ValueError, match="keep the one in the config"), pytest.warns(FutureWarning):
            SFTTrainer("m", args, max_seq_length=64)

    def test_current_arguments_pass_silently_and_subclasses_too(self):
        class Mine(SFTTrainer):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert Mine("m", None, processing_class="tok").processing_class == "tok"

    def test_unknown_arguments_name_the_nearest(self):
        with pytest.raises(TypeError, match="Did you mean 'train_dataset'"):
            SFTTrainer("m", train_datset=[])
