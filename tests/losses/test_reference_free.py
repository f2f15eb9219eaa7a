"""Numbers derivable on paper for pairs without a reference policy."""

import math

import pytest
import torch

from strop.losses.preference import Pairs, options_of
from strop.losses.reference_free import (
    PER_TOKEN_MEAN,
    REFERENCE_FREE_LOSSES,
    alphapo_pairs,
    alphapo_reward,
    log_odds,
    odds_margin,
    orpo,
    simpo,
)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


#  chosen: -4.0 in 4 tokens; rejected: -6.4 in 2 tokens; per token -1 and -3.2
PAIR = Pairs(column(-4.0), column(-6.4), torch.tensor([4]), torch.tensor([2]))


def test_simpo_by_hand():
    #  2 * (-1 + 3.2) - 1 = 3.4
    value = simpo(PAIR, 2.0, gamma=1.0)
    torch.testing.assert_close(value, column(math.log1p(math.exp(-3.4))))
    assert value.item() == pytest.approx(0.032828, abs=5e-7)


def test_simpo_with_flipped_labels():
    mixed = 0.9 * math.log1p(math.exp(-3.4)) + 0.1 * math.log1p(math.exp(3.4))
    torch.testing.assert_close(simpo(PAIR, 2.0, gamma=1.0, smoothing=0.1), column(mixed))


def test_orpo_by_hand():
    #  odds e^-1 / (1 - e^-1) = 0.58198 and e^-3.2 / (1 - e^-3.2) = 0.042495; with the chosen's likelihood 4.0 / 4
    ratio = (math.exp(-1) / (1 - math.exp(-1))) / (math.exp(-3.2) / (1 - math.exp(-3.2)))
    torch.testing.assert_close(odds_margin(PAIR), column(math.log(ratio)))
    value = orpo(PAIR, 0.1)
    torch.testing.assert_close(value, column(0.1 * math.log1p(1 / ratio)))
    assert 1.0 + value.item() == pytest.approx(1.007047, abs=5e-7)


def test_odds_keep_their_digits_at_both_ends():
    #  for p = 1 - d the odds are about 1 / d, for tiny p they are p
    torch.testing.assert_close(log_odds(column(-1e-12, -50.0)), column(math.log(1e12), -50.0), rtol=1e-12, atol=0)


def test_certain_tokens_have_finite_odds():
    logp = torch.tensor([0.0, -1e-9, -1e-6], requires_grad=True)
    log_odds(logp).sum().backward()
    assert log_odds(logp).isfinite().all()
    assert logp.grad.isfinite().all()


def test_alphapo_reward_by_hand():
    #  p = e^-1: (1 - e^0.25) / 0.25; alpha 0 is log p, alpha -1 is p - 1
    logps = column(-1.0)
    torch.testing.assert_close(alphapo_reward(logps, 0.25), column((1 - math.exp(0.25)) / 0.25))
    torch.testing.assert_close(alphapo_reward(logps, 0.0), logps)
    torch.testing.assert_close(alphapo_reward(logps, -1.0), column(math.exp(-1) - 1))


@pytest.mark.parametrize("mean", [True, False])
def test_alphapo_without_shaping_is_the_plain_loss(mean):
    name = "simpo" if mean else "sigmoid"
    assert (name in PER_TOKEN_MEAN) == mean
    loss = REFERENCE_FREE_LOSSES[name]
    torch.testing.assert_close(loss(alphapo_pairs(PAIR, 0.0, mean), 2.0), loss(PAIR, 2.0))


@pytest.mark.parametrize("name", REFERENCE_FREE_LOSSES)
def test_rows_that_read_averages_ignore_length(name):
    doubled = Pairs(2 * PAIR.chosen, 2 * PAIR.rejected, 2 * PAIR.chosen_length, 2 * PAIR.rejected_length)
    loss = REFERENCE_FREE_LOSSES[name]
    # At this beta the hinge is still bent for both lengths.
    assert torch.allclose(loss(PAIR, 0.1), loss(doubled, 0.1)) == (name in PER_TOKEN_MEAN)


def test_options():
    assert {name: sorted(options_of(loss)) for name, loss in REFERENCE_FREE_LOSSES.items()} == {
        "sigmoid": ["smoothing"],
        "hinge": [],
        "ipo": [],
        "simpo": ["gamma", "smoothing"],
        "orpo": [],
        "tpo-l": ["gamma", "smoothing"],
    }
