"""The base alone: a subclass that writes its own `compute_loss`, on any module."""

import logging
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import TrainingArguments

from strop.trainer import BaseTrainer

ROWS = Dataset.from_dict({"x": [[1.0], [2.0], [3.0], [4.0]]})


class Slope(nn.Module):
    """y = w x, with a target of 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.w * x


class Squares(BaseTrainer):
    def compute_loss(self, model, inputs):
        return model(inputs["x"]).square().mean()


def arguments(tmp_path, **options) -> TrainingArguments:
    defaults = {
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.01,
        "max_steps": 1,
        "logging_steps": 1,
        "max_grad_norm": 0.0,
        "report_to": "none",
    }
    return TrainingArguments(
        str(tmp_path), save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", **defaults | options
    )


@pytest.mark.parametrize(("batch", "accumulate"), [(4, 1), (2, 2)])
def test_own_loss_is_logged_and_averaged_over_accumulation(tmp_path, batch, accumulate):
    """Mean of 1, 4, 9, 16 is 7.5, whose derivative by w at 1 is 15: one SGD step of 0.01 leaves w = 0.85."""
    args = arguments(tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate)
    trainer = Squares(model=Slope(), args=args, train_dataset=ROWS)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(7.5)
    assert trainer.model.w.item() == pytest.approx(0.85)


def test_a_module_without_a_config_is_saved(tmp_path):
    trainer = Squares(Slope(), arguments(tmp_path), train_dataset=ROWS)
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "model.safetensors").exists()


def test_evaluation_uses_the_own_loss(tmp_path):
    trainer = Squares(model=Slope(), args=arguments(tmp_path, label_names=["x"]), eval_dataset=ROWS)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(7.5)


def test_deepspeed_leaves_the_numbers_of_a_batch_their_dtype(tmp_path):
    """It casts what it takes for the model's input, which of a batch of ours are only ids."""
    trainer = BaseTrainer(Slope(), arguments(tmp_path))
    trainer.is_deepspeed_enabled = True
    batch = {"ref_logps": torch.tensor([-60.003]), "nested": [torch.tensor([1.0])]}
    prepared = trainer._prepare_inputs(batch)
    assert prepared["ref_logps"].dtype == prepared["nested"][0].dtype == torch.float32


def test_a_trainer_without_any_loss_says_so(tmp_path, tiny_llama):
    rows = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
    trainer = BaseTrainer(model=tiny_llama, args=arguments(tmp_path), train_dataset=rows)
    with pytest.raises(TypeError, match="BaseTrainer must define `loss`, or override `compute_loss`"):
        trainer.train()


@pytest.mark.parametrize(("remainder", "told"), [(-1, 1), (0, 0), (2, 0)])
def test_a_stream_that_ends_on_several_processes_is_told_once(tmp_path, caplog, remainder, told):
    trainer = Squares(Slope(), arguments(tmp_path), train_dataset=ROWS)
    place = SimpleNamespace(end_of_dataloader=True, remainder=remainder)
    trainer.accelerator = SimpleNamespace(num_processes=2, gradient_state=place)
    batch = {"completion_mask": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)}
    with caplog.at_level(logging.WARNING, logger="strop"):
        for _ in range(2):
            trainer._without_repeats(batch, batch_size=2)
    assert sum("first rows fill up" in record.message for record in caplog.records) == told
