"""Rewards, advantages and losses of tokens, for PPO."""

import json
from pathlib import Path

import pytest
import torch

from strop.losses.penalties import KL_ESTIMATORS
from strop.losses.policy import POLICY_LOSSES, Sampled
from strop.losses.reduce import StepCounts, token_mean
from strop.losses.value import clipped_value_loss, gae, token_rewards, whiten

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "advantages.json").read_text())


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_score_stands_at_the_last_own_token():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    rewards = token_rewards(doubles([1.0, 2.0, 3.0]), mask, penalty=torch.full((3, 5), 0.5, dtype=torch.float64))
    assert rewards.tolist() == [[-0.5, -0.5, 0.5, 0, 0], [-0.5, 0, 0, 1.5, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("mask", "gamma", "lam", "expected"),
    [
        ([1, 1, 1, 0, 0], 1.0, 1.0, [1, 1, 1, 0, 0]),  # nothing is due on padding
        ([1, 0, 0, 1], 0.9, 1.0, [0.9, 0, 0, 1]),  # what a tool wrote takes no time: 0.9 and not 0.729
        ([0, 1, 1], 1.0, 0.5, [0, 0.5, 1]),
    ],
)
def test_rewards_on_their_way_back(mask, gamma, lam, expected):
    mask = torch.tensor([mask])
    rewards = token_rewards(doubles([1.0]), mask)
    advantages, returns = gae(rewards, torch.zeros_like(rewards), mask, gamma, lam)
    torch.testing.assert_close(advantages, doubles([expected]))
    torch.testing.assert_close(returns, doubles([expected]))


def test_gae_by_hand():
    #  values 0.5, 0.2, reward 1 at the end, gamma 0.9, lambda 0.5:
    #  0.8 at the end; before 0.9 * 0.2 - 0.5 + 0.45 * 0.8 = 0.04
    advantages, returns = gae(doubles([[0, 1]]), doubles([[0.5, 0.2]]), torch.ones(1, 2), 0.9, 0.5)
    torch.testing.assert_close(advantages, doubles([[0.04, 0.8]]))
    torch.testing.assert_close(returns, doubles([[0.54, 1.0]]))


def test_with_lambda_1_returns_are_discounted_rewards_whatever_the_values():
    torch.manual_seed(0)
    rewards, values = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    _, returns = gae(rewards, values, torch.ones(3, 6), 0.9, 1.0)
    discounts = doubles([[0.9 ** (j - i) if j >= i else 0.0 for j in range(6)] for i in range(6)])
    torch.testing.assert_close(returns, rewards @ discounts.T)


def test_tokens_of_others_are_as_if_they_were_not_there():
    torch.manual_seed(0)
    mask = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 0]])
    rewards, values = torch.randn(1, 8), torch.randn(1, 8)
    spoiled = [x.masked_fill(mask == 0, torch.nan) for x in (rewards, values)]
    inside = mask[0].bool()
    for whole, alone in zip(
        gae(*spoiled, mask, 0.9, 0.8),
        gae(rewards[:, inside], values[:, inside], torch.ones(1, 4), 0.9, 0.8),
        strict=True,
    ):
        torch.testing.assert_close(whole[:, inside], alone)
        assert (whole[:, ~inside] == 0).all()
    torch.testing.assert_close(whiten(spoiled[1], mask)[:, inside], whiten(values[:, inside], torch.ones(1, 4)))


def test_whitened():
    helper = GOLDENS["whiten"]
    values, mask = doubles(helper["values"]), doubles(helper["mask"])
    torch.testing.assert_close(whiten(values, mask), doubles(helper["masked_whiten"]) * mask)
    torch.testing.assert_close(whiten(values, mask, False), doubles(helper["masked_whiten_noshift"]) * mask)
    assert whiten(values, mask * 0).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_value_loss_by_hand():
    #  old value 0, range 0.2. At 0.5 towards a return of 1: 0.5^2 against 0.8^2, without gradient.
    #  At -0.5 away from it: 1.5^2 against 1.2^2.
    values = doubles([[0.5, -0.5, torch.nan]]).requires_grad_()
    zeros, mask = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[1, 1, 0]])
    loss = clipped_value_loss(values, zeros, doubles([[1.0, 1.0, torch.nan]]), mask)
    loss.sum().backward()
    torch.testing.assert_close(loss, doubles([[0.32, 1.125, 0.0]]))
    torch.testing.assert_close(values.grad, doubles([[0.0, -1.5, 0.0]]))


def case_name(case: dict) -> str:
    return f"{case['kl_estimator']}-{'whitened' if case['whiten_rewards'] else 'plain'}-{case['gamma']}"


@pytest.mark.parametrize("case", GOLDENS["ppo_cases"], ids=case_name)
def test_the_numbers_of_trl(case):
    """Where no row is padded; TRL puts the score of one that is on its first pad."""
    given = {key: doubles(value) for key, value in GOLDENS["ppo"].items()}
    # TRL computes the variance's n / (n - 1) in float32.
    close = {"rtol": 0, "atol": 2e-7}
    mask = torch.ones_like(given["values"])
    kl = KL_ESTIMATORS[case["kl_estimator"]](given["ref_logprobs"] - given["logprobs"])
    rewards = token_rewards(doubles(case["scores"]), mask, case["kl_coef"] * kl)
    if case["whiten_rewards"]:
        rewards = whiten(rewards, mask, shift_mean=False)
    advantages, returns = gae(rewards, given["values"], mask, case["gamma"], case["lam"])
    advantages = whiten(advantages, mask)
    for ours, theirs in ((rewards, "rewards"), (advantages, "advantages"), (returns, "returns")):
        torch.testing.assert_close(ours, doubles(case[theirs]), **close)

    counts = StepCounts(int(mask.sum()), len(mask))
    logps, values = given["new_logprobs"].requires_grad_(), given["vpred"].requires_grad_()
    policy = POLICY_LOSSES["dapo"](
        Sampled(logps, given["logprobs"], advantages, mask), counts, epsilon=case["cliprange"]
    )
    value = token_mean(
        clipped_value_loss(values, given["values"], returns, mask, case["cliprange_value"]), mask, counts
    )
    (policy + case["vf_coef"] * value).backward()
    torch.testing.assert_close(policy, doubles(case["pg_loss"]), **close)
    torch.testing.assert_close(value, doubles(case["vf_loss"]), **close)
    torch.testing.assert_close(logps.grad, doubles(case["grad_new_logprobs"]), **close)
    torch.testing.assert_close(values.grad, doubles(case["grad_vpred"]), **close)
