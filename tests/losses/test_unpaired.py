"""Numbers derivable on paper for single completions with a label."""

import math

import pytest
import torch

from strop.losses.unpaired import (
    UNPAIRED_LOSSES,
    apo_zero_unpaired,
    bco,
    density_ratio,
    kto,
    kto_baseline,
    running_mean,
    weighted,
)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


YES, NO = torch.tensor([True]), torch.tensor([False])
NOTHING = column(0.0)[0]
BETA = 0.1


@pytest.mark.parametrize(
    ("baseline", "label", "expected"),
    [
        (0.0, YES, 0.487503),  # 1 - sigmoid(0.1 * 0.5)
        (0.3, YES, 0.495000),  # 1 - sigmoid(0.1 * 0.2)
        (0.3, NO, 0.505000),
    ],
)
def test_kto_by_hand(baseline, label, expected):
    value = kto(column(0.5), label, column(baseline)[0], BETA)
    assert value.item() == pytest.approx(expected, abs=5e-7)


def test_bco_by_hand():
    #  reward 0.1 * (0.5 - 0.3) = 0.02
    value = bco(column(0.5, 0.5), torch.cat([YES, NO]), column(0.3)[0], BETA)
    torch.testing.assert_close(value, column(math.log1p(math.exp(-0.02)), math.log1p(math.exp(0.02))))


def test_apo_zero_is_kto_around_zero():
    labels = torch.tensor([True, False, True])
    log_ratio = column(0.5, 0.5, -3.0)
    expected = kto(log_ratio, labels, NOTHING, BETA)
    torch.testing.assert_close(apo_zero_unpaired(log_ratio, labels, column(7.0)[0], BETA), expected)


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_no_gradient_reaches_the_baseline(name):
    log_ratio, baseline = column(0.5).requires_grad_(), column(0.3)[0].requires_grad_()
    UNPAIRED_LOSSES[name](log_ratio, YES, baseline, BETA).sum().backward()
    assert log_ratio.grad < 0
    assert baseline.grad is None


@pytest.mark.parametrize("label", [YES, NO])
@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_a_batch_of_one_class_is_no_special_case(name, label):
    both = torch.cat([YES, NO])
    alone = UNPAIRED_LOSSES[name](column(0.5), label, NOTHING, BETA)
    among = UNPAIRED_LOSSES[name](column(0.5, 0.5), both, NOTHING, BETA)[both == label]
    torch.testing.assert_close(alone, among)


def test_the_kl_estimate_is_at_least_zero_and_zero_of_nothing():
    total = column(3.0)[0].requires_grad_()
    estimates = [kto_baseline(total, 2), kto_baseline(-total, 2), kto_baseline(0 * total, 0)]
    assert [e.item() for e in estimates] == [1.5, 0.0, 0.0]
    assert not any(e.requires_grad for e in estimates)


def test_a_running_mean_is_the_mean_of_all():
    mean, count = 0.0, 0
    for values in ([3.0, 1.0], [], [4.0], [0.0, 2.0, 8.0]):
        mean = running_mean(mean, count, sum(values), len(values))
        count += len(values)
    assert mean == pytest.approx(18 / 6)


def test_weights_are_of_their_class_only():
    assert weighted(column(1, 1, 2), torch.tensor([True, False, True]), 1.5, 0.7).tolist() == [1.5, 0.7, 3.0]


def test_density_ratio_is_odds_within_bounds():
    torch.testing.assert_close(density_ratio(column(0.75, 0.0, 1.0)), column(3.0, 0.5, 10.0), rtol=1e-6, atol=0)
