"""Shares of a step add up, and what stands under a zero mask counts for nothing."""

from functools import partial

import pytest
import torch

from strop.losses.reduce import StepCounts, constant_length, masked_mean, sequence_mean, sequence_sum, token_mean

# Four rows with token losses [2], [1, 3], [1, 1, 1], [0.5] * 10: 16 tokens that sum to 14.
LOSS = torch.zeros(4, 10)
MASK = torch.zeros(4, 10)
for i, row in enumerate([[2.0], [1.0, 3.0], [1.0] * 3, [0.5] * 10]):
    LOSS[i, : len(row)], MASK[i, : len(row)] = torch.tensor(row), 1.0
COUNTS = StepCounts(tokens=16, sequences=4)


def test_token_mean_by_hand():
    assert token_mean(LOSS, MASK, COUNTS).item() == 14 / 16


def test_sequence_mean_by_hand():
    assert sequence_mean(LOSS, MASK, COUNTS).item() == pytest.approx((2 + 2 + 1 + 0.5) / 4)  # the mean of row means


def test_sums_of_rows_by_hand():
    assert sequence_sum(LOSS, MASK, COUNTS).item() == 14 / 4
    assert constant_length(LOSS, MASK, COUNTS, max_completion_length=16).item() == 14 / 64


REDUCTIONS = [token_mean, sequence_mean, sequence_sum, partial(constant_length, max_completion_length=16)]


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_shares_of_micro_batches_add_up(reduce):
    whole = reduce(LOSS, MASK, COUNTS)
    shares = sum(reduce(LOSS[i : i + 1], MASK[i : i + 1], COUNTS) for i in range(4))
    torch.testing.assert_close(shares, whole)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_masked_nan_reaches_neither_value_nor_gradient(reduce):
    loss = torch.where(MASK.bool(), LOSS, torch.nan).requires_grad_()
    value = reduce(loss, MASK, COUNTS)
    value.backward()
    torch.testing.assert_close(value, reduce(LOSS, MASK, COUNTS))
    assert loss.grad.isfinite().all()
    assert (loss.grad[MASK == 0] == 0).all()


def test_a_row_without_tokens_has_mean_zero():
    assert masked_mean(torch.ones(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]]), dim=-1).tolist() == [1.0, 0.0]


def test_counts_add_up():
    assert sum([StepCounts(3, 1), StepCounts(4, 2)], StepCounts(0, 0)) == (7, 3)
