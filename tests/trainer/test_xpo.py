"""XPO: the second completion is the reference's, whichever kind that is, and is made less likely."""

import functools
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

from strop.models.reference import AdapterOff, FrozenModel, FrozenWeights
from strop.rollout.generator import InProcessGenerator
from strop.trainer.xpo import XPOConfig, XPOTrainer


@pytest.fixture
def make(make_rollout_trainer):
    return functools.partial(make_rollout_trainer, XPOTrainer)


LORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")


@pytest.mark.parametrize("kind", ["copy", "fresh adapter", "trained adapter"])
def test_the_reference_writes_the_second_completion(kind, make, tiny_llama):
    """Of TRL it is the policy with an adapter, whose layers stay switched on."""
    model = tiny_llama
    if kind == "trained adapter":
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False))
    expected = {"copy": FrozenModel, "fresh adapter": AdapterOff, "trained adapter": FrozenWeights}[kind]
    trainer = make(model=model, more={"peft_config": LORA if kind == "fresh adapter" else None}, max_steps=1)
    assert isinstance(trainer.reference, expected)
    before = InProcessGenerator(trainer.model, trainer.processing_class)
    prompt = trainer.encoder.prompt_ids(trainer.train_dataset[0])
    wanted = before.generate([prompt] * 2, trainer.args.sampling, rows=[1, 3])
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    rows = [trainer.train_dataset[0]] * 4
    found = trainer.episodes.roll_out(rows, [0, 1, 2, 3], trainer.args.sampling)
    assert [r.completion_ids for r in found[1::2]] == [c.token_ids for c in wanted]
    scripted = [trainer.generator.completion(number, 6).token_ids for number in (0, 2)]
    assert [r.completion_ids for r in found[::2]] == scripted


def test_what_the_reference_writes_becomes_less_likely(make):
    """A large bonus pushes it down, whoever is better; the loss is the sum of its parts."""
    trainer = make(alpha=1.0, beta=1e-4, learning_rate=0.01, optim="adamw_torch", max_steps=4, num_iterations=4)
    trainer.train()
    first, *_, last = [log for log in trainer.state.log_history if "loss" in log]
    for log in (first, last):
        assert log["loss"] == pytest.approx(log["loss/dpo"] + log["loss/xpo"], rel=1e-4)
        assert log["alpha"] == 1.0
    assert first["loss/dpo"] == pytest.approx(math.log(2), abs=1e-5)
    assert last["loss/xpo"] < first["loss/xpo"] - 1 < 0  # alpha log pi: negative, and more so


def test_metrics_know_who_wrote(make, prompts):
    def reward(completion_ids, **_):
        return [float(i % 2) for i in range(len(completion_ids))]

    trainer = make(rewards=reward, max_steps=1, more={"eval_dataset": prompts})
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["objective/model_scores"], log["objective/ref_scores"], log["objective/scores_margin"]) == (0, 1, 1)
    assert {"val/model_contain_eos_token", "val/ref_contain_eos_token", "objective/kl", "objective/entropy"} <= set(log)
    assert log["logps/rejected"] < 0
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"])


def test_settings():
    config = XPOConfig(output_dir="unused", use_cpu=True, alpha=[1e-3])
    assert (config.alpha, config.beta, config.learning_rate, config.loss_type) == (1e-3, 0.1, 5e-7, "sigmoid")
    with pytest.raises(ValueError, match="out of range"):
        XPOConfig(output_dir="unused", use_cpu=True, alpha=[0.1, -1.0])
