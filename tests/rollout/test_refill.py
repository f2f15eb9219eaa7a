"""Which groups teach something, and how a block is filled with them."""

import pytest
import torch

from strop.rollout.refill import has_signal, spreads, with_signal
from strop.rollout.types import Rollout

NAN = float("nan")


def test_a_group_has_a_signal_where_rewards_differ():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 1.0, NAN, NAN])
    assert has_signal(rewards, 2).tolist() == [False, True, False, False]
    assert has_signal(torch.tensor([NAN, 1.0, 2.0]), 3).tolist() == [True]
    assert spreads(rewards, 2) == pytest.approx([0.0, 0.5**0.5, 0.0, 0.0])


def groups(*spreads):
    """Rollouts of two, whose rewards differ by such numbers."""
    return [Rollout({}, [], [], [], "stop", {"f": value}) for spread in spreads for value in (0.0, spread)]


def rewards_of(rollouts):
    return torch.tensor([rollout.rewards["f"] for rollout in rollouts])


@pytest.mark.parametrize(
    ("rounds", "more", "expected", "asked"),
    [
        (3, [(5, 6)], [2, 4, 5, 6], [2]),
        (3, [(5, 0), (0,), (0,)], [2, 4, 5, 0], [2, 1, 1]),
        (1, [(0, 0)], [2, 4, 0, 0], [2]),
    ],
)
def test_groups_without_one_are_replaced_as_far_as_rounds_allow(rounds, more, expected, asked):
    counts, scripted = [], iter(more)

    def play(count):
        counts.append(count)
        return groups(*next(scripted))

    block, metrics = with_signal(groups(0, 2, 0, 4), 2, rounds, rewards_of, play)
    assert [one.rewards["f"] for one in block[1::2]] == expected
    assert counts == asked
    live = sum(map(bool, expected))
    assert metrics == {
        "dynamic_sampling/rounds": (len(asked), 1.0),
        "dynamic_sampling/extra_prompts": (sum(asked), 1.0),
        "dynamic_sampling/frac_with_signal": (live, 4 + sum(asked)),
    }
