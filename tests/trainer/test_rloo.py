"""RLOO: rewards minus log pi/ref, each against the mean of its siblings, ratios of whole completions."""

import functools
import json
from pathlib import Path

import pytest
import torch

from strop.losses.reduce import StepCounts
from strop.models.logps import TokenScores
from strop.trainer.rloo import RLOOConfig, RLOOTrainer

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "policy_losses.json").read_text())
CASES = [case for case in GOLDENS["cases"] if case["args"]["loss_type"] == "rloo"]


@pytest.fixture
def make(make_rollout_trainer):
    return functools.partial(make_rollout_trainer, RLOOTrainer)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES])
def test_the_numbers_of_trl(case, make, monkeypatch):
    args = case["args"]
    options = {name: args[name] for name in ("epsilon", "epsilon_high") if args.get(name) is not None}
    trainer = make(beta=0.0, **options)
    inputs = {name: doubles(value) for name, value in GOLDENS["inputs"].items()}
    policy, mask = inputs["per_token_logps"].requires_grad_(), inputs[args["mask"]]
    monkeypatch.setattr("strop.trainer.rloo.logps", lambda *_, **__: TokenScores(policy, inputs["entropies"]))
    batch = {"completion_mask": mask, "advantages": inputs["advantages"][:, None], "temperature": 1.0}
    loss, _ = trainer.loss(None, batch | {"old_logps": inputs["old_per_token_logps"]}, StepCounts(0, len(mask)))
    loss.backward()
    empty = mask.sum(-1) == 0  # such a row is a constant in TRL
    expected = case["loss"] + inputs["advantages"][empty].sum().item() / len(mask)
    torch.testing.assert_close(loss, doubles(expected), rtol=0, atol=1e-8)
    torch.testing.assert_close(policy.grad, doubles(case["gradient"]), rtol=0, atol=1e-8)


def first_block(trainer):
    trainer._tokens_written = 0
    trainer._make_block()
    return trainer.buffer.experiences


def test_leave_one_out_by_hand(make):
    def reward(completions, **_):
        return [3.0, 1.0, 1.0, -1.0]

    trainer = make(rewards=reward, num_generations=4, beta=0.0)
    assert [one.advantage for one in first_block(trainer)] == pytest.approx([8 / 3, 0, 0, -8 / 3])
    clipped = make(rewards=reward, num_generations=4, beta=0.0, reward_clip_range=(0, 1))
    assert [one.advantage for one in first_block(clipped)] == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])


def test_the_divergence_is_subtracted_before_the_baseline(make):
    trainer = make(rewards=lambda completions, **_: [0.0] * len(completions), beta=0.5, num_generations=2)
    for parameter in trainer.reference.model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    experiences = first_block(trainer)
    kl = [
        sum(o - r for o, r, m in zip(e.old_logps, e.ref_logps, e.completion_mask, strict=True) if m)
        for e in experiences
    ]
    for i, one in enumerate(experiences):
        sibling = kl[i ^ 1]
        assert one.advantage == pytest.approx(-0.5 * (kl[i] - sibling), abs=1e-5)
        assert one.advantage != 0


@pytest.mark.parametrize("normalize", [False, True])
def test_groups_of_equal_rewards_can_be_left_alone_by_the_reference(normalize, make):
    """There the divergence makes all of the advantages; in other groups it stays."""

    def advantages(**config):
        trainer = make(
            rewards=lambda completions, **_: [1.0, 1.0, 0.0, 1.0], beta=0.5, num_generations=2,
            normalize_advantages=normalize, **config,
        )  # fmt: skip
        torch.manual_seed(0)
        for parameter in trainer.reference.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        return [one.advantage for one in first_block(trainer)]

    pulled, left_alone = advantages(), advantages(kl_on_equal_rewards=False)
    assert all(pulled)
    assert left_alone[:2] == [0, 0]
    if not normalize:
        assert left_alone[2:] == pulled[2:]


def test_it_learns(make, bpe_tokenizer):
    wanted = bpe_tokenizer.encode("a", add_special_tokens=False)[0]
    trainer = make(
        generator=None,
        rewards=lambda completion_ids, **_: [ids.count(wanted) / 4 for ids in completion_ids],
        optim="adamw_torch",
        learning_rate=0.02,
        beta=0.0,
        max_steps=14,
        per_device_train_batch_size=32,
        num_generations=16,
        max_completion_length=4,
        gradient_checkpointing=False,
    )
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "loss" in log]
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.6


def test_settings():
    config = RLOOConfig(output_dir="unused", use_cpu=True, rloo_k=4, kl_coef=0.1)
    assert (config.num_generations, config.beta) == (4, 0.1)
    with pytest.raises(ValueError, match="leaves nothing in between"):
        RLOOConfig(output_dir="unused", use_cpu=True, reward_clip_range=(1, 0))
    with pytest.raises(TypeError, match="loss_type"):
        RLOOConfig(output_dir="unused", use_cpu=True, loss_type="grpo")
