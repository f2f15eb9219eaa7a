"""Configs: defaults, what they refuse and with which words, and what survives JSON."""

import dataclasses
import json
import warnings

import pytest
import torch
import transformers

from strop.trainer import checks
from strop.trainer import config as config_module
from strop.trainer.config import SFTConfig, config_for

# Every field of TRL 1.16's SFTConfig that transformers' TrainingArguments doesn't have, with its default.
TRL_FIELDS = {
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "chat_template_path": None,
    "dataset_text_field": "text",
    "dataset_kwargs": None,
    "dataset_num_proc": None,
    "eos_token": None,
    "max_length": 1024,
    "truncation_mode": "keep_start",
    "shuffle_dataset": False,
    "packing": False,
    "packing_strategy": "bfd",
    "padding_free": False,
    "pad_to_multiple_of": "auto",
    "eval_packing": None,
    "completion_only_loss": None,
    "assistant_only_loss": False,
    "loss_type": "nll",
    "activation_offloading": False,
    "pad_token": None,
}


def no_gpu():
    return not torch.accelerator.is_available()


def test_every_field_of_trl_exists_with_its_default():
    ours = {field.name: field.default for field in dataclasses.fields(SFTConfig)}
    assert {name: ours[name] for name in TRL_FIELDS} == TRL_FIELDS


