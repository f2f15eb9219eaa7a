"""Numbers derivable on paper for scores, and what a likelihood of rankings must be."""

import itertools
import math

import pytest
import torch

from strop.losses.reward import bradley_terry, centring, plackett_luce, step_cross_entropy


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_bradley_terry_by_hand():
    #  1.0 + 0.5 - 0.5 = 1
    value = bradley_terry(column(1.0), column(-0.5), margin=0.5)
    torch.testing.assert_close(value, column(math.log1p(math.exp(-1))))
    assert value.item() == pytest.approx(0.313262, abs=5e-7)


def test_margins_may_differ_by_pair():
    value = bradley_terry(column(1.0, 1.0), column(0.0, 0.0), margin=column(0.0, 1.0))
    torch.testing.assert_close(value, column(math.log1p(math.exp(-1)), math.log(2)))


def test_centring_by_hand():
    assert 0.01 * centring(column(1.0), column(-0.5)).item() == pytest.approx(0.0025)


def test_plackett_luce_by_hand():
    #  weights 4, 2, 1: the first is drawn with 4/7, the second of the rest with 2/3, the last for certain
    scores = column(4, 2, 1).log()[None]
    torch.testing.assert_close(plackett_luce(scores, torch.ones(1, 3)), column(math.log(21 / 8)))


def test_two_answers_give_bradley_terry():
    torch.manual_seed(0)
    scores = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    listwise, pairwise = plackett_luce(scores, torch.ones(5, 2)), bradley_terry(scores[:, 0], scores[:, 1])
    torch.testing.assert_close(listwise, pairwise, rtol=1e-14, atol=0)
    grads = [torch.autograd.grad(loss.sum(), scores)[0] for loss in (listwise, pairwise)]
    torch.testing.assert_close(*grads, rtol=1e-14, atol=0)


def test_probabilities_of_all_rankings_add_up_to_one():
    scores = column(0.3, -1.2, 2.0, 0.1)
    rankings = torch.stack([scores[list(order)] for order in itertools.permutations(range(4))])
    torch.testing.assert_close((-plackett_luce(rankings, torch.ones(24, 4))).exp().sum(), column(1.0)[0])


def test_only_differences_of_scores_count():
    scores = column(4, 2, 1)[None]
    torch.testing.assert_close(plackett_luce(scores + 100, torch.ones(1, 3)), plackett_luce(scores, torch.ones(1, 3)))


def test_groups_of_different_sizes():
    scores = torch.tensor([[1.0, 0.5, torch.nan], [2.0, torch.nan, torch.nan], [3.0, 2.0, 1.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    value = plackett_luce(scores, mask)
    value.sum().backward()
    alone = [plackett_luce(scores[g : g + 1, :size], torch.ones(1, size)) for g, size in enumerate((2, 1, 3))]
    torch.testing.assert_close(value, torch.cat(alone))
    assert value[1] == 0  # one answer has only one ranking
    assert scores.grad.isfinite().all()
    assert (scores.grad[mask == 0] == 0).all()


@pytest.mark.parametrize("labels", [torch.tensor([True, False]), torch.tensor([1, 0])])
def test_steps_by_hand(labels):
    #  logits 0 and 1: a correct step has probability sigmoid(1)
    value = step_cross_entropy(column(0, 1).expand(2, 2), labels)
    torch.testing.assert_close(value, column(math.log1p(math.exp(-1)), math.log1p(math.exp(1))))
