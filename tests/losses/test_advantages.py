"""Advantages: numbers by hand, TRL's numbers, and laws of every row of the table."""

import json
import math
from pathlib import Path

import pytest
import torch

from strop.losses.advantages import (
    ADVANTAGES,
    all_equal,
    leave_one_out,
    nanstd,
    normalize_then_sum,
    normalized,
    optimal_value,
    summed_alone,
    weighted_sum,
)

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "advantages.json").read_text())
OF_GROUPS = ADVANTAGES.keys() - {"reinforce_plus_plus", "a2po"}
"""Rows whose baseline is that of the group alone."""
NAN = math.nan


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def advantages_of(name: str, rewards: torch.Tensor, group_size: int = 4) -> torch.Tensor:
    """The row, on completions of 1 to 4 tokens and prompts whose reference earns 0, 1, and what can't be judged."""
    groups = len(rewards) // group_size
    own = {
        "opo": {"lengths": torch.arange(len(rewards)) % 4 + 1},
        "a2po": {"reference_rewards": rewards.new_tensor([[0.0, 1.0, NAN]] * groups)},
    }
    return ADVANTAGES[name](rewards, group_size, **own.get(name, {}))


# By hand


def test_the_three_scales():
    #  groups (0, 1) and (0, 10): unbiased deviations 0.7071 and 7.0711, of all four 4.8563
    rewards = doubles([0, 1, 0, 10])
    expected = {
        "group": [-0.707007, 0.707007, -0.707097, 0.707097],
        "batch": [-0.102958, 0.102958, -1.029576, 1.029576],
        "none": [-0.5, 0.5, -5, 5],
    }
    for name, values in expected.items():
        torch.testing.assert_close(advantages_of(name, rewards, 2), doubles(values), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("group", [1, 0, 0, 0], [1.4997, -0.4999, -0.4999, -0.4999]),
        ("leave_one_out", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("leave_one_out", [3, 1, 1, -1], [8 / 3, 0, 0, -8 / 3]),
        ("leave_one_out", [3, NAN, 1, NAN], [2, 0, -2, 0]),
        ("opo", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),  # lengths 1, 2, 3, 4: baseline (1 + 4) / 10
        ("opo", [1, 0, NAN, 1], [2 / 7, -5 / 7, 0, 2 / 7]),
        # the reference earns 0 and 1: 0.5 log((1 + e^2) / 2) = 0.716890
        ("a2po", [1, 0, 0, NAN], [0.283110, -0.716890, -0.716890, 0]),
        # mean 1, deviation 1.632993; of the groups' rests 2, 0, 0, -2 the same
        ("reinforce_plus_plus", [3, 1, 1, -1], [1.224670, 0, 0, -1.224670]),
        ("reinforce_plus_plus_baseline", [3, 1, 1, -1], [1.224670, 0, 0, -1.224670]),
    ],
)
def test_rows_by_hand(name, rewards, expected):
    torch.testing.assert_close(advantages_of(name, doubles(rewards)), doubles(expected), rtol=0, atol=5e-5)


def test_reinforce_plus_plus_compares_all_prompts():
    #  of 0, 0, 6, 6 the mean is 3, the deviation 3.4641; within groups nothing differs
    rewards = doubles([0, 0, 6, 6])
    expected = doubles([-1, -1, 1, 1]) * 3 / (12**0.5 + 1e-4)
    torch.testing.assert_close(advantages_of("reinforce_plus_plus", rewards, 2), expected)
    assert not advantages_of("reinforce_plus_plus_baseline", rewards, 2).any()


def test_rewards_that_do_not_apply():
    #  totals 1, 0, 2 and nothing: mean 1, deviation 1 over the three
    rewards = doubles([[1, NAN], [0, NAN], [NAN, 2], [NAN, NAN]])
    total = weighted_sum(rewards, doubles([1, 1]))
    torch.testing.assert_close(total, doubles([1, 0, 2, NAN]), equal_nan=True)
    torch.testing.assert_close(ADVANTAGES["group"](total, 4), doubles([0, -0.9999, 0.9999, 0]), rtol=0, atol=1e-8)
    assert weighted_sum(rewards, doubles([2, 3])).tolist()[:3] == [2, 0, 6]


