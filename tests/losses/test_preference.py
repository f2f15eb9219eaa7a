"""Numbers derivable on paper, and laws over every row."""

import math

import pytest
import torch

from strop.losses.preference import PREFERENCE_LOSSES, Pairs, sigmoid

#  chosen: policy -4.0, reference -5.2, 4 tokens; rejected: policy -6.4, reference -6.0, 2 tokens
PAIR = Pairs(torch.tensor([1.2]), torch.tensor([-0.4]), torch.tensor([4]), torch.tensor([2]))
BETA = 0.1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sigmoid", math.log1p(math.exp(-0.16))),  # margin 1.6, times beta
        ("hinge", 1 - 0.16),
        ("ipo", (1.2 / 4 + 0.4 / 2 - 5) ** 2),
    ],
)
def test_by_hand(name, expected):
    torch.testing.assert_close(PREFERENCE_LOSSES[name](PAIR, BETA), torch.tensor([expected]))


def test_smoothing_mixes_both_orders():
    straight, flipped = math.log1p(math.exp(-0.16)), math.log1p(math.exp(0.16))
    torch.testing.assert_close(sigmoid(PAIR, BETA, smoothing=0.1), torch.tensor([0.9 * straight + 0.1 * flipped]))


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_raising_the_margin_lowers_the_loss(name):
    chosen = torch.zeros(1, requires_grad=True)
    rejected = torch.zeros(1, requires_grad=True)
    PREFERENCE_LOSSES[name](Pairs(chosen, rejected, torch.tensor([3]), torch.tensor([3])), BETA).sum().backward()
    assert chosen.grad < 0 < rejected.grad


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_far_inputs_stay_finite(name):
    for margin in (-1e4, 1e4):
        chosen = torch.tensor([margin], requires_grad=True)
        loss = PREFERENCE_LOSSES[name](Pairs(chosen, torch.zeros(1), torch.ones(1), torch.ones(1)), BETA)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert chosen.grad.isfinite().all()
