"""Two processes do what one does, with blocks of one step and of several, and with too few rollouts for both."""

import functools

import pytest
import torch

from strop.trainer.grpo import GRPOTrainer
from strop.trainer.ppo import PPOTrainer
from strop.trainer.rloo import RLOOTrainer


def coarse(completion_ids, **_):
    """Equal in some groups."""
    return [float(len(ids) > 3) for ids in completion_ids]


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.02}
ADAPTIVE["entropy_target"] = 5.98413  # in the second step above the mean of all tokens, and below that of rank 1's
ADAPTIVE |= {"save_strategy": "steps", "save_steps": 1, "top_entropy_quantile": 0.5}
MOVES = {"adaptive entropy": "entropy_coef", "refilled": "dynamic_sampling/extra_prompts"}
"""What changes from step to step there."""
CASES = {
    "several steps": (GRPOTrainer, {"steps_per_generation": 2, "num_iterations": 2, "beta": 0.1}),
    "groups over ranks": (GRPOTrainer, {"num_generations": 4, "top_entropy_quantile": 0.5, "loss_type": "grpo"}),
    "ppo": (PPOTrainer, {"num_mini_batches": 2, "num_ppo_epochs": 2, "target_kl": 0.1, "kl_horizon": 20}),
    "ppo of two trunks": (PPOTrainer, {"value_function": "separate", "num_generations": 1, "num_ppo_epochs": 2}),
    "values first": (PPOTrainer, {"num_value_pretraining_steps": 3, "num_generations": 1, "num_ppo_epochs": 2}),
    "normalised": (RLOOTrainer, {"normalize_advantages": True}),
    "adaptive entropy": (GRPOTrainer, ADAPTIVE),
    "refilled": (
        GRPOTrainer,
        {"rewards": coarse, "dynamic_sampling_rounds": 2, "dynamic_sampling_reward": "coarse", "beta": 0.1}
        | {"kl_on_equal_rewards": False},
    ),
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
        coef = trainer.controller.coef if trainer_class is GRPOTrainer else None
        return {"weights": weights, "logs": history, "evaluation": keep(trainer.evaluate()), "entropy_coef": coef}

    whole = run(4)
    for found in on_two_ranks(run):
        assert found["entropy_coef"] == whole["entropy_coef"]
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5, msg=name)
        for one, other in zip(
            [*found["logs"], found["evaluation"]], [*whole["logs"], whole["evaluation"]], strict=True
        ):
            assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    if case in MOVES:
        assert len({log[MOVES[case]] for log in whole["logs"]}) > 1