def test_normalize_then_sum():
    rewards, weights = doubles([[0, 0], [1, 0], [0, 4], [1, 4]]), doubles([1, 1])
    #  each alone -0.866, 0.866; then over their deviation, the root of 2
    decoupled = summed_alone(rewards, 4, weights)
    torch.testing.assert_close(decoupled, doubles([-1.7319, 0, 0, 1.7319]), rtol=0, atol=2e-4)
    decoupled = normalize_then_sum(rewards, 4, weights)
    torch.testing.assert_close(decoupled, doubles([-1.2247, 0, 0, 1.2247]), rtol=0, atol=1e-4)
    together = ADVANTAGES["group"](weighted_sum(rewards, weights), 4)
    torch.testing.assert_close(together, doubles([-1.0502, -0.6301, 0.6301, 1.0502]), rtol=0, atol=1e-4)


def test_normalised_leave_one_out_stays_small():
    for rewards in ([1, 0, 0, 0], [1e-6, 0, 0, 0], [1e6, 0, 0, 0], [0.7] * 4):
        assert leave_one_out(doubles(rewards), 4, normalize_advantages=True).abs().max() < 10


def test_values_between_mean_and_maximum():
    rewards = doubles([1, 0, 0, 0])
    assert optimal_value(rewards, 1e6).item() == pytest.approx(0.25, abs=1e-6)
    assert optimal_value(rewards, 1e-3).item() == pytest.approx(1.0, abs=2e-3)
    assert optimal_value(rewards.float(), 1e6).item() == pytest.approx(0.25, abs=1e-6)
    assert optimal_value(doubles([NAN, NAN]), 0.5).isnan()


def test_what_is_refused():
    with pytest.raises(ValueError, match="5 rewards are no whole number of groups of 4"):
        ADVANTAGES["group"](torch.zeros(5), 4)
    with pytest.raises(ValueError, match="the reward of row 1 is -inf"):
        ADVANTAGES["none"](torch.tensor([0.0, -math.inf]), 2)
    with pytest.raises(ValueError, match="the reward of row 2 is inf"):
        normalize_then_sum(torch.tensor([[0.0], [1.0], [math.inf], [0.0]]), 2, torch.ones(1))


# TRL's numbers, in float32


def rewards_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = GOLDENS["sets"][name]
    rewards = doubles([[NAN if value is None else value for value in row] for row in rows["rewards"]]).T
    return rewards, doubles(rows["weights"] or [1.0] * rewards.shape[1])


@pytest.mark.parametrize(
    "case", GOLDENS["group_cases"], ids=lambda c: f"{c['set']}-{c['aggregation'][:3]}-{c['scale_rewards']}"
)
def test_groups(case):
    rewards, weights = rewards_of(case["set"])
    if case["aggregation"] == "normalize_then_sum":
        advantages = normalize_then_sum(rewards, 4, weights)
    else:
        advantages = ADVANTAGES[case["scale_rewards"]](weighted_sum(rewards, weights), 4)
    torch.testing.assert_close(advantages, doubles(case["advantages"]), rtol=2e-6, atol=2e-6)


def rloo_name(case: dict) -> str:
    clip = "clipped" if case["reward_clip_range"] else "plain"
    return f"{case['set']}-{clip}-{case['beta']}" + "-normalized" * case["normalize_advantages"]


@pytest.mark.parametrize("case", GOLDENS["rloo_cases"], ids=rloo_name)
def test_leave_one_out(case):
    data = GOLDENS["rloo"]
    mask = torch.arange(4) < torch.tensor(data["lengths"])[:, None]
    divergence = ((doubles(data["old_logps"]) - doubles(data["ref_logps"])) * mask).sum(-1)
    rewards = weighted_sum(*rewards_of(case["set"])).clamp(*case["reward_clip_range"] or (None, math.inf))
    advantages = leave_one_out(rewards - case["beta"] * divergence, 4, case["normalize_advantages"])
    torch.testing.assert_close(advantages, doubles(case["advantages"]), rtol=2e-6, atol=2e-6)


def test_optimal_values():
    for case in GOLDENS["optimal_values"]:
        assert optimal_value(doubles(case["rewards"]), case["beta1"]).item() == pytest.approx(case["v_star"], abs=1e-6)


