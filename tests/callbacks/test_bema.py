"""Averaged weights: golden traces, frozen weights, resume, and what ends up on disk."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, TrainerState

from strop.callbacks.bema import BEMACallback
from strop.models.reference import FrozenModel, weights_replaced

CASES = json.loads(Path(__file__).parents[1].joinpath("goldens", "bema.json").read_text())


class Line(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(values, dtype=torch.float64))


def arguments(folder="unused"):
    return SimpleNamespace(output_dir=str(folder), fsdp=None)


def state(step=0, max_steps=10):
    return TrainerState(global_step=step, max_steps=max_steps, is_world_process_zero=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["args"]))
def test_golden_traces(case):
    callback, model = BEMACallback(**case["args"]), Line(case["theta_init"])
    callback.on_train_begin(arguments(), state(), None, model=model)
    for row in case["trace"]:
        model.theta.data = torch.tensor(row["theta"], dtype=torch.float64)
        callback.on_step_end(arguments(), state(row["step"]), None, model=model)
        for mine, theirs in ((callback.ema, row["ema"]), (callback.bema, row["bema"])):
            torch.testing.assert_close(mine["theta"], torch.tensor(theirs, dtype=torch.float64), rtol=1e-12, atol=0)


def test_by_hand():
    """lag 0, powers 1: at t = 2 beta = alpha = 1/2. From 0 to 4: ema = 2, bema = 2 + (4 - 0) / 2 = 4."""
    callback, model = BEMACallback(update_freq=2, ema_power=1, bias_power=1, lag=0), Line([0.0])
    callback.on_train_begin(arguments(), state(), None, model=model)
    model.theta.data.fill_(4.0)
    callback.on_step_end(arguments(), state(2), None, model=model)
    assert (callback.ema["theta"].item(), callback.bema["theta"].item()) == (2.0, 4.0)


def walk(model, callback, steps, folder):
    """Adds 0.01 to every trainable weight at each of `steps`."""
    for step in steps:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.01)
        callback.on_step_end(arguments(folder), state(step), None, model=model)


def test_only_trainable_weights_are_averaged_in_float32(tiny_llama):
    model = get_peft_model(tiny_llama.to(torch.bfloat16), LoraConfig(r=2, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    callback = BEMACallback(update_freq=1)
    callback.on_train_begin(arguments(), state(), None, model=model)
    walk(model, callback, [1, 2], "unused")
    assert callback.bema.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert {weight.dtype for weight in callback.bema.values()} == {torch.float32}


def test_the_average_is_saved_and_the_model_keeps_its_weights(tmp_path, tiny_llama, bpe_tokenizer):
    callback = BEMACallback(update_freq=1)
    callback.on_train_begin(arguments(tmp_path), state(), None, model=tiny_llama)
    walk(tiny_llama, callback, [1, 2, 3], tmp_path)
    own = {name: p.detach().clone() for name, p in tiny_llama.named_parameters()}
    callback.on_train_end(arguments(tmp_path), state(3), None, model=tiny_llama, processing_class=bpe_tokenizer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "bema")
    for name, parameter in tiny_llama.named_parameters():
        assert torch.equal(parameter, own[name])
        assert torch.equal(saved.get_parameter(name), callback.bema[name])
        assert not torch.equal(saved.get_parameter(name), own[name])
    assert (tmp_path / "bema" / "tokenizer.json").is_file()


def test_an_adapters_average_is_an_adapter(tmp_path, tiny_folder):
    from peft import PeftModel

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_folder), LoraConfig(r=2, task_type="CAUSAL_LM"))
    callback = BEMACallback(update_freq=1)
    callback.on_train_begin(arguments(tmp_path), state(), None, model=model)
    walk(model, callback, [1, 2], tmp_path)
    callback.on_train_end(arguments(tmp_path), state(2), None, model=model)
    saved = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_folder), tmp_path / "bema")
    names = dict(saved.named_parameters())
    assert all(torch.equal(names[name], weight) for name, weight in callback.bema.items())


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path, tiny_llama):
    straight = BEMACallback(update_freq=2, update_after=1)
    straight.on_train_begin(arguments(tmp_path), state(), None, model=tiny_llama)
    walk(tiny_llama, straight, [1, 2, 3], tmp_path)
    (tmp_path / "checkpoint-3").mkdir()
    straight.on_save(arguments(tmp_path), state(3), None)
    resumed = BEMACallback(update_freq=2, update_after=1)
    resumed.on_train_begin(arguments(tmp_path), state(3), None, model=tiny_llama)
    weights = {name: p.detach().clone() for name, p in tiny_llama.named_parameters()}
    walk(tiny_llama, straight, [4, 5], tmp_path)
    tiny_llama.load_state_dict(weights, strict=False)
    walk(tiny_llama, resumed, [4, 5], tmp_path)
    for part in ("start", "ema", "bema"):
        mine, theirs = getattr(resumed, part), getattr(straight, part)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_replaced_weights_come_back_after_an_error():
    model = Line([1.0, 2.0])

    def fail():
        with weights_replaced(model, {"theta": torch.tensor([5.0, 6.0])}):
            assert model.theta.tolist() == [5.0, 6.0]
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert model.theta.tolist() == [1.0, 2.0]


# refusals


def test_a_run_too_short_to_average_is_refused():
    with pytest.raises(ValueError, match=r"update_freq=400, update_after=0\) would never update .* run of 100 steps"):
        BEMACallback().on_train_begin(arguments(), state(max_steps=100), None, model=Line([1.0]))


def test_a_checkpoint_without_average_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"resumes at step 3, but there is no .*checkpoint-3/bema\.safetensors"):
        BEMACallback(update_freq=1).on_train_begin(arguments(tmp_path), state(3), None, model=Line([1.0]))


def test_sharded_weights_are_refused():
    args = SimpleNamespace(output_dir="unused", fsdp=["full_shard"])
    with pytest.raises(ValueError, match="BEMACallback needs whole weights"):
        BEMACallback(update_freq=1).on_train_begin(args, state(), None, model=Line([1.0]))


def test_update_freq_must_be_positive():
    with pytest.raises(ValueError, match="update_freq=0"):
        BEMACallback(update_freq=0)


class TestReference:
    """`update_ref_model`: the reference becomes the average at its own steps, and is part of checkpoints."""

    def callback(self, reference, **options):
        callback = BEMACallback(update_freq=1, ema_power=1, bias_power=1, lag=0, update_ref_model=True, **options)
        callback.reference = FrozenModel(reference)
        return callback

    def test_by_hand(self):
        """At step t with theta = t: the reference is the average of steps 1 and 3, and stays in between."""
        policy, reference = Line([0.0]), Line([9.0])
        callback = self.callback(reference, ref_model_update_freq=2, ref_model_update_after=1)
        callback.on_train_begin(arguments(), state(), None, model=policy)
        seen = []
        for step in range(1, 5):
            policy.theta.data.fill_(float(step))
            callback.on_step_end(arguments(), state(step), None, model=policy)
            seen.append((reference.theta.item(), callback.bema["theta"].item()))
        assert [value for value, _ in seen] == [seen[0][1], seen[0][1], seen[2][1], seen[2][1]]

    def test_it_is_in_the_checkpoint(self, tmp_path):
        policy, reference, fresh = Line([0.0]), Line([9.0]), Line([1.0])
        saving = self.callback(reference)
        saving.on_train_begin(arguments(tmp_path), state(max_steps=500), None, model=policy)
        (tmp_path / "checkpoint-3").mkdir()
        saving.on_save(arguments(tmp_path), state(3), None)
        self.callback(fresh).on_train_begin(arguments(tmp_path), state(3, 500), None, model=policy)
        assert fresh.theta.item() == 9.0

    def test_without_a_trainer_that_has_one_it_is_refused(self):
        callback = BEMACallback(update_freq=1, update_ref_model=True)
        with pytest.raises(ValueError, match="has no reference to update"):
            callback.on_train_begin(arguments(), state(), None, model=Line([0.0]))

    @pytest.mark.parametrize("options", [{}, {"ref_model_update_freq": 1, "ref_model_update_after": 200}], ids=str)
    def test_a_run_too_short_to_move_it_is_refused(self, options):
        with pytest.raises(ValueError, match="would never move the reference in a run of 100 steps"):
            self.callback(Line([9.0]), **options).on_train_begin(arguments(), state(max_steps=100), None, Line([0.0]))

    @pytest.mark.parametrize("option", ["ref_model_update_freq", "ref_model_update_after"])
    def test_options_without_effect_are_refused(self, option):
        with pytest.raises(ValueError, match="no effect with update_ref_model=False"):
            BEMACallback(**{option: 7})
