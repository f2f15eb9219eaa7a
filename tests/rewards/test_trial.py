"""The numbers of a trial, on paper."""

import math

import pytest
import torch

from strop.rewards.trial import trial


def test_a_trial_on_paper():
    """Prompt a is rewarded 1 and 3, b twice 2, c once 7. The mean is 3, the squared deviations 4, 0, 1, 1, 16; the
    lengths' mean is 2.6, their squared deviations add up to 9.2, and the products to 3.2 + 0 + 0.6 + 0.6 + 9.6 = 14."""
    rewards = torch.tensor([1.0, 3, 2, 2, 7, math.nan])
    lengths = [1, 3, 2, 2, 5, 9]
    found = trial(rewards, ["a", "a", "b", "b", "c", "a"], lengths, seconds=0.6)
    assert (found.num_rows, found.num_applicable) == (6, 5)
    assert (found.mean, found.lowest, found.highest) == (3, 1, 7)
    assert found.std == pytest.approx(math.sqrt(22 / 4))
    assert found.ties == 0.5
    assert found.length_correlation == pytest.approx(14 / math.sqrt(22 * 9.2))
    assert found.milliseconds == pytest.approx(100)


def test_nothing_is_said_of_too_few():
    found = trial(torch.tensor([math.nan, math.nan]), ["a", [{"role": "user"}]], [1, 2], 0.0)
    assert (found.mean, found.std, found.ties, found.length_correlation) == (None, None, None, None)
    alike = trial(torch.tensor([1.0, 1.0]), ["a", "a"], [1, 2], 0.0)
    assert (alike.std, alike.ties, alike.length_correlation) == (0, 1, None)
