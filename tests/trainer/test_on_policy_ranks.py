"""Two processes do what one does, with blocks of one step and of several, and with too few rollouts for both."""

import functools

import pytest
import torch

from strop.trainer.grpo import GRPOTrainer
from strop.trainer.ppo import PPOTrainer
from strop.trainer.rloo import RLOOTrainer

CASES = {
    "several steps": (GRPOTrainer, {"steps_per_generation": 2, "num_iterations": 2, "beta": 0.1}),
    "groups over ranks": (GRPOTrainer, {"num_generations": 4, "top_entropy_quantile": 0.5, "loss_type": "grpo"}),
    "ppo": (PPOTrainer, {"num_mini_batches": 2, "num_ppo_epochs": 2, "target_kl": 0.1, "kl_horizon": 20}),
    "ppo of two trunks": (PPOTrainer, {"value_function": "separate", "num_generations": 1, "num_ppo_epochs": 2}),
    "values first": (PPOTrainer, {"num_value_pretraining_steps": 3, "num_generations": 1, "num_ppo_epochs": 2}),
    "adaptive": (RLOOTrainer, {"normalize_advantages": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_what_one_does(case, make_rollout_trainer, prompts, on_two_ranks):
    trainer_class, config = CASES[case]
    make = functools.partial(
        make_rollout_trainer, trainer_class, num_train_epochs=1, max_steps=-1, learning_rate=0.5, **config
    )
    if trainer_class is GRPOTrainer:
        make = functools.partial(make, vllm_importance_sampling_correction=False)

    def run(size=2):
        trainer = make(per_device_train_batch_size=size, more={"eval_dataset": prompts})
        trainer.train()
        left_out = ("time", "second", "epoch", "flos", "learning_rate", "step", "eps")
        keep = lambda log: {k: v for k, v in log.items() if not any(word in k for word in left_out)}  # noqa: E731
        weights = {
            name: p.detach().clone() for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        }
        history = [keep(log) for log in trainer.state.log_history if "loss" in log]
        return {"weights": weights, "logs": history, "evaluation": keep(trainer.evaluate())}

    whole = run(4)
    for found in on_two_ranks(run):
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5, msg=name)
        for one, other in zip(
            [*found["logs"], found["evaluation"]], [*whole["logs"], whole["evaluation"]], strict=True
        ):
            assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
