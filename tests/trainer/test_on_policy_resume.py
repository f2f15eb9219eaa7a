"""A run killed in the middle of a block, or of its reuse, continues bit for bit."""

import functools
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from strop.trainer.grpo import GRPOTrainer
from strop.trainer.nash_md import NashMDTrainer
from strop.trainer.online_dpo import OnlineDPOTrainer
from strop.trainer.ppo import PPOTrainer
from strop.trainer.rloo import RLOOTrainer
from strop.trainer.xpo import XPOTrainer

STEPS = 7
KINDS = {
    "block of four steps": (GRPOTrainer, {"steps_per_generation": 4, "num_train_epochs": 4}),
    "used twice": (GRPOTrainer, {"steps_per_generation": 2, "num_iterations": 2, "beta": 0.1}),
    "steps that span blocks": (GRPOTrainer, {"gradient_accumulation_steps": 2, "steps_per_generation": 3}),
    "adaptive entropy": (
        GRPOTrainer,
        {"use_adaptive_entropy": True, "entropy_coef_delta": 0.1, "entropy_target": 9.0, "steps_per_generation": 2},
    ),
    "stream": (GRPOTrainer, {"steps_per_generation": 2}),
    "moving reference": (RLOOTrainer, {"sync_ref_model": True, "ref_model_sync_steps": 2, "steps_per_generation": 3}),
    "replay": (GRPOTrainer, {"replay_buffer_size": 2, "beta": 0.1}),
    "values on a shared trunk": (
        PPOTrainer,
        {"num_mini_batches": 2, "num_ppo_epochs": 3, "target_kl": 0.1, "kl_horizon": 20, "num_generations": 1},
    ),
    "values of another trunk": (
        PPOTrainer,
        {"num_mini_batches": 2, "num_ppo_epochs": 2, "value_function": "separate", "num_value_pretraining_steps": 5},
    ),
    "values beside an adapter": (PPOTrainer, {"num_ppo_epochs": 3, "optim": "adamw_torch"}),
    "dynamic": (GRPOTrainer, {"dynamic_sampling_rounds": 2, "steps_per_generation": 2}),
    "pairs, beta by epochs": (
        OnlineDPOTrainer,
        {"beta": [0.1, 0.3, 0.5], "per_device_train_batch_size": 2, "steps_per_generation": 2},
    ),
    "pairs with the reference": (XPOTrainer, {"steps_per_generation": 2, "num_iterations": 2, "alpha": 1e-3}),
    "pairs with a moving mixture": (
        NashMDTrainer,
        {"mixture_coef": [0.25, 0.75], "sync_ref_model": True, "ref_model_sync_steps": 2, "steps_per_generation": 3},
    ),
}


class KillAt(TrainerCallback):
    """kill -9 at the end of a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_bit_for_bit(kind, make_rollout_trainer, prompts, tmp_path):
    trainer_class, config = KINDS[kind]
    common = {"generator": None, "max_steps": STEPS, "learning_rate": 0.5, "save_strategy": "steps", "save_steps": 1}
    peft = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear") if "adapter" in kind else None
    common |= {"logging_steps": 2, "rows": prompts.to_iterable_dataset() if kind == "stream" else None}
    more = {} if peft is None else {"peft_config": peft}
    make = functools.partial(make_rollout_trainer, trainer_class, **{"more": more} | common | config)
    whole = make(output_dir=str(tmp_path / "whole"))
    whole.train()

    def killed():
        torch.set_num_threads(1)
        make(output_dir=str(tmp_path / "killed"), more={**more, "callbacks": [KillAt(4)]}).train()

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resumed = make(output_dir=str(tmp_path / "killed"))
    resumed.train(resume_from_checkpoint=True)
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert logs(whole) == logs(resumed)
    assert rollouts(tmp_path / "whole") == rollouts(tmp_path / "killed")


def logs(trainer):
    left_out = ("step_time", "runtime", "second", "flos", "eps")
    return [
        {name: value for name, value in log.items() if not any(word in name for word in left_out)}
        for log in trainer.state.log_history
        if "loss" in log
    ]


def rollouts(folder: Path):
    return {
        file.name: [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("rollouts/*"))
    }


def test_a_checkpoint_without_rollouts_is_refused(make_rollout_trainer, tmp_path):
    make = functools.partial(make_rollout_trainer, GRPOTrainer, generator=None, save_strategy="steps", save_steps=1)
    make(max_steps=1).train()
    (tmp_path / "run" / "checkpoint-1" / "rollouts.json").unlink()
    with pytest.raises(ValueError, match=r"there is no .*rollouts\.json"):
        make(max_steps=2).train(resume_from_checkpoint=True)
