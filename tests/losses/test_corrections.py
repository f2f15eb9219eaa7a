"""Corrections for tokens that another policy has sampled."""

import math

import pytest
import torch

from strop.losses.corrections import (
    CORRECTION_MODES,
    entropy_threshold,
    importance_correction,
    off_policy_keep,
    top_entropy_keep,
)

#  Ratios 2 and 1/2 of the first row's tokens, 3 and 2 of the second's; their products 1 and 6.
OLD = torch.tensor([[2.0, 0.5, 9.0], [3.0, 2.0, 9.0]], dtype=torch.float64).log()
SAMPLER = torch.zeros_like(OLD)
MASK = torch.tensor([[1, 1, 0], [1, 1, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[2.0, 0.8], [2.5, 2.0]]),
        ("token_mask", [[2.0, 0.0], [0.0, 2.0]]),
        ("sequence_truncate", [[1.0], [2.5]]),
        ("sequence_mask", [[1.0], [0.0]]),
    ],
)
def test_four_modes(mode, expected):
    correction = importance_correction(OLD, SAMPLER, MASK, mode, clip_min=0.8, clip_max=2.5)
    torch.testing.assert_close(correction[:, : len(expected[0])], torch.tensor(expected, dtype=torch.float64))
    if mode.startswith("token"):
        assert (correction[:, 2] == 1).all()  # not trained: left alone


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_the_same_policy_needs_no_correction(mode):
    assert (importance_correction(OLD, OLD, MASK, mode) == 1).all()
    unknown = torch.full_like(OLD, torch.nan)
    assert (importance_correction(OLD, unknown, MASK, mode) == 1).all()


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_corrections_are_finite_and_constant(mode):
    far = torch.full((1, 300), 50.0).requires_grad_()
    for sampler in (-far, 3 * far):
        correction = importance_correction(far, sampler, torch.ones(1, 300), mode, clip_max=3.0)
        assert correction.isfinite().all()
        assert not correction.requires_grad


def test_one_sided_bounds():
    free = importance_correction(OLD, SAMPLER, MASK, "token_mask", clip_min=None, clip_max=None)
    torch.testing.assert_close(free[:, :2], torch.tensor([[2.0, 0.5], [3.0, 2.0]], dtype=torch.float64))
    low = importance_correction(OLD, SAMPLER, MASK, "token_truncate", clip_min=0.8, clip_max=None)
    torch.testing.assert_close(low[:, :2], torch.tensor([[2.0, 0.8], [3.0, 2.0]], dtype=torch.float64))


def test_impossible_bounds_are_refused():
    with pytest.raises(ValueError, match="mode='tokens' is no importance correction"):
        importance_correction(OLD, SAMPLER, MASK, "tokens")
    with pytest.raises(ValueError, match="has no bound to truncate at"):
        importance_correction(OLD, SAMPLER, MASK, "token_truncate", None, None)
    with pytest.raises(ValueError, match="clip_min=3 is not below clip_max=3"):
        importance_correction(OLD, SAMPLER, MASK, "token_mask", 3, 3)


def test_bad_rows_go_once_the_policy_has_left_them():
    #  mean of log pi_sampler/pi over the two trained tokens: 0.3 in each row but the last, where it is 0.1
    logps = torch.full((4, 3), -1.0)
    sampler = logps + torch.tensor([[0.4, 0.2, 99.0]] * 3 + [[0.2, 0.0, 99.0]])
    advantages = torch.tensor([[1.0], [0.0], [-1.0], [-1.0]])
    mask = torch.tensor([[1, 1, 0]] * 4)
    assert off_policy_keep(logps, sampler, advantages, mask, 0.2).flatten().tolist() == [1, 1, 0, 1]
    assert off_policy_keep(logps, sampler * torch.nan, advantages, mask, 0.0).flatten().tolist() == [1, 1, 1, 1]


ENTROPIES = torch.tensor([[1.0, 2.0, 3.0, 9.0], [5.0, 0.5, 9.0, 9.0]])
TRAINED = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def test_quantiles_know_no_padding():
    #  of 0.5, 1, 2, 3, 5 the 0.6-quantile is 2.4; with padding it would be 5.8
    threshold = entropy_threshold(ENTROPIES, TRAINED, 0.4)
    assert threshold.item() == pytest.approx(2.4)
    assert top_entropy_keep(ENTROPIES, TRAINED, threshold).tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("quantile", [0.01, 0.2, 0.5, 0.83, 1.0])
def test_quantiles_are_those_of_torch(quantile):
    torch.manual_seed(0)
    entropies = torch.rand(3, 50)
    expected = torch.quantile(entropies.flatten(), 1 - quantile)
    torch.testing.assert_close(entropy_threshold(entropies, torch.ones(3, 50), quantile), expected)


def test_no_token_no_threshold():
    threshold = entropy_threshold(ENTROPIES, TRAINED * 0, 0.4)
    assert threshold.item() == -math.inf
    assert not top_entropy_keep(ENTROPIES, TRAINED * 0, threshold).any()