def test_every_field_has_a_default():
    required = [
        field.name
        for field in dataclasses.fields(SFTConfig)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    assert required == []


def test_defaults_differ_from_transformers_where_post_training_does():
    args = SFTConfig(use_cpu=True)
    assert (args.learning_rate, args.logging_steps, args.gradient_checkpointing) == (2e-5, 10, True)
    assert (args.report_to, args.logging_nan_inf_filter, args.ddp_find_unused_parameters) == ([], False, False)
    assert (args.bf16, args.fp16) == (False, False)
    assert args.output_dir == transformers.TrainingArguments(use_cpu=True).output_dir


def test_no_warning_for_the_defaults_nor_for_either_name_of_checkpointing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SFTConfig(use_cpu=True)
        old = SFTConfig(use_cpu=True, gradient_checkpointing=False)
        new = SFTConfig(use_cpu=True, activation_checkpointing=False)
        kwargs = SFTConfig(use_cpu=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert old.activation_checkpointing is old.gradient_checkpointing is new.gradient_checkpointing is False
    assert kwargs.activation_checkpointing_kwargs == {"use_reentrant": False}


def test_a_copy_keeps_what_it_does_not_change():
    args = dataclasses.replace(SFTConfig("out", use_cpu=True, packing=True, seed=7), max_length=5)
    assert (args.output_dir, args.packing, args.seed, args.max_length) == ("out", True, 7, 5)


@pytest.mark.parametrize(
    ("kind", "native", "expected"),
    [("cuda", "bf16", (True, False)), ("cuda", "fp16", (False, True)), ("cpu", "no", (False, False))],
)
def test_the_device_decides_the_precision(monkeypatch, kind, native, expected):
    monkeypatch.setattr(SFTConfig, "device_type", kind)
    monkeypatch.setattr(config_module, "mixed_precision_of", lambda device_type: native)
    args = SFTConfig.__new__(SFTConfig)
    args.bf16 = args.fp16 = None
    args._decide_precision()
    assert (args.bf16, args.fp16) == expected


def test_the_launcher_decides_the_precision_before_the_device(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert SFTConfig(use_cpu=True).bf16 is True
    assert SFTConfig(use_cpu=True, bf16=False).bf16 is False


@pytest.mark.skipif(not no_gpu(), reason="about machines without an accelerator")
def test_bf16_on_a_cpu_needs_no_further_option():
    args = SFTConfig(bf16=True)
    assert args.bf16 is True
    assert args.device.type == "cpu"


def test_bf16_without_support_names_the_alternative():
    with pytest.raises(ValueError, match=r"this cuda device has no bfloat16; use fp16=True"):
        checks.precision(True, False, "cuda", native="fp16")


@pytest.mark.skipif(not no_gpu(), reason="about machines without an accelerator")
def test_fp16_may_be_written_on_a_cpu_and_is_refused_where_it_would_train():
    args = SFTConfig(fp16=True)
    assert (args.fp16, args.bf16) == (True, False)
    with pytest.raises(ValueError, match="fp16=True needs a GPU"):
        config_for(SFTConfig, args, "a/model", "SFT")


REFUSED = [
    ({"loss_type": "nlll"}, "loss_type='nlll' is unknown.*Did you mean 'nll'"),
    ({"optim": "adamw"}, "optim='adamw' is unknown.*Did you mean 'adamw_torch'"),
    ({"eval_strategy": "step"}, "eval_strategy='step' is unknown.*Did you mean 'steps'"),
    ({"lr_scheduler_type": "cosin"}, "Did you mean 'cosine'"),
    ({"packing_strategy": "bdf", "packing": True}, "Did you mean 'bfd'"),
    ({"truncation_mode": "keep_stat"}, "Did you mean 'keep_start'"),
    ({"overlong": "trunc"}, "Did you mean 'truncate'"),
    ({"layout": "pack"}, "Did you mean 'packed'"),
    ({"train_on_turns": "lst", "assistant_only_loss": True}, "Did you mean 'last'"),
    ({"packing": True, "max_length": None}, "max_length=None; set max_length"),
    ({"eval_packing": True, "max_length": None}, "max_length=None; set max_length"),
    ({"packing_strategy": "wrapped"}, "no effect with packing=False"),
    ({"packing": True, "overlong": "split"}, 'packing_strategy="bfd_split"'),
    ({"packing": True, "layout": "padded"}, 'layout="auto" or packing=False'),
    ({"padding_free": True, "layout": "padded"}, "contradict"),
    ({"max_length": None, "overlong": "error"}, "overlong='error' has no effect with max_length=None"),
    ({"truncation_mode": "keep_end", "overlong": "drop"}, "no effect with overlong='drop'"),
    ({"train_on_turns": "last"}, "set assistant_only_loss=True"),
    ({"loss_type": "dft", "label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 .* loss_type='dft'"),
    ({"label_smoothing_factor": 1.0}, "label_smoothing_factor=1.0 is out of range"),
    ({"learning_rate": -1e-5}, "learning_rate=-1e-05 is out of range"),
    ({"learning_rate": float("nan")}, "learning_rate=nan is out of range"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 is out of range"),
    ({"max_length": 0}, "max_length=0 is out of range"),
    ({"dataset_kwargs": {"skip_prepare": True}}, "Did you mean 'skip_prepare_dataset'"),
    ({"model_init_kwargs": "dtype=bfloat16"}, "is not JSON"),
    ({"model_init_kwargs": "[1]"}, "is a JSON list; it must be an object"),
    ({"pad_to_multiple_of": "eight"}, "pad_to_multiple_of='eight'"),
    ({"activation_offloading": True}, "this run is on a CPU"),
    ({"use_liger_kernel": True}, "needs a GPU"),
    ({"liger_kernel_config": {"rope": True}}, "no effect with use_liger_kernel=False"),
    ({"bf16": True, "fp16": True}, "contradict"),
    ({"gradient_checkpointing": False, "activation_checkpointing": True}, "two names of one option"),
    ({"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, "no effect"),
    ({"label_names": ["answers"]}, "label_names=\\['answers'\\] would have no effect"),
    ({"average_tokens_across_devices": False}, "the mean over all tokens of a step"),
    ({"load_best_model_at_end": True}, 'eval_strategy="no"; set eval_strategy="steps"'),
    ({"train_sampling_strategy": "by_length"}, "Did you mean 'group_by_length'"),
    ({"length_column_name": "size"}, "length_column_name='size' would have no effect"),
    ({"neftune_noise_alpha": -1.0}, "neftune_noise_alpha=-1.0 is out of range"),
    (
        {"dataset_kwargs": {"skip_prepare_dataset": True}, "packing": True},
        "packing=True would have no effect with dataset_kwargs",
    ),
    (
        {"dataset_kwargs": {"skip_prepare_dataset": True}, "assistant_only_loss": True},
        "assistant_only_loss=True would have no",
    ),
    (
        {"dataset_kwargs": {"skip_prepare_dataset": True}, "shuffle_dataset": True},
        "shuffle_dataset=True would have no effect",
    ),
    ({"loss_type": "strop.losses.supervised:no_such"}, "cannot be imported"),
    ({"loss_type": "strop.losses.supervised:SUPERVISED_LOSSES"}, "is a dict; it must be a function"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_refused_with_reason_and_remedy(options, words):
    with pytest.raises(ValueError, match=words):
        SFTConfig(use_cpu=True, **options)


@pytest.mark.parametrize("given", ["auto", None, "none", "8", 8])
def test_pad_to_multiple_of_becomes_a_number_or_none(given):
    assert SFTConfig(use_cpu=True, pad_to_multiple_of=given).pad_to_multiple_of == (8 if given in ("8", 8) else None)


def half(logps):
    return -0.5 * logps


def test_json_brings_back_the_same_config():
    args = SFTConfig(
        "out",
        use_cpu=True,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        model_init_kwargs='{"dtype": "bfloat16"}',
        loss_type=half,
        packing=True,
        packing_strategy="wrapped",
        lr_scheduler_type="cosine",
        accelerator_config={"split_batches": True},
    )
    text = args.to_json_string()
    again = SFTConfig(**json.loads(text))
    assert again.to_json_string() == text
    assert again.loss_type is half
    assert (again.eos_token, again.pad_token) == ("<|im_end|>", "<pad>")
    assert again.model_init_kwargs == {"dtype": "bfloat16"}


def test_json_neither_shows_nor_invents_a_token():
    args = SFTConfig("out", use_cpu=True, hub_token="secret")
    text = args.to_json_string()
    assert "secret" not in text
    assert SFTConfig(**json.loads(text)).hub_token is None


def test_to_dict_leaves_the_config_as_it_is():
    quantization = transformers.BitsAndBytesConfig(load_in_8bit=True)
    init = {"quantization_config": quantization, "dtype": torch.bfloat16}
    args = SFTConfig("out", use_cpu=True, model_init_kwargs=init)
    assert args.to_dict()["model_init_kwargs"]["dtype"] == "bfloat16"
    assert args.model_init_kwargs["quantization_config"] is quantization
    assert args.model_init_kwargs["dtype"] is torch.bfloat16


class TestConfigFor:
    def test_nothing_is_the_defaults_in_a_folder_named_after_the_model(self):
        assert config_for(SFTConfig, None, "Qwen/Qwen3-0.6B", "SFT").output_dir == "Qwen3-0.6B-SFT"
        assert config_for(SFTConfig, None, "/models/mine/", "SFT").output_dir == "mine-SFT"

    def test_a_dict_is_fields_over_these_defaults(self):
        args = config_for(SFTConfig, {"packing": True}, "a/b", "SFT")
        assert (args.output_dir, args.packing) == ("b-SFT", True)

    def test_plain_arguments_keep_their_values(self):
        plain = transformers.TrainingArguments("out", use_cpu=True, hub_token="secret", max_steps=3)
        args = config_for(SFTConfig, plain, "a/b", "SFT")
        assert (args.output_dir, args.max_steps, args.hub_token, args.max_length) == ("out", 3, "secret", 1024)
        assert (args.learning_rate, args.gradient_checkpointing) == (5e-5, False)

    def test_a_config_is_itself(self):
        args = SFTConfig("out", use_cpu=True)
        assert config_for(SFTConfig, args, "a/b", "SFT") is args

    def test_anything_else_is_refused(self):
        with pytest.raises(ValueError, match="args is a str"):
            config_for(SFTConfig, "out", "a/b", "SFT")
