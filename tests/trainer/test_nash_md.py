"""Nash-MD: the policy's completion against the mixture's; only the first is trained, by its chance to win."""

import functools

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from strop.models.logps import TokenScores
from strop.models.reference import FrozenModel
from strop.rewards import BasePairwiseJudge
from strop.rollout.mixture import MixtureGenerator
from strop.rollout.types import Rollout
from strop.trainer.nash_md import NashMDConfig, NashMDTrainer


@pytest.fixture
def make(make_rollout_trainer):
    return functools.partial(make_rollout_trainer, NashMDTrainer)


class Says(BasePairwiseJudge):
    def __init__(self, *found):
        self.found = list(found)

    def compare(self, prompts, pairs, flipped):
        return [self.found[i % len(self.found)] for i in range(len(pairs))]


def number(value):
    return value.item() if isinstance(value, Tensor) else value


def test_only_the_policys_completion_is_read(make, monkeypatch):
    trainer = make(rewards=None, more={"judge": Says(0.7, 0.2, 0.5, None)}, max_steps=1, beta=0.1)
    trainer.train()
    experiences = trainer.buffer.experiences
    assert [any(one.completion_mask) for one in experiences] == [True, False] * 3 + [False] * 2
    assert [one.advantage for one in experiences[::2]] == pytest.approx([0.2, -0.3, 0.0, 0.0])
    batch = trainer.batch_of(experiences)
    assert len(batch["completion_mask"]) == 3
    policy, reference = torch.randn(2, *batch["completion_mask"].shape).double()
    policy.requires_grad_()
    monkeypatch.setattr("strop.trainer.nash_md.logps", lambda *_, **__: TokenScores(policy))
    loss, metrics = trainer.loss(None, batch | {"ref_logps": reference}, trainer.count(batch))
    mask, chance = batch["completion_mask"], torch.tensor([0.7, 0.2, 0.5]).double()
    loss.backward()
    per_token = (0.1 * (policy - reference) - (chance - 0.5)[:, None]) * mask / 3
    torch.testing.assert_close(policy.grad, per_token.detach(), rtol=1e-6, atol=1e-7)
    found = {name: number(total) / number(weight) for name, (total, weight) in metrics.items()}
    sums = ((policy * mask).sum(-1), (reference * mask).sum(-1))
    assert found["loss/kl"] == pytest.approx((sums[0] - sums[1]).mean().item())
    assert found["loss/score"] == pytest.approx(((chance - 0.5) * sums[0]).mean().item(), rel=1e-6)
    assert found["objective/entropy"] == -found["logps/chosen"] == pytest.approx(-sums[0].mean().item())
    assert found["logps/rejected"] == pytest.approx(sums[1].mean().item())
    log = trainer.state.log_history[0]
    assert log["rewards/probabilities"] == pytest.approx(1.4 / 3)
    assert log["rewards/accuracies"] == pytest.approx(0.5)
    assert (log["preferences/ties"], log["preferences/no_verdict"]) == (0.25, 0.25)


def test_a_win_over_what_was_cut_off_can_be_left_out(make):
    trainer = make(rewards=None, more={"judge": Says(0.7)}, mask_truncated_completions=True)
    ends = ["stop", "length", "length", "stop", "stop", "stop"]
    rollouts = [Rollout({"prompt": "p"}, [1, 2], [0, 1], [0.0, 0.0], end, prompt_length=1) for end in ends]
    trainer._finish(rollouts, 2)
    assert [any(trainer.experience(rollout).completion_mask) for rollout in rollouts] == [False] * 4 + [True, False]


def test_the_mixture_is_of_now(make, prompts):
    trainer = make(
        mixture_coef=[0.25, 1.0], num_train_epochs=2, max_steps=-1, per_device_train_batch_size=5, learning_rate=0.5
    )
    generator = trainer.second_generator
    assert isinstance(generator, MixtureGenerator)
    assert isinstance(generator.reference, FrozenModel)
    assert generator.coef() == 0.25
    trainer.train()
    assert [log["mixture_coef"] for log in trainer.state.log_history if "loss" in log] == [0.25, 1.0]


def test_rewards_tell_the_chance_to_win(make):
    def reward(completion_ids, **_):
        return [2.0 * (i % 2 == 0) for i in range(len(completion_ids))]

    trainer = make(rewards=reward, max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["rewards/probabilities"] == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item())
    assert (log["rewards/chosen"], log["rewards/rejected"], log["rewards/margins"]) == (2, 0, 2)
    assert log["rewards/accuracies"] == 1
    assert (log["objective/model_scores"], log["objective/ref_scores"]) == (2, 0)


def test_it_learns_to_win(make):
    trainer = make(
        generator=None,
        rewards=lambda completion_ids, **_: [sum(i < 200 for i in ids) for ids in completion_ids],
        optim="adamw_torch",
        learning_rate=0.02,
        max_steps=12,
        per_device_train_batch_size=32,
        rows=Dataset.from_list([{"prompt": f"What is {i}?"} for i in range(32)]),
        max_completion_length=4,
        gradient_checkpointing=False,
        beta=0.01,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[0]["rewards/chosen"] < 3
    assert logs[-1]["rewards/chosen"] > 3.5


def test_settings():
    config = NashMDConfig(output_dir="unused", use_cpu=True, mixture_coef=[0.3])
    assert (config.mixture_coef, config.max_completion_length) == (0.3, 64)
    with pytest.raises(ValueError, match="a share is in"):
        NashMDConfig(output_dir="unused", use_cpu=True, mixture_coef=1.5)
    with pytest.raises(TypeError, match="loss_type"):
        NashMDConfig(output_dir="unused", use_cpu=True, loss_type="sigmoid")
