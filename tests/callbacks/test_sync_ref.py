"""A reference that follows the policy: weights are paired by name, moved by a share, and kept in checkpoints."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import TrainerState

from strop.callbacks.sync_ref import SyncRefModelCallback
from strop.models.reference import FrozenWeights


class Line(nn.Module):
    def __init__(self, value: float):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([value]))
        self.fixed = nn.Parameter(torch.tensor([5.0]), requires_grad=False)


def arguments(folder="unused"):
    return SimpleNamespace(output_dir=str(folder), fsdp=None, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6)


def state(step, max_steps=10):
    return TrainerState(global_step=step, max_steps=max_steps, is_world_process_zero=True)


def test_by_hand():
    """Reference 0 and policy 1 give 0.6 after the first sync, 0.6 + 0.6 (1 - 0.6) = 0.84 after the second."""
    policy, reference = Line(1.0), Line(0.0)
    reference.fixed.data.fill_(7.0)
    callback = SyncRefModelCallback(reference)
    callback.on_train_begin(arguments(), state(0), None, model=policy)
    values = []
    for step in range(1, 5):
        callback.on_step_end(arguments(), state(step), None, model=policy)
        values.append(round(reference.theta.item(), 6))
    assert values == [0.0, 0.6, 0.6, 0.84]
    assert reference.fixed.item() == 7.0  # what isn't trained stays


def test_an_adapter_moves_by_name(tiny_llama):
    model = get_peft_model(tiny_llama, LoraConfig(task_type="CAUSAL_LM"), adapter_name="mine")
    reference = FrozenWeights(model)
    start = {name: weight.clone() for name, weight in reference.weights.items()}
    callback = SyncRefModelCallback(reference)
    callback.on_train_begin(arguments(), state(0), None, model=model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 1
    callback.on_step_end(arguments(), state(2), None, model=model)
    for name, weight in reference.weights.items():
        torch.testing.assert_close(weight, start[name] + 0.6)


def test_the_state_goes_through_a_checkpoint(tmp_path):
    policy, reference = Line(1.0), Line(0.25)
    saving = SyncRefModelCallback(reference)
    saving.on_train_begin(arguments(tmp_path), state(0), None, model=policy)
    (tmp_path / "checkpoint-3").mkdir()
    saving.on_save(arguments(tmp_path), state(3), None)
    fresh = Line(0.0)
    resuming = SyncRefModelCallback(fresh)
    resuming.on_train_begin(arguments(tmp_path), state(3), None, model=policy)
    assert fresh.theta.item() == 0.25
    with pytest.raises(ValueError, match=r"there is no .*checkpoint-4.reference.safetensors, so its reference can't"):
        resuming.on_train_begin(arguments(tmp_path), state(4), None, model=policy)


def test_a_reference_of_another_shape_is_refused(tiny_llama):
    model = get_peft_model(tiny_llama, LoraConfig(task_type="CAUSAL_LM"))
    callback = SyncRefModelCallback(Line(0.0))
    with pytest.raises(ValueError, match=r"it has no '.*lora_A.*' of the same shape \(8 of 8 trained weights"):
        callback.on_train_begin(arguments(), state(0), None, model=model)


def test_a_run_too_short_to_move_is_refused():
    with pytest.raises(ValueError, match="ref_model_sync_steps=2 would never move the reference in a run of 1 steps"):
        SyncRefModelCallback(Line(0.0)).on_train_begin(arguments(), state(0, max_steps=1), None, model=Line(1.0))