def test_deviations():
    for case in GOLDENS["nanstd"]:
        std = nanstd(doubles([float(value) for value in case["x"]]), 0).item()
        assert std == pytest.approx(float(case["nanstd"]), rel=1e-6, nan_ok=True)


# Laws


@pytest.fixture
def rewards() -> torch.Tensor:
    """Five groups of four: in one a row can't be judged, in one a single row can, in one rewards are equal."""
    torch.manual_seed(1)
    rewards = torch.randn(20, dtype=torch.float64)
    rewards[[2, 5, 6, 7]] = NAN
    rewards[8:12] = 0.7
    return rewards


@pytest.mark.parametrize("name", ADVANTAGES)
def test_what_can_not_be_judged_has_no_advantage_and_no_influence(name, rewards):
    advantages = advantages_of(name, rewards)
    assert advantages.shape == rewards.shape
    assert advantages.isfinite().all()
    assert (advantages[rewards.isnan()] == 0).all()


@pytest.mark.parametrize("name", sorted(OF_GROUPS))
def test_groups_without_a_difference_have_exactly_none(name, rewards):
    advantages = advantages_of(name, rewards.float())
    assert advantages[4] == 0  # without siblings
    assert (advantages[8:12] == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_all_equal_in_any_dtype(name):
    for dtype in (torch.float32, torch.float64):
        advantages = advantages_of(name, torch.full((12,), 0.7, dtype=dtype))
        assert advantages.dtype == dtype
        if name != "a2po":
            assert (advantages == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_better_answer_has_the_larger_advantage(name, rewards):
    for group, advantages in zip(rewards.view(-1, 4), advantages_of(name, rewards).view(-1, 4), strict=True):
        judged = group.isnan().logical_not()
        order = group[judged].argsort(stable=True)
        assert (advantages[judged][order].diff() >= 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_order_of_groups_is_nothing(name, rewards):
    order = torch.arange(20).view(5, 4)[[3, 0, 4, 1, 2]].flatten()
    torch.testing.assert_close(advantages_of(name, rewards[order]), advantages_of(name, rewards)[order])


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"opo"}))
def test_the_order_in_a_group_is_nothing(name, rewards):
    order = torch.arange(20).view(5, 4)[:, [2, 0, 3, 1]].flatten()
    torch.testing.assert_close(advantages_of(name, rewards[order]), advantages_of(name, rewards)[order])


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"a2po"}))
def test_a_constant_added_to_all_rewards_changes_nothing(name, rewards):
    torch.testing.assert_close(advantages_of(name, rewards + 5), advantages_of(name, rewards), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(OF_GROUPS - {"opo"}))
def test_advantages_of_a_group_cancel(name, rewards):
    sums = advantages_of(name, rewards).view(-1, 4).sum(-1)
    torch.testing.assert_close(sums[[0, 1, 2, 3, 4]], torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["group", "none", "leave_one_out", "opo"])
def test_groups_do_not_meet(name, rewards):
    alone = torch.cat([advantages_of(name, part) for part in rewards.split(4)])
    torch.testing.assert_close(advantages_of(name, rewards), alone)


def test_leave_one_out_is_the_centred_reward_made_larger(rewards):
    #  r - (S - r) / (n - 1) = n / (n - 1) (r - S / n)
    judged = rewards[12:]
    torch.testing.assert_close(leave_one_out(judged, 4), 4 / 3 * ADVANTAGES["none"](judged, 4))


def test_opo_of_equal_lengths_is_the_mean(rewards):
    same = ADVANTAGES["opo"](rewards, 4, lengths=torch.full((20,), 7))
    torch.testing.assert_close(same, ADVANTAGES["none"](rewards, 4))


def test_one_reward_function_alone_is_its_group_normalised(rewards):
    alone = normalize_then_sum(rewards[:, None], 4, doubles([3.0]))
    lonely = torch.where(rewards.isnan(), NAN, ADVANTAGES["group"](rewards, 4))
    torch.testing.assert_close(alone, normalized(lonely), rtol=1e-3, atol=1e-4)


def test_equality_knows_no_nan():
    values = doubles([[1, 1, NAN], [1, 2, NAN], [NAN, NAN, NAN]])
    assert all_equal(values).flatten().tolist() == [True, False, False]
